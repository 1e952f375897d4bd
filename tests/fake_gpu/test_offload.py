"""State and activations that leave a fake GPU: the bytes that move, the memory that is left, and the same numbers after
the return."""

import pytest
import torch
from tiny_policy import tiny_model, tiny_run

from tests.fake_gpu.runtime import needs_fake_gpu, on_gpus
from tests.gpu.test_gpu_offload import leave_and_come_back

pytestmark = [pytest.mark.fake_gpu, needs_fake_gpu, pytest.mark.timeout(900)]


def test_a_trainer_leaves_its_gpu_and_comes_back_the_same(tmp_path):
    before, left, same, norm = on_gpus(leave_and_come_back, 1, tmp_path, "tiny", "bf16", False)[0]
    assert same and 0 < norm < float("inf")
    assert left < before / 5, (left, before)


def a_step(share: float):
    """The outcome of a step that offloads the activations of this share of the layers, and the bytes that copies
    carried in each direction. Copies run as late as CUDA permits."""
    from megagrpo.policy.transformer import activation_offload
    from megagrpo.proof.verify.shrink import random_samples
    from megagrpo.proof.verify.verified_step import take_step
    from tests.fake_gpu.kernels import Kernels
    from tests.fake_gpu.streams import DEFAULT, delay_copies

    activation_offload.MIN_BYTES = 1
    streams, moved = delay_copies(), {"cpu": 0, "cuda": 0}

    def counted(target, source, non_blocking):
        if torch.cuda.current_stream().cuda_stream != DEFAULT and target.device != source.device:
            moved[target.device.type] += source.nbytes
        return streams.copy(target, source, non_blocking)

    Kernels.active.on_copy = counted
    config = tiny_run(
        {}, model=dict(path="tiny", precision="bf16", offload_activations=share), train=dict(share_prompts=False)
    )
    return take_step(config, tiny_model("qwen3_untied"), random_samples()), moved


def test_activations_move_to_the_host_and_back_and_change_no_number():
    (stayed, nothing), (left, moved) = (on_gpus(a_step, 1, share)[0] for share in (0.0, 1.0))
    assert nothing == {"cpu": 0, "cuda": 0}
    assert moved["cpu"] == moved["cuda"] > 10_000
    assert torch.equal(left.logprobs, stayed.logprobs)
    assert not [name for name, gradient in stayed.gradients.items() if not torch.equal(left.gradients[name], gradient)]
