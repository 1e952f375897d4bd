"""Adam with moments in fewer bits or on the host, against Adam in float32."""

from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from megagrpo.platform.device import block_elements
from megagrpo.platform.device.adam import FusedAdam
from megagrpo.platform.device.compact_adam import FP8, CompactAdam, round_mantissa, to_fp8
from megagrpo.platform.device.memory_in_use import resident_gb

SETTINGS = dict(lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)


def path(make, steps: int = 200) -> tuple[torch.Tensor, torch.optim.Optimizer]:
    """The values of 2000 weights, pulled to targets of many magnitudes through noise, after this many steps."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(40, 50, generator=generator) * torch.logspace(-3, 1, 50)
    weight = torch.nn.Parameter(torch.zeros(40, 50))
    optimizer = make([weight])
    for _ in range(steps):
        weight.grad = weight.detach() - target + 0.1 * target.abs() * torch.randn(target.shape, generator=generator)
        optimizer.step()
    return weight.detach(), optimizer


def compact(dtype: torch.dtype, offload: bool = False):
    return lambda params: CompactAdam(params, dtype=dtype, offload=offload, **SETTINGS)


@pytest.mark.parametrize(("dtype", "limit", "share"), [(torch.bfloat16, 0.005, 0.5), (FP8, 0.1, 0.27)], ids=str)
def test_weights_go_where_those_of_float32_moments_go(dtype, limit, share):
    expected, _ = path(lambda params: torch.optim.AdamW(params, **SETTINGS))
    found, optimizer = path(compact(dtype))
    assert ((found - expected).norm() / expected.norm()).item() < limit
    (state,) = optimizer.state.values()
    assert sum(tensor.nbytes for tensor in state.values()) <= share * 2 * expected.nbytes


def test_on_the_host_the_step_is_that_of_the_fused_adam_bit_by_bit():
    expected, _ = path(lambda params: FusedAdam(params, **SETTINGS))
    found, optimizer = path(compact(torch.float32, offload=True))
    assert torch.equal(found, expected) and all(
        t.device.type == "cpu" for s in optimizer.state.values() for t in s.values()
    )


def test_a_checkpoint_of_moments_on_the_host_reads_them_there_without_a_copy():
    """A copy on the GPU would need the memory that the offload freed."""
    _, optimizer = path(compact(torch.float32, offload=True), steps=5)
    (before,) = optimizer.state.values()
    optimizer.dense_moments()
    (dense,) = optimizer.state.values()
    assert all(dense[name].data_ptr() == before[name].data_ptr() for name in before)
    optimizer.compact_moments()
    (after,) = optimizer.state.values()
    assert all(
        after[name].data_ptr() == before[name].data_ptr() and torch.equal(after[name], before[name]) for name in before
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)
def test_the_second_moment_decays_though_each_step_changes_it_by_less_than_its_last_bit(dtype):
    weight = torch.nn.Parameter(torch.ones(512))
    optimizer = compact(dtype)([weight])
    for step in range(1500):
        weight.grad = torch.full((512,), 1.0 if step == 0 else 0.0)
        optimizer.step()
    optimizer.dense_moments()
    assert optimizer.state[weight]["exp_avg_sq"].mean().item() == pytest.approx(1e-3 * 0.999**1499, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)
def test_what_a_checkpoint_reads_and_writes_is_stored_without_loss(dtype):
    _, optimizer = path(compact(dtype), steps=5)
    (state,) = optimizer.state.values()
    optimizer.dense_moments()
    (weight,) = optimizer.state
    dense = {name: tensor.clone() for name, tensor in optimizer.state[weight].items()}
    assert dense.keys() == {"exp_avg", "exp_avg_sq"} and all(
        t.dtype == torch.float32 and t.shape == weight.shape for t in dense.values()
    )
    optimizer.compact_moments()
    assert sum(t.nbytes for t in optimizer.state[weight].values()) == sum(t.nbytes for t in state.values())
    optimizer.dense_moments()
    assert all(torch.equal(optimizer.state[weight][name], tensor) for name, tensor in dense.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)
def test_moments_of_a_large_tensor_are_those_of_its_own_elements(dtype):
    size = 2 * block_elements() + 100  # a step takes the tensor in three parts; the last block is not full
    weight = torch.nn.Parameter(torch.zeros(size))
    weight.grad = torch.logspace(-3, 3, size)
    optimizer = compact(dtype)([weight])
    optimizer.step()
    for name, expected in {"exp_avg": 0.1 * weight.grad, "exp_avg_sq": 0.001 * weight.grad**2}.items():
        # a square of e4m3 values
        assert ((optimizer.dense_moment(weight, name) / expected - 1).abs() < 0.27).all(), name


def test_rounding_is_right_on_the_mean_and_never_further_than_the_next_value():
    generator = torch.Generator().manual_seed(0)
    values = torch.cat([torch.linspace(-400, 400, 101), torch.logspace(-5, 2, 100)])
    rounded = torch.stack([round_mantissa(values, 20, generator) for _ in range(4000)])
    assert (rounded.mean(0) / values - 1)[values != 0].abs().max() < 0.005 and (rounded / values - 1)[
        :, values != 0
    ].abs().max() <= 1 / 8
    codes, scale = to_fp8(values, generator)
    many = torch.stack(
        [(c.float() * s[:, None]).flatten()[: len(values)] for c, s in (to_fp8(values, generator) for _ in range(2000))]
    )
    assert codes.dtype == FP8 and scale.log2().frac().eq(0).all()
    assert ((many.mean(0) - values).abs() < 0.01 * values.abs() + 2e-4).all()


def peak_beyond_the_state_gb():
    """GiB that the second step of a parameter of 32 million elements adds to the peak of resident memory."""
    parameter = torch.ones(2**25, requires_grad=True)
    parameter.grad = torch.ones_like(parameter)
    adam = CompactAdam([parameter], dtype=FP8, offload=False)
    adam.step()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the memory in use now
    before = resident_gb()
    adam.step()
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(peak.split()[1]) / 2**20 - before


def test_a_step_needs_little_memory_beyond_the_state_however_large_a_parameter_is():
    (beyond,) = run_ranks(peak_beyond_the_state_gb, 1)
    assert beyond < 0.06, "half of the parameter"
