"""Two data sources: a buffer that replays hard prompts, and a curriculum from short sums to long ones."""

import random


class Buffer:
    """Half of each step are prompts that some responses passed and some failed, the hardest first. The others are new.

    A prompt leaves the buffer when all of its responses pass, or none.
    """

    def __init__(self, rows, seed, share=0.5):
        self.rows, self.random, self.share = rows, random.Random(seed), share
        self.hard = {}  # row -> mean reward
        self.fresh = []  # rows of this epoch that are still to come

    def next(self, count, progress):
        hardest = sorted(self.hard, key=self.hard.get)[: int(count * self.share)]
        for row in hardest:
            del self.hard[row]  # `learn` puts it back if it stays hard
        return hardest + [self.one_fresh() for _ in range(count - len(hardest))]

    def one_fresh(self):
        if not self.fresh:
            self.fresh = self.random.sample(list(self.rows), len(self.rows))
        return self.fresh.pop()

    def learn(self, groups, progress):
        self.hard |= {group.row: group.mean for group in groups if len(set(group.rewards)) > 1}
        return {"hard": len(self.hard)}

    def state_dict(self):
        return {"hard": self.hard, "fresh": self.fresh, "random": self.random.getstate()}

    def load_state_dict(self, state):
        self.hard, self.fresh = state["hard"], state["fresh"]
        self.random.setstate(state["random"])


class EasyFirst:
    """Draws from the easiest rows only. Their share of all rows grows whenever half of a step's responses pass."""

    def __init__(self, rows, seed, column="answer", start=0.1):
        self.easiest = sorted(rows, key=lambda row: len(str(rows[row][column])))
        self.random, self.open = random.Random(seed), start

    def next(self, count, progress):
        pool = self.easiest[: max(count, int(self.open * len(self.easiest)))]
        return self.random.sample(pool, count) if count <= len(pool) else self.random.choices(pool, k=count)

    def learn(self, groups, progress):
        if sum(group.mean or 0.0 for group in groups) >= len(groups) / 2:
            self.open = min(1.0, self.open * 1.5)
        return {"open": self.open}

    def state_dict(self):
        return {"open": self.open, "random": self.random.getstate()}

    def load_state_dict(self, state):
        self.open = state["open"]
        self.random.setstate(state["random"])
