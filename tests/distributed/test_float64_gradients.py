"""In float64, at given routes, the gradients of a layout are those of one process to 1e-12.

Megatron and our code compute in float32 here and there, whatever the dtype of the model: scores and weights of the
router, rotary angles, log-probs, gradient buffers. `Wide` makes every such place compute in float64, so that what is
left is the order of sums.
"""

import functools
from typing import Any

import pytest
import torch
from layouts import AXES, EXPERTS, config_of, parametrize_rows, ranks
from ranks import run_ranks
from suites import usual
from tiny_policy import LARGEST, ONE_STAGE, few_samples, tiny_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megagrpo.config import RunConfig
from megagrpo.families.hf_config import HfConfig
from megagrpo.proof.verify.shrink import plainly
from megagrpo.proof.verify.verified_step import Outcome, relative_error, take_step

TOLERANCE = 1e-12
FEW = (
    dict(recompute="full", budget="tight"),
    dict(dp=2, ep=2, distributed_optimizer=True, share_prompts=True),
    dict(pp=2, vpp=2, recompute="selective"),
    dict(tp=2, cp=2, sequence_parallel=True, ep=2, etp=1, share_prompts=True),
    dict(tp=2, etp=2, sequence_parallel=True, pp=2),
)


class Wide(TorchDispatchMode):
    """Context manager: every operation that is asked for float32 computes float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*map(_wide, args), **{key: _wide(value) for key, value in (kwargs or {}).items()})


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def wide_step(config: RunConfig, model: HfConfig) -> Outcome | None:
    torch.set_default_dtype(torch.float64)
    convert = Tensor.type  # Megatron's optimizers know parameters by the name of their type
    Tensor.type = lambda tensor, *to: convert(tensor, *to) if to else "torch.cuda.FloatTensor"
    with Wide():
        return take_step(config, model, few_samples())


def row_of(model: str, **options) -> dict:
    return {axis: values[0] for axis, values in AXES.items()} | dict(model=model) | options


def config(row: dict) -> RunConfig:
    made = config_of(row)
    algorithm = made.algorithm.model_copy(update=dict(router_aux_loss_coef=0.1))
    rollout = made.rollout.model_copy(update=dict(routing_replay="engine"))
    return made.model_copy(update=dict(algorithm=algorithm, rollout=rollout))


def model_of(shape: str, stages: bool) -> HfConfig:
    """Without pipeline stages a layer of each kind: two."""
    return tiny_model(shape, LARGEST if stages else ONE_STAGE)


@functools.cache
def one_process(model: str, loss: str, stages: bool) -> Outcome:
    return run_ranks(wide_step, 1, plainly(config(row_of(model, loss=loss))), model_of(model, stages))[0]


def check(row: dict) -> None:
    stages = row["pp"] > 1
    (found, *_) = run_ranks(wide_step, ranks(row), config(row), model_of(row["model"], stages))
    expected = one_process(row["model"], row["loss"], stages)
    errors = {key: relative_error(found.gradients[key], value) for key, value in expected.gradients.items()}
    assert {key: error for key, error in errors.items() if not error <= TOLERANCE} == {}
    assert found.disagreement <= TOLERANCE
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("options", usual(FEW, 1, 3), ids=str)
def test_gradients_at_given_routes_are_those_of_one_process_to_float64(options):
    check(row_of("qwen3_moe", **options))


@pytest.mark.full
@pytest.mark.parametrize("options", usual([dict(tp=2, sequence_parallel=True, ep=2, etp=1), *FEW[:4]], 0), ids=str)
def test_gradients_of_gated_delta_nets_are_those_of_one_process_to_float64(options):
    check(row_of("qwen3_next", **options))


def pytest_generate_tests(metafunc):
    parametrize_rows(metafunc, models=EXPERTS)


@pytest.mark.full
def test_gradients_are_those_of_one_process_to_float64_in_all_layouts(row):
    check(row)
