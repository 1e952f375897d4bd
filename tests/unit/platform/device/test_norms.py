"""Gradient norms of realistic sizes, against float64."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megagrpo.platform import device
from megagrpo.platform.device.norms import ROW, l2_norm

device.install()


def tensors(*sizes):
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(size, generator=generator) for size in sizes]


def exact(given):
    return sum(t.double().square().sum().item() for t in given) ** 0.5


@pytest.mark.parametrize(
    "sizes", [(1,), (ROW - 1, ROW, ROW + 1), ((300, 500), (7, 11, 13)), (0, 5), (3_000_000, 2**21)], ids=str
)
def test_the_norm_is_that_of_float64(sizes):
    given = tensors(*sizes)
    assert l2_norm(given) == pytest.approx(exact(given), rel=1e-6)


def test_torchs_own_norm_is_not():
    """When this test fails, `megagrpo.platform.device.norms` can be removed."""
    (given,) = tensors(2**23)
    assert abs(torch.norm(given).item() / exact([given]) - 1) > 1e-5


def test_a_nan_or_an_infinity_comes_through():
    assert l2_norm([torch.tensor([1.0, torch.inf])]) == torch.inf
    assert torch.tensor(l2_norm([torch.ones(5000), torch.tensor([torch.nan])])).isnan()


@pytest.mark.skipif(device.has_gpu(), reason="a GPU has kernels of its own")
def test_megatron_clips_by_it():
    from megatron.core.optimizer import clip_grads

    given = tensors(2**22, 5)
    norm, _ = clip_grads.l2_norm_impl(2**16, torch.zeros(1), [given], False)
    assert norm.tolist() == [pytest.approx(exact(given), rel=1e-6)]


@pytest.mark.skipif(device.has_gpu(), reason="a GPU has kernels of its own")
def test_megatron_scales_gradients_in_place():
    from megatron.core.optimizer import clip_grads

    given = tensors(1000, 7)
    halves, noop = [tensor / 2 for tensor in given], torch.zeros(1)
    with WritesInPlace() as count:
        clip_grads.multi_tensor_scale_impl(2**16, noop, [given, given], 0.5)
    assert all(map(torch.equal, given, halves)) and count.operations == ["aten::mul"] * 2


class WritesInPlace(TorchDispatchMode):
    """Collects the names of operations and requires that each writes to a given tensor."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        assert "out" in (kwargs or {}), operation
        self.operations.append(operation.overloadpacket._qualified_op_name)
        return operation(*args, **kwargs)
