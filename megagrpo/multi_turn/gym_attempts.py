"""reasoning-gym as an environment of several attempts."""

from __future__ import annotations

from typing import Any

from megagrpo.rewards.functions.gym_score import reasoning_gym

WRONG = "That is not correct. Try again."


class ReasoningGym:
    """Each turn is an attempt, scored by the row's family; a wrong one is told so, and the next may follow.

    The last attempt, the one that is right or that none follows, gives its turn the reward score x discount^(attempts before it); the
    others give 0. `extract` is that of the reward `reasoning_gym`."""

    def __init__(self, attempts: int = 3, discount: float = 1.0, extract: str = "tag", feedback: str = WRONG):
        if attempts < 1 or not 0 <= discount <= 1:
            raise ValueError(f"reasoning_gym: attempts {attempts} must be 1 or more and discount {discount} from 0 to 1")
        self.attempts, self.discount, self.extract, self.feedback = attempts, discount, extract, feedback
        self.entry: dict[str, Any] = {}

    def reset(self, question: str, answer: Any, metadata: dict[str, Any]) -> None:
        """Take the row of a reasoning-gym data set; nothing is said that the prompt does not say."""
        self.entry = {"question": [question], "answer": [answer], "metadata": [metadata]}

    def step(self, messages: list[dict[str, Any]], turn: int, turns_left: int | None) -> tuple[list[dict[str, Any]], bool, float]:
        """Score the attempt in the last message."""
        (score,) = reasoning_gym([messages[-1]["content"]], extract=self.extract, **self.entry)
        if score < 1 and turn < self.attempts and turns_left != 0:
            return [*messages, {"role": "user", "content": self.feedback}], False, 0.0
        return messages, True, score * self.discount ** (turn - 1)
