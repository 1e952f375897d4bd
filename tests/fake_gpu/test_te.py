"""Transformer Engine's layers on a fake GPU, with kernels in torch: their step equals ours, in FP8 and with weights
kept in FP8."""

from importlib.machinery import PathFinder

import pytest
import torch
from tiny_policy import tiny_run

from megagrpo.proof.verify.shrink import random_samples
from megagrpo.proof.verify.verified_step import Outcome, take_step
from megagrpo.proof.verify.verify_compare import distances, silent_tensors
from tests.fake_gpu.runtime import needs_fake_gpu, on_gpus
from tests.gpu.test_gpu_parity import small

pytestmark = [
    pytest.mark.fake_gpu,
    needs_fake_gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(PathFinder.find_spec("transformer_engine") is None, reason="needs Transformer Engine"),
]
LIKE_OURS = 1e-5  # relative: the effect of another order of float32 sums
SHAPE = "qwen3_untied"


def stepped(*args) -> Outcome:
    """`take_step` on Transformer Engine's layers."""
    from megagrpo.platform import device
    from tests.fake_gpu.te import replace_kernels

    replace_kernels()
    assert device.has_gpu() and device.has_transformer_engine()
    return take_step(*args)


def run_of(**model):
    """A run whose prompts are not shared, which Transformer Engine needs."""
    return tiny_run(
        {},
        model=dict(path="tiny", precision="fp32") | model,
        train=dict(share_prompts=False, distributed_optimizer=True),
    )


def theirs(**model) -> Outcome:
    found = on_gpus(stepped, 1, run_of(**model), small(SHAPE), random_samples(), timeout=600, MEGAGRPO_FAKE_GPU_TE="1")[
        0
    ]
    assert silent_tensors(found) == []
    return found


@pytest.fixture(scope="module")
def ours() -> Outcome:
    """The step on our layers."""
    return on_gpus(take_step, 1, run_of(), small(SHAPE), random_samples(), timeout=600)[0]


def test_a_step_is_the_one_on_our_layers(ours):
    apart = {kind: error for kind, error in distances(theirs(), ours).items() if kind[0] != "next weight"}
    assert max(apart.values()) < LIKE_OURS


def test_a_step_with_weights_kept_in_fp8_is_that_with_bf16_weights_bit_for_bit():
    plain, kept = (theirs(precision="bf16", fp8_recipe="blockwise", fp8_param=keeps) for keeps in (False, True))
    assert torch.equal(kept.logprobs, plain.logprobs)
    assert not [name for name, gradient in plain.gradients.items() if not torch.equal(kept.gradients[name], gradient)]
    moved = {name: error for (kind, name), error in distances(kept, plain).items() if kind == "next weight"}
    assert all((0.005 < error < 0.05) == ("_proj.weight" in name) for name, error in moved.items())


def test_a_step_in_fp8_differs_from_the_exact_one_by_rounding(ours):
    found = theirs(precision="bf16", fp8_recipe="tensorwise")
    linears = sorted(
        error for (kind, name), error in distances(found, ours).items() if kind == "gradient" and "_proj" in name
    )
    assert 0.05 < linears[len(linears) // 2] < 0.6
