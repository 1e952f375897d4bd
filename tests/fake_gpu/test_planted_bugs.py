"""Bugs of code for GPUs are seen on fake GPUs: each is planted into this project's code, and the same checks pass
without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiny_policy import tiny_model, tiny_run

from megagrpo.proof.verify.shrink import random_samples
from megagrpo.proof.verify.verified_step import Outcome, take_step
from megagrpo.proof.verify.verify_compare import FLOAT32_TOLERANCES, distances
from tests.fake_gpu import planted_bugs as bugs
from tests.fake_gpu.runtime import needs_fake_gpu, on_gpus

pytestmark = [pytest.mark.fake_gpu, needs_fake_gpu, pytest.mark.timeout(1800)]
SHAPE = "qwen3_untied"


def run_of(parallel: dict | None = None, **model: Any):
    """A float32 run without shared prompts."""
    return tiny_run(parallel or {}, model=dict(path="tiny", precision="fp32") | model, train=dict(share_prompts=False))


def problems_of_a_step(expected: Outcome, parallel: dict | None = None) -> list[str]:
    """What a step with offloaded activations shows: an exception, numbers that differ from `expected`, and waits of the
    host inside the schedule."""
    from tests.fake_gpu.kernels import Kernels

    try:
        waits = Kernels.active.waits.copy()
        outcome = take_step(run_of(parallel, offload_activations=1.0), tiny_model(SHAPE), random_samples())
    except Exception as error:
        return [f"raised {error}"]
    waited = [f"waits at {line}" for (name, line), _ in (Kernels.active.waits - waits).items()]
    if outcome is None:
        return waited
    apart = distances(outcome, expected).items()
    return [
        f"differs: {kind} {name}" for (kind, name), error in apart if not error <= FLOAT32_TOLERANCES[kind]
    ] + waited


def problems_of_leaving() -> list[str]:
    """What a trainer shows that leaves the GPU after a step, returns and takes another step: an exception, or numbers
    that differ."""
    from megagrpo.algorithms.losses import make_loss
    from megagrpo.data.packing.sample_packing import pack, packing_rules
    from megagrpo.platform.parallel.layout import init_layout
    from megagrpo.policy.megatron_policy import MegatronPolicy
    from megagrpo.policy.reference import Reference
    from megagrpo.proof.verify.verified_step import fill_weights
    from megagrpo.trainer.gpu.state_offload import NoOffload, Offload

    config, found = run_of(), []
    for kind in (NoOffload, Offload):
        layout = init_layout(config.parallel, config.run.seed)
        try:
            policy = MegatronPolicy(config, layout, tiny_model(SHAPE))
            fill_weights(policy, tiny_model(SHAPE), layout)
            reference = Reference(policy)
            policy.weights_changed()
            offload = kind() if kind is NoOffload else kind(policy, reference)
            batch = pack(random_samples(), packing_rules(config, policy.shares_prompts))
            for _ in range(2):
                policy.train_step(reference.annotate(batch), make_loss(config.algorithm), batch.num_tokens)
                offload.offload_all()
                if kind is Offload and (
                    left := sum(p.untyped_storage().nbytes() for c in policy.chunks for p in c.parameters())
                ):
                    return [f"left {left} bytes"]
                offload.load_all()
            found.append([p.detach().cpu() for chunk in policy.chunks for p in chunk.parameters()])
        except Exception as error:
            return [f"raised {type(error).__name__} {error}"]
        finally:
            layout.release()
    return [] if all(map(torch.equal, *found)) else ["differs: weights"]


STEP, LEAVING = problems_of_a_step, problems_of_leaving
GARBAGE = ("differs: ", "raised index -1 is out of bounds", "raised NaN or infinity")
# Bug -> what shows it, and how the problem may begin.
BUGS: dict[Callable, tuple[Callable, str | tuple[str, ...]]] = {
    bugs.a_mask_on_the_host: (STEP, "raised Expected all tensors to be on the same device"),
    bugs.micro_batches_on_the_host: (STEP, "raised Expected all tensors to be on the same device"),
    bugs.no_wait_for_copies: (STEP, GARBAGE),
    bugs.copies_without_a_wait: (STEP, GARBAGE),
    bugs.activations_freed_early: (STEP, GARBAGE),
    bugs.a_wait_in_a_micro_batch: (STEP, "waits at policy/megatron_policy.py"),
    bugs.state_that_stays_away: (LEAVING, "raised RuntimeError setStorage"),
    bugs.state_of_the_wrong_place: (LEAVING, "differs: weights"),
}


def with_each_bug(expected: Outcome) -> tuple[dict[str, list[str]], dict[str, list[str]], int]:
    """Problems without a bug, by check; problems with each bug, by its name; and the number of copies that were
    delayed."""
    from megagrpo.policy.transformer import activation_offload
    from tests.fake_gpu.streams import delay_copies

    activation_offload.MIN_BYTES = 1
    streams = delay_copies()

    def check(function: Callable) -> list[str]:
        return function(expected) if function is STEP else function()

    sound = {function.__name__: check(function) for function in (STEP, LEAVING)}
    delayed, found = streams.delayed, {}
    for bug, (function, _) in BUGS.items():
        with pytest.MonkeyPatch.context() as patch:
            bug(patch)
            found[bug.__name__] = check(function)
    return sound, found, delayed


@pytest.fixture(scope="module")
def expected():
    """The step of the CPU."""
    return run_ranks(take_step, 1, run_of(), tiny_model(SHAPE), random_samples(), timeout=600)[0]


@pytest.fixture(scope="module")
def seen(expected):
    return on_gpus(with_each_bug, 1, expected, timeout=1500)[0]


def test_without_a_bug_late_copies_change_no_number(seen):
    sound, _, delayed = seen
    assert [p for problems in sound.values() for p in problems if not p.startswith("waits")] == [] and delayed > 20


@pytest.mark.parametrize("bug", [bug.__name__ for bug in BUGS])
def test_a_planted_bug_is_seen(bug, seen):
    sound, found, _ = seen
    function, beginning = next(entry for planted, entry in BUGS.items() if planted.__name__ == bug)
    new = [problem for problem in found[bug] if problem not in sound[function.__name__]]
    assert [problem for problem in new if problem.startswith(beginning)], found[bug]


def with_the_wrong_group(expected: Outcome) -> tuple[list[str], list[str]]:
    """Problems of a step of two tensor-parallel ranks, without and with the bug."""
    parallel = dict(tp=2, sequence_parallel=True)
    sound = problems_of_a_step(expected, parallel)
    with pytest.MonkeyPatch.context() as patch:
        bugs.log_probs_over_the_wrong_group(patch)
        return sound, problems_of_a_step(expected, parallel)


def test_messages_over_the_wrong_group_are_seen(expected):
    sound, found = on_gpus(with_the_wrong_group, 2, expected)[0]
    assert not [problem for problem in sound if not problem.startswith("waits")]
    assert any(problem.startswith(("differs: log-prob", "raised")) for problem in found), found
