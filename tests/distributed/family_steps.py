"""Steps of a family in layouts against one process's step, with and without adapters. `test_family_gradients.py` and
`prove_family.py` share it."""

from __future__ import annotations

import functools
from typing import Any

from layouts import AXES, config_of, ranks
from ranks import run_ranks
from tiny_policy import few_samples, release_of, tiny_model, tiny_run

from megagrpo.config import ParallelSection, RunConfig
from megagrpo.families.hf_config import HfConfig
from megagrpo.planner.rules.plan_problems import recurrent_problems
from megagrpo.proof.verify.shrink import plainly, shrink_model
from megagrpo.proof.verify.verified_step import Outcome, take_step
from megagrpo.proof.verify.verify_compare import compare, distances, silent_tensors

FIRST = {axis: values[0] for axis, values in AXES.items()}
ADAPTERS = dict(rank=3)
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
    return step_of(plainly(config_of(FIRST | dict(model=model, loss=loss))), tiny_model(model), 1)


@functools.cache
def _alone_with_adapters(model: str) -> Outcome:
    return step_of(plainly(with_adapters(model, {})), tiny_model(model), 1)


def step_of(config: RunConfig, model: HfConfig, world: int) -> Outcome:
    outcome: Outcome = run_ranks(take_step, world, config, model, few_samples())[0]
    assert silent_tensors(outcome) == [], "tensors without a gradient"
    return outcome


def step_error(model: str, layout: dict[str, Any]) -> float:
    """`largest_excess` of a step in a layout, with the axes of `layouts.AXES`."""
    row = FIRST | dict(model=model) | layout
    found = step_of(config_of(row), tiny_model(model), ranks(row))
    assert found.disagreement == 0, "ranks with the same part of a tensor disagree"
    return largest_excess(found, _alone(model, row["loss"]))


def with_adapters(model: str, parallel: dict[str, Any]) -> RunConfig:
    """The config of a run with adapters on all linears, experts included."""
    architecture = tiny_model(model)
    names = {
        name for block in range(architecture.num_layers) for name in architecture.expert_parameters(block).values()
    }
    experts = sorted({".".join(name.split(".")[-2:]) for name in names})
    lora = ADAPTERS | (dict(target_parameters=experts) if experts else {})
    return tiny_run(parallel, lora=lora, train=dict(share_prompts=False))


def adapter_error(model: str) -> float:
    """`largest_excess` of a step of adapters over tensor, pipeline and expert parallel ranks."""
    parallel = dict(tp=2, pp=1 if tiny_model(model).borrowers else 2, sequence_parallel=True)
    parallel |= dict(ep=2, etp=1) if tiny_model(model).experts else {}
    return largest_excess(step_of(with_adapters(model, parallel), tiny_model(model), 4), _alone_with_adapters(model))


def fp8_rounding(kind: str) -> float | None:
    """Compare a step in FP8 over tensor, pipeline and expert parallel ranks with one process's, within FP8's rounding.

    Returns the median relative change of the linears' gradients by FP8, or None if the plan refuses FP8 for the family.
    """
    small = shrink_model(release_of(kind), ParallelSection(tp=2, pp=2, ep=2), unit=32)
    parallel = (
        dict(ep=2, tp=2, etp=1, sequence_parallel=True) if small.experts else dict(tp=2, pp=2 - bool(small.borrowers))
    )

    def run(recipe: str, layout: dict[str, Any]) -> RunConfig:
        return tiny_run(layout, model=dict(fp8_recipe=recipe), train=dict(share_prompts=False))

    if list(recurrent_problems(run("blockwise", {}), small)):
        return None
    alone, exact = (step_of(plainly(run(recipe, {})), small, 1) for recipe in ("blockwise", "none"))
    found = step_of(run("blockwise", parallel), small, ranks(FIRST | parallel))
    failed = [str(distance) for distance in compare(found, exact, alone, coarse=True) if not distance.passed]
    assert not failed, f"not within the rounding of FP8: {failed[:5]}"
    noise, apart = distances(alone, exact), distances(found, alone)
    linears = [key for key in noise if key[0] == "gradient" and "_proj" in key[1]]
    rounding, difference = (sorted(errors[key] for key in linears)[len(linears) // 2] for errors in (noise, apart))
    assert rounding > 1e-2, f"FP8 changed the gradients by {rounding:.1e} only"
    assert difference < rounding, f"the layout changed the gradients by {difference:.1e}, FP8 by {rounding:.1e}"
    return rounding
