"""Advantages of the user's own: the page's file, trial and errors, and the same numbers on every rank."""

import re
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import run_ranks

from megagrpo.algorithms.custom_advantage import load_estimator
from megagrpo.config import AlgorithmSection, ParallelSection, ProblemError, RunConfig
from megagrpo.data.packing.step_samples import StepSamples
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.trainer.policy_update import Learning
from megagrpo.types import Dialogue, Prompt, Rollout, ScoredRollout, Turn

PAGE = Path(__file__).parents[3] / "docs" / "credit.md"
BASE = {
    "model": {"path": "x"},
    "data": {"train": {"source": "x"}},
    "rewards": {"functions": [{"function": "exact_number"}]},
    "rollout": {"num_generations": 2, "prompts_per_step": 2},
    "multi_turn": {"scheduler": "math_tip_trick"},
}
FAULTS = {
    "return groups.rewards.tolist()": "returned list, not a tensor",
    "return groups.rewards[0]": r"returned torch.float64 \[3\], not floating-point \[2, 3\]",
    "return groups.rewards > 0": r"returned torch.bool \[2, 3\]",
    "return groups.rewards": "returned NaN or infinity; return 0 where groups.rewards is NaN",
    "return groups.missing": "raised AttributeError.*takes \\(groups, algorithm\\) and returns advantages \\[P, G\\]",
}


class Alone:
    """A policy that has a layout only."""

    def __init__(self, layout):
        self.layout = layout


def written(folder: Path, code: str, signature: str = "groups, algorithm") -> str:
    (folder / "mine.py").write_text(f"import random\nimport torch\n\n\ndef mine({signature}):\n    {code}\n")
    return f"{folder / 'mine.py'}:mine"


def test_the_example_of_the_page_gives_advantages_to_the_best_only(tmp_path):
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "best_of" in block)
    (tmp_path / "my_advantages.py").write_text(code)
    name = f"{tmp_path / 'my_advantages.py'}:best_of"
    rewards = [[1.0, 0.0], [0.5, 0.5]]
    found = run_ranks(estimated, 1, name, rewards, False)[0]
    assert found.tolist() == [0.5, -0.5, 0.0, 0.0]


@pytest.mark.parametrize("code", FAULTS)
def test_a_fault_is_named_before_the_run(code, tmp_path):
    with pytest.raises(ProblemError, match=FAULTS[code]) as refused:
        load_estimator(AlgorithmSection(advantage_estimator=written(tmp_path, code)))
    assert str(refused.value).startswith("algorithm.advantage_estimator: `") and "mine.py:mine" in str(refused.value)


def test_other_parameters_and_a_missing_name_are_named(tmp_path):
    name = written(tmp_path, "return groups", signature="groups")
    with pytest.raises(ProblemError, match="cannot be called as an estimator: too many positional arguments"):
        load_estimator(AlgorithmSection(advantage_estimator=name))
    with pytest.raises(ProblemError, match="cannot be loaded"):
        load_estimator(AlgorithmSection(advantage_estimator=name.replace(":mine", ":other")))


def scored(reward: float, turns: int) -> ScoredRollout:
    of_turns = tuple(Turn(i, i + 1, reward + i) for i in range(turns))
    dialogue = Dialogue(np.ones(3, bool), (), of_turns, "done")
    rollout = Rollout(Prompt(0, (1, 2), "q"), (3, 4, 5), (-1.0, -1.0, -1.0), "stop", 0, "", dialogue)
    return ScoredRollout(rollout, {"f": reward}, reward)


def estimated(name: str, rewards: list[list[float]], by_turn: bool) -> torch.Tensor:
    """The advantages of trajectories with these rewards [2, 2] and one or two turns."""
    algorithm = dict(advantage_estimator=name, advantage_by="turn" if by_turn else "trajectory")
    config, layout = RunConfig.model_validate(BASE | {"algorithm": algorithm}), init_layout(ParallelSection())
    rows = [scored(reward, 1 + i % 2) for i, reward in enumerate(chain(*rewards))]
    samples = StepSamples.of(rows, turns=by_turn)
    learning = Learning(config, Alone(layout), None, None, None, None, None, None)
    advantages = learning.advantages(samples)
    if not by_turn:
        return advantages
    assert samples.turns is not None and len(samples.turns) == 6
    return torch.from_numpy(learning.turn_advantages(samples, advantages))


def test_every_rank_has_the_numbers_of_rank_0_even_of_a_random_function(tmp_path):
    code = "return torch.rand(groups.rewards.shape, dtype=torch.float64) + random.random()"
    one, two = run_ranks(estimated, 2, written(tmp_path, code), [[1.0, 0.0], [0.5, 0.5]], False)
    assert torch.equal(one, two) and one.unique().numel() == 4


def test_a_function_gives_each_turn_its_advantage(tmp_path):
    code = "return torch.from_numpy(10.0 * groups.turns.numbers + 0 * groups.lengths.sum().item())"
    for found in run_ranks(estimated, 2, written(tmp_path, code), [[1.0, 0.0], [0.5, 0.5]], True):
        assert found.tolist() == [0.0, 0.0, 10.0, 0.0, 0.0, 10.0]


def late(name: str) -> str:
    """The error of a function that fails in a step, with other rewards than those of the trial."""
    try:
        estimated(name, [[7.0, 0.0], [0.5, 0.5]], False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_fault_in_a_step_ends_it_on_every_rank_with_the_key(tmp_path):
    code = "return groups.rewards.nan_to_num() / (groups.rewards.nan_to_num().max() != 7)"
    one, two = run_ranks(late, 2, written(tmp_path, code))
    assert one.startswith("ValueError: algorithm.advantage_estimator: `") and "returned NaN or infinity" in one
    assert two.startswith("RankError") and "algorithm.advantage_estimator" in two
