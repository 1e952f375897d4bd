"""The gated delta rule in chunks against its recurrence, token by token in float64."""

import torch
from torch import Tensor

from megagrpo.policy.blocks.gated_delta import gated_delta_rule
from tests.unit.for_each import for_each


def naive(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """One token after the other: M <- a M + beta k (v - a M^T k)^T, output M^T q / sqrt(d)."""
    outputs = torch.zeros_like(value)
    for s in range(value.shape[0]):
        for h in range(value.shape[2]):
            g = h * key.shape[2] // value.shape[2]
            state = value.new_zeros(key.shape[-1], value.shape[-1])
            for t in range(value.shape[1]):
                q, k = (x[s, t, g] / (x[s, t, g].square().sum() + 1e-6).sqrt() for x in (query, key))
                state = log_decay[s, t, h].exp() * state
                state = state + beta[s, t, h] * torch.outer(k, value[s, t, h] - state.T @ k)
                outputs[s, t, h] = state.T @ q / key.shape[-1] ** 0.5
    return outputs


def inputs(length: int, dtype: torch.dtype, strongest: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    query, key, value, decay, beta = (
        torch.randn(2, length, *shape, generator=generator, dtype=dtype)
        for shape in ((2, 5), (2, 5), (6, 7), (6,), (6,))
    )
    return [query, key, value, -strongest * decay.abs(), beta.sigmoid()]


@for_each(
    ("length", "strongest"),
    [(1, 1.0), (5, 0.01), (63, 30.0), (64, 1.0), (65, 0.01), (130, 0.01), (130, 30.0)],
)
def test_outputs_and_gradients_are_those_of_the_recurrence(length, strongest):
    given = [x.requires_grad_() for x in inputs(length, torch.float64, strongest)]
    found, expected = gated_delta_rule(*given), naive(*given)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    weights = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for one, other in zip(
        torch.autograd.grad((found * weights).sum(), given),
        torch.autograd.grad((expected * weights).sum(), given),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


def test_in_float32_it_is_nearer_to_the_recurrence_than_transformers():
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    given = inputs(130, torch.float32)
    expected = naive(*(x.double() for x in given))
    query, key = (x.repeat_interleave(3, 2) for x in given[:2])
    theirs, _ = torch_chunk_gated_delta_rule(
        query, key, given[2], g=given[3], beta=given[4], initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    own = (gated_delta_rule(*given) - expected).abs().max()
    assert own <= 2e-6 and own <= (theirs - expected).abs().max()
