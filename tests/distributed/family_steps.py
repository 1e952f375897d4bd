"""Steps of a family in layouts against one process's step, with and without adapters. `test_family_gradients.py` and
`prove_family.py` share it."""

from __future__ import annotations

import functools
from typing import Any

from layouts import AXES, config_of, ranks
from ranks import run_ranks
from tiny_policy import tiny_model, tiny_run

from megagrpo.config import RunConfig
from megagrpo.models.families.hf_config import HfConfig
from megagrpo.proof.verify.shrink import plainly, random_samples
from megagrpo.proof.verify.verified_step import Outcome, take_step
from megagrpo.proof.verify.verify_compare import compare, silent_tensors

FIRST = {axis: values[0] for axis, values in AXES.items()}
ADAPTERS = dict(rank=3)
EXPERT_ADAPTERS = ADAPTERS | dict(target_parameters=["experts.gate_up_proj", "experts.down_proj"])
# Layouts that cut every dimension of the model.
DENSE: list[dict[str, Any]] = [
    dict(tp=2, pp=2, sequence_parallel=True, share_prompts=True, loss="dapo"),
    dict(pp=2, vpp=2, cp=2, distributed_optimizer=True, recompute="full"),
]
ONE_STAGE: list[dict[str, Any]] = [
    dict(tp=2, dp=2, sequence_parallel=True, share_prompts=True, loss="dapo"),
    dict(tp=2, cp=2, sequence_parallel=True, distributed_optimizer=True, recompute="full"),
]
MIXTURE: list[dict[str, Any]] = [
    dict(tp=2, cp=2, ep=2, etp=1, sequence_parallel=True, distributed_optimizer=True, loss="dapo"),
    dict(pp=2, ep=2, dp=2, share_prompts=True),
    dict(tp=2, etp=2, ep=1, sequence_parallel=True, recompute="full"),
]


def layouts_of(model: str) -> list[dict[str, Any]]:
    """The layouts in which a model's step is compared."""
    if tiny_model(model).borrowers:
        return ONE_STAGE
    return MIXTURE if tiny_model(model).experts else DENSE


def largest_excess(found: Outcome, expected: Outcome) -> float:
    """The largest error of a quantity over its tolerance; up to 1 passes."""
    return max(distance.excess for distance in compare(found, expected))


@functools.cache
def _alone(model: str, loss: str) -> Outcome:
    return _step(plainly(config_of(FIRST | dict(model=model, loss=loss))), tiny_model(model), 1)


@functools.cache
def _alone_with_adapters(model: str) -> Outcome:
    return _step(plainly(with_adapters(model, {})), tiny_model(model), 1)


def _step(config: RunConfig, model: HfConfig, world: int) -> Outcome:
    outcome: Outcome = run_ranks(take_step, world, config, model, random_samples())[0]
    assert silent_tensors(outcome) == [], "tensors without a gradient"
    return outcome


def step_error(model: str, layout: dict[str, Any]) -> float:
    """`largest_excess` of a step in a layout, with the axes of `layouts.AXES`."""
    row = FIRST | dict(model=model) | layout
    found = _step(config_of(row), tiny_model(model), ranks(row))
    assert found.disagreement == 0, "ranks with the same part of a tensor disagree"
    return largest_excess(found, _alone(model, row["loss"]))


def with_adapters(model: str, parallel: dict[str, Any]) -> RunConfig:
    """The config of a run with adapters on all linears, experts included."""
    lora = EXPERT_ADAPTERS if tiny_model(model).experts else ADAPTERS
    return tiny_run(parallel, lora=lora, train=dict(share_prompts=False))


def adapter_error(model: str) -> float:
    """`largest_excess` of a step of adapters over tensor, pipeline and expert parallel ranks."""
    parallel = dict(tp=2, pp=1 if tiny_model(model).borrowers else 2, sequence_parallel=True)
    parallel |= dict(ep=2, etp=1) if tiny_model(model).experts else {}
    return largest_excess(_step(with_adapters(model, parallel), tiny_model(model), 4), _alone_with_adapters(model))
