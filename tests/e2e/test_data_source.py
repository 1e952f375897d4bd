"""Whole runs whose prompts a user's data source chooses, on a real vLLM server: they resume as if never interrupted."""

import os
import signal

import pytest

from megagrpo.config.io import shipped_configs
from tests.e2e import world

SOURCE = '''
"""Replays the row with the highest reward so far, with a harder new row after each other one."""


class Replay:
    def __init__(self, rows, seed, every):
        self.every, self.count, self.best = every, 0, (0.0, 0)
        self.rows = rows

    def next(self, count, progress):
        return [self.one(progress.step) for _ in range(count)]

    def one(self, step):
        self.count += 1
        if self.count % self.every == 0:
            return {"prompt": f"What is {self.count} + {step}?", "answer": str(self.count + step)}
        return self.best[1] if self.count % 2 else self.count % len(self.rows)

    def learn(self, groups, progress):
        self.best = max([self.best, *((group.mean, group.row) for group in groups if isinstance(group.row, int))])
        return {"best": self.best[0]}

    def state_dict(self):
        return {"count": self.count, "best": self.best}

    def load_state_dict(self, state):
        self.count, self.best = state["count"], state["best"]


class Picky(Replay):
    def keep(self, group):
        return group.mean > 0.2 and max(group.lengths) <= 12
'''


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    file = tmp_path_factory.mktemp("source") / "replay.py"
    file.write_text(SOURCE)
    return f"data.source={file}:Replay", "data.source_args.every=3"


def drawn(run):
    return [(row["step"], row["prompt_id"], row["prompt"], row["completion"], row["reward"]) for row in run.completions]


def succeeded(run):
    assert run.code == 0, run.err
    return run


def test_a_run_draws_what_its_source_chooses_and_resumes_as_if_never_interrupted(source, tmp_path):
    whole = succeeded(world.train(tmp_path / "whole", *source, "run.max_steps=4"))
    succeeded(world.train(tmp_path / "parts", *source, "run.max_steps=2"))
    parts = succeeded(world.train(tmp_path / "parts", *source, "run.max_steps=4", "--resume"))
    assert drawn(parts) == drawn(whole)
    assert [line["source/best"] for line in parts.metrics] == [line["source/best"] for line in whole.metrics]
    ids = [row[1] for row in drawn(whole)[::4]]
    assert [number >= 24 for number in ids] == [(i + 1) % 3 == 0 for i in range(16)]  # 24 rows in the file
    assert [number for number in ids if number >= 24] == [24 + place for place in range(2, 16, 3)]
    best = max(whole.metrics[0:1], key=lambda line: line["source/best"])["source/best"]
    replayed = {row[1] for row in drawn(whole) if row[0] == 2} & {row[1] for row in drawn(whole) if row[0] == 1}
    assert best > 0 and replayed  # the best row of step 1 again
    lost = world.train(tmp_path / "parts", "run.max_steps=5", "--resume")
    assert lost.code == 2 and "data.source: the checkpoint has the state of a data source; name its class" in lost.err


@pytest.mark.full
def test_a_source_that_raises_ends_the_run_with_a_checkpoint_from_which_a_corrected_one_continues(source, tmp_path):
    file = tmp_path / "broken.py"
    file.write_text(SOURCE.replace("self.count += 1", "self.count += 1 // (step != 2)"))
    words = (f"data.source={file}:Replay", source[1], "run.max_steps=4")
    run = world.train(tmp_path / "parts", *words)
    assert run.code == 1 and run.saved == ["step_000002"] and len(run.metrics) == 2
    assert f"rank 0 stops: data.source: `{file}:Replay`: next raised ZeroDivisionError: " in run.err
    parts = succeeded(world.train(tmp_path / "parts", *source, "run.max_steps=4", "--resume"))
    ids = [row[1] for row in drawn(parts)[::4]]
    assert [number for number in ids if number >= 24] == [24 + place for place in range(2, 16, 3)]  # as without it
    missing = world.train(tmp_path / "missing", f"data.source={file}:Missing", source[1])
    assert missing.code == 2 and f"data.source: {file} defines no `Missing`" in missing.err and not missing.lines


@pytest.mark.full
def test_a_run_ahead_of_its_trainer_that_is_killed_trains_on_every_prompt_of_its_source_once(source, tmp_path):
    ahead = ("rollout.max_staleness=1", "algorithm.importance_correction=token_truncate", "train.learning_rate=1e-30")
    words = [*source, *ahead, "run.save_steps=1"]
    with world.running(tmp_path / "parts", "run.max_steps=1000", *words) as trainer:
        world.wait_for(lambda: world.steps_done(tmp_path / "parts") >= 3, "third step")
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.wait()
    steps = f"run.max_steps={world.steps_done(tmp_path / 'parts') + 3}"
    parts = succeeded(world.train(tmp_path / "parts", steps, *words, "--resume"))
    whole = succeeded(world.train(tmp_path / "whole", steps, *words))
    assert drawn(parts) == drawn(whole)


@pytest.mark.full
def test_a_source_replaces_the_groups_that_it_does_not_keep(source, tmp_path):
    picky = source[0].replace("Replay", "Picky"), source[1]
    run = succeeded(world.train(tmp_path, *picky, "algorithm.dynamic_sample=true", "run.max_steps=3"))
    for step in (1, 2, 3):
        rewards = [row[4] for row in drawn(run) if row[0] == step]
        assert len(rewards) == 16 and all(sum(rewards[i : i + 4]) / 4 > 0.2 for i in range(0, 16, 4))


@pytest.mark.full
@pytest.mark.parametrize("name", ["Buffer", "EasyFirst"])
def test_the_sources_of_the_example_resume_as_if_never_interrupted(name, tmp_path):
    words = [f"data.source={shipped_configs()}/examples/data_source/sources.py:{name}"]
    whole = succeeded(world.train(tmp_path / "whole", *words, "run.max_steps=4"))
    succeeded(world.train(tmp_path / "parts", *words, "run.max_steps=2"))
    parts = succeeded(world.train(tmp_path / "parts", *words, "run.max_steps=4", "--resume"))
    assert drawn(parts) == drawn(whole) and whole.metrics[-1]["source/hard" if name == "Buffer" else "source/open"] > 0
