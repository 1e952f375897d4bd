"""The recurrence of Mamba-2 in chunks against one token after the other in float64."""

import pytest
import torch
from torch import Tensor

from megagrpo.policy.blocks import mamba2
from megagrpo.policy.blocks.mamba2 import state_space


def naive(x: Tensor, step: Tensor, decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """One token after the other: M <- exp(step decay) M + step x b^T, output M c."""
    outputs = torch.zeros_like(x)
    for s in range(x.shape[0]):
        for h in range(x.shape[2]):
            g = h * b.shape[2] // x.shape[2]
            state = x.new_zeros(x.shape[-1], b.shape[-1])
            for t in range(x.shape[1]):
                state = (step[s, t, h] * decay[h]).exp() * state
                state = state + step[s, t, h] * torch.outer(x[s, t, h], b[s, t, g])
                outputs[s, t, h] = state @ c[s, t, g]
    return outputs


def inputs(length: int, dtype: torch.dtype, strongest: float = 1.0, groups: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    x, step, b, c = (
        torch.randn(2, length, *shape, generator=generator, dtype=dtype)
        for shape in ((6, 7), (6,), (groups, 5), (groups, 5))
    )
    decay = -strongest * torch.rand(6, generator=generator, dtype=dtype)
    return [x, torch.nn.functional.softplus(step), decay, b, c]


@pytest.mark.parametrize(
    ("length", "strongest", "groups"),
    [(1, 1.0, 2), (5, 1.0, 1), (63, 0.01, 6), (64, 30.0, 2), (65, 1.0, 2), (130, 0.01, 1), (130, 30.0, 6)],
)
def test_outputs_and_gradients_are_those_of_the_recurrence(length, strongest, groups):
    given = [x.requires_grad_() for x in inputs(length, torch.float64, strongest, groups)]
    found, expected = state_space(*given), naive(*given)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    weights = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for one, other in zip(
        torch.autograd.grad((found * weights).sum(), given),
        torch.autograd.grad((expected * weights).sum(), given),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("segment", [64, 128, 1000])
def test_segments_of_sequences_pass_their_state_on(segment, monkeypatch):
    given = inputs(300, torch.float64)
    expected = state_space(*given)
    monkeypatch.setattr(mamba2, "SEGMENT", segment)
    torch.testing.assert_close(state_space(*given), expected, rtol=0, atol=1e-12)


def test_in_float32_it_is_as_near_to_the_recurrence_as_transformers():
    from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

    x, step, decay, b, c = given = inputs(130, torch.float32)
    expected = naive(*(t.double() for t in given))
    theirs = mamba2_chunk_scan(x, step, decay, b, c, chunk_size=64)
    own = (state_space(*given) - expected).abs().max()
    assert own <= 1e-5 and own <= 1.5 * (theirs - expected).abs().max()
