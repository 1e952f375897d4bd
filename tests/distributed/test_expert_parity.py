"""Experts without tokens, also where a rank has no other experts. `test_options_by_layouts.py` tests experts with
tokens."""

import functools

import pytest
import torch
from ranks import run_ranks
from suites import usual
from tiny_policy import SHAPES, Case, few_samples

from megagrpo.config import ParallelSection
from megagrpo.families.hf_config import HfConfig
from megagrpo.proof.verify.shrink import random_tensor, shrink_model
from megagrpo.proof.verify.verified_step import Outcome, take_step
from megagrpo.proof.verify.verify_compare import compare, silent_tensors

IDLE = range(4, 8)  # of eight experts: all of the second of two expert-parallel ranks, or of the last two of four
TP2 = dict(tp=2, sequence_parallel=True)
LAYOUTS = [
    Case("ep2", 2, dict(ep=2)),
    Case("ep4", 4, dict(ep=4)),
    Case("tp2_ep2_etp1", 2, TP2 | dict(ep=2, etp=1)),
    Case("tp2_ep2_etp2", 4, TP2 | dict(ep=2, etp=2)),
    Case("pp2_ep2", 4, dict(pp=2, ep=2)),
    Case("etp2", 2, dict(etp=2)),
]


def idle_router(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Give each token two experts, never one in IDLE: the other router rows are pairs of w and -w, so two of them are
    above 0. The rows of idle experts are 0."""
    rows = random_tensor(name, shape)
    if name.endswith("mlp.gate.weight"):
        rows[2:4] = -rows[:2]
        rows[IDLE.start :] = 0
    return rows


def model() -> HfConfig:
    return shrink_model(SHAPES["qwen3_moe"], ParallelSection(tp=2, pp=2, ep=4, etp=2))


def step(case: Case) -> Outcome:
    return run_ranks(take_step, case.ranks, case.config(), model(), few_samples(), idle_router)[0]


@functools.cache
def one_process() -> Outcome:
    return step(Case("one process", 1, {}))


def test_experts_without_tokens_have_no_gradient_and_the_others_have():
    idle = silent_tensors(one_process())
    assert {int(name.split(".experts.")[1].split(".")[0]) for name in idle} == set(IDLE)
    assert len(idle) == 3 * len(model().experts.blocks) * len(IDLE)


@pytest.mark.parametrize("case", usual(LAYOUTS, 2), ids=str)
def test_every_layout_takes_the_step_of_one_process(case):
    found = step(case)
    assert silent_tensors(found) == silent_tensors(one_process())
    assert [d for d in compare(found, one_process()) if not d.passed] == []
