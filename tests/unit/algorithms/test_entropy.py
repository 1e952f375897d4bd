"""Top-entropy mask, entropy bonus and its adaptive weight against TRL's own numbers (tests/vectors) and plain
arithmetic."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from megagrpo.algorithms.entropy import adapt_bonus, bonus_coefficient, reach_top, threshold_of_top
from megagrpo.config import AlgorithmSection
from megagrpo.proof.audit import naive_loss
from megagrpo.train_types import TrainState

MISC = json.loads((Path(__file__).parents[2] / "vectors" / "trl_misc.json").read_text())


# With 0, TRL and we keep the token of highest entropy; for float64 input TRL rounds the threshold above it and keeps no
# token.
COMPARABLE = [c for c in MISC["high_entropy_mask"]["cases"] if c["top_entropy_quantile"] > 0]


@pytest.mark.parametrize("case", COMPARABLE, ids=lambda c: f"top {c['top_entropy_quantile']}")
def test_the_tokens_kept_are_those_trl_keeps(case):
    entropy, mask = (
        torch.tensor(MISC["high_entropy_mask"]["entropy"]),
        torch.tensor(MISC["high_entropy_mask"]["mask"]).bool(),
    )
    threshold = threshold_of_top(entropy[mask], case["top_entropy_quantile"])
    assert ((entropy >= threshold) & mask).int().tolist() == case["keep"]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.77, 1.0])
def test_the_threshold_is_the_linear_quantile(share):
    values = torch.rand(101, generator=torch.Generator().manual_seed(0))
    assert threshold_of_top(values, share) == pytest.approx(values.quantile(1 - share).item(), rel=1e-6)
    assert threshold_of_top(values[:1], share) == values[0]
    assert math.isnan(threshold_of_top(values[:0], share))


@pytest.mark.parametrize("share", [0.11, 0.33, 0.52, 0.79])
def test_tokens_that_tie_at_the_threshold_are_all_counted_whatever_the_rounding(share):
    generator = torch.Generator().manual_seed(1)
    exact = torch.rand(60, generator=generator).repeat_interleave(8)  # 60 contexts of 8 tokens each
    for _ in range(10):
        rounded = exact + 2e-6 * (torch.rand(480, generator=generator) - 0.5)
        counted = reach_top(rounded, threshold_of_top(rounded, share)).view(60, 8)
        assert torch.equal(counted.any(1), counted.all(1))
        assert torch.equal(counted.flatten(), exact >= naive_loss.top_threshold(exact.tolist(), share))
        assert share * 480 - 1 <= counted.sum() <= share * 480 + 8


def test_the_adaptive_weight_goes_where_trls_goes():
    run = MISC["adaptive_entropy"]
    given = run["config"]
    algorithm = AlgorithmSection(
        use_adaptive_entropy=True,
        entropy_coef=given["entropy_coef_init"],
        entropy_target=given["entropy_target"],
        entropy_coef_delta=given["entropy_coef_delta"],
        entropy_coef_min=given["entropy_coef_min"],
        entropy_coef_max=given["entropy_coef_max"],
    )
    state, log = TrainState(), run["log"]
    base = log[0]["loss"]  # of the policy term: the first step applies no bonus
    for line, after in itertools.pairwise(log):
        applied = bonus_coefficient(state, algorithm)
        assert (applied == 0) == (line["loss"] == pytest.approx(base, abs=1e-9)), line["step"]
        adapt_bonus(state, {"entropy": after["last_world_entropy"]}, algorithm)
        assert state.entropy_coef == pytest.approx(after["entropy_coef_after"])


def test_an_adaptive_weight_is_measured_on_the_tokens_it_counts():
    algorithm = AlgorithmSection(
        use_adaptive_entropy=True, entropy_coef=0.1, top_entropy_quantile=0.5, entropy_target=1.0
    )
    state = TrainState()
    adapt_bonus(state, {"entropy": 0.5, "entropy/top": 2.0}, algorithm)
    assert (state.entropy_coef, state.last_entropy) == (0.095, 2.0) and bonus_coefficient(state, algorithm) == 0
    adapt_bonus(state, {"entropy": 0.5, "entropy/top": 0.9}, algorithm)
    assert bonus_coefficient(state, algorithm) == state.entropy_coef == pytest.approx(0.1)


@pytest.mark.parametrize("metrics", [{}, {"entropy": float("nan")}])
def test_a_step_that_says_nothing_of_entropy_moves_no_weight(metrics):
    state = TrainState()
    adapt_bonus(state, metrics, AlgorithmSection(use_adaptive_entropy=True))
    assert state == TrainState()


def test_a_fixed_weight_stays():
    algorithm, state = AlgorithmSection(entropy_coef=0.3), TrainState()
    adapt_bonus(state, {"entropy": 0.0}, algorithm)
    assert bonus_coefficient(state, algorithm) == 0.3 and state == TrainState()
