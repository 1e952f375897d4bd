"""Activations offloaded to host memory, on a GPU: the step equals the one without offload. `cpu` runs the same code
without a GPU."""

import pytest
from tiny_policy import tiny_run

from megagrpo.platform.parallel.spawn import run_ranks
from megagrpo.policy.transformer import activation_offload
from megagrpo.proof.verify.shrink import random_samples
from megagrpo.proof.verify.verified_step import Outcome, relative_error, take_step
from tests.gpu.places import PLACES
from tests.gpu.test_gpu_fp8 import need_recipe
from tests.gpu.test_gpu_parity import small


def _step(settings, hf_config) -> Outcome | None:
    activation_offload.MIN_BYTES = 1
    return take_step(settings, hf_config, random_samples())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("keys", [{}, dict(recompute="full"), dict(fp8_recipe="tensorwise")], ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_a_step_is_the_same_whether_activations_leave_or_stay(place, keys):
    need_recipe(place, keys.get("fp8_recipe"))
    found = {}
    for leave in (False, True):
        settings = tiny_run(
            {}, model=dict(precision="bf16", offload_activations=float(leave), **keys), train=dict(share_prompts=False)
        )
        (found[leave],) = run_ranks(_step, 1, settings, small("qwen2_untied"), timeout=300)
    # On a GPU attention adds up its gradients in any order.
    assert (
        max(
            relative_error(found[True].gradients[name], found[False].gradients[name]) for name in found[False].gradients
        )
        < 1e-2
    )
    assert found[True].logprobs.sub(found[False].logprobs).abs().max() == 0
