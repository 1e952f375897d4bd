"""Attention over the keys that an indexer chooses, against the formula, one query at a time."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from megagrpo.families.shared.architecture import Indexer as Shape
from megagrpo.policy.attention.causal import BLOCK_QUERIES
from megagrpo.policy.attention.packed import Rotary, TorchAttention, pack_params
from megagrpo.policy.attention.sparse import NORM_EPS, SparseAttention

HIDDEN, LATENT, HEADS, WIDTH, VALUE = 24, 14, 3, 10, 8
SHAPE = Shape(heads=16, head_dim=12, keys=5, interleaved=False)
ROTARY = Rotary(torch.tensor([1.0, 0.3, 0.02]))


def attention(shape: Shape = SHAPE, rotary: Rotary = ROTARY) -> SparseAttention:
    from megatron.core.transformer.enums import AttnMaskType

    sizes = dict(kv_channels=WIDTH, hidden_size=HIDDEN, q_lora_rank=LATENT, params_dtype=torch.float32)
    config = SimpleNamespace(
        **sizes,
        window_size=None,
        window_attn_skip_freq=None,
        softmax_type="vanilla",
        attention_dropout=0.0,
        sequence_parallel=False,
        perform_initialization=False,
    )
    made = SparseAttention(config, 1, AttnMaskType.causal, "self", indexer=shape)
    made.indexer.rotary = rotary
    for name, parameter in made.named_parameters():
        parameter.data = torch.randn(parameter.shape) * 0.3 + ("norm.weight" in name)
    return made


def rotated(x: torch.Tensor, position: int) -> torch.Tensor:
    """x [..., d] with its first 6 elements rotated in the pairs (i, i + 3)."""
    angles = position * ROTARY.frequencies
    first, second, rest = x[..., :3], x[..., 3:6], x[..., 6:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def naive(module: SparseAttention, inputs: list[torch.Tensor], sequences: list[list[int]]) -> torch.Tensor:
    """The formula; `sequences` are the pack positions of each sequence's tokens, its prefix first."""
    query, key, value, hidden, latent = inputs
    index, out = module.indexer, torch.zeros(len(query), HEADS, VALUE)
    for rows in sequences:
        keys = torch.nn.functional.layer_norm(
            hidden[rows, 0] @ index.linear_wk.weight.T, (12,), index.k_norm.weight, index.k_norm.bias, NORM_EPS
        )
        keys = torch.stack([rotated(k, i) for i, k in enumerate(keys)])
        for i, row in enumerate(rows):
            queries = rotated((latent[row] @ index.linear_wq_b.weight.T).view(16, 12), i)
            weights = hidden[row, 0] @ index.linear_weights_proj.weight.T / math.sqrt(16)
            scores = weights @ torch.relu(queries @ keys[: i + 1].T / math.sqrt(12))
            best = sorted(range(i + 1), key=lambda j: -scores[j].item())[: index.shape.keys]
            seen = [rows[j] for j in best]
            for head in range(HEADS):
                share = torch.softmax(query[row, head] @ key[seen, head].T / math.sqrt(WIDTH), -1)
                out[row, head] = share @ value[seen, head]
    return out.flatten(1)


def random_inputs(total: int) -> list[torch.Tensor]:
    sizes = ((HEADS, WIDTH), (HEADS, WIDTH), (HEADS, VALUE), (1, HIDDEN), (LATENT,))
    return [torch.randn(total, *size, requires_grad=True) for size in sizes]


def apply(module: SparseAttention, inputs: list[torch.Tensor], packed) -> torch.Tensor:
    query, key, value, hidden, latent = inputs
    return module(query, key, value, packed_seq_params=packed, x=hidden, qr=latent)


def compared(module: SparseAttention, inputs: list[torch.Tensor], packed, sequences: list[list[int]]) -> None:
    found, expected = apply(module, inputs, packed), naive(module, inputs, sequences)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    weight = torch.randn_like(found)
    both = [torch.autograd.grad((out * weight).sum(), inputs[:3]) for out in (found, expected)]
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("lengths", [[3, 40, 1, 39, 6], [BLOCK_QUERIES + 20, 7], [6]], ids=str)
def test_a_pack_gives_values_and_gradients_of_the_formula(lengths):
    torch.manual_seed(0)
    borders = torch.tensor([0, *lengths]).cumsum(0).int()
    sequences = [list(range(a, b)) for a, b in itertools.pairwise(borders.tolist())]
    compared(attention(), random_inputs(sum(lengths)), pack_params(borders), sequences)


def test_sequences_that_continue_a_prefix_choose_among_its_keys_too():
    torch.manual_seed(0)
    borders, prefixes = torch.tensor([0, 9, 14, 25, 26]).int(), torch.tensor([-1, 0, 0, -1])
    sequences = [list(range(9)), list(range(14)), [*range(9), *range(14, 25)], [25]]
    compared(attention(), random_inputs(26), pack_params(borders, prefixes), sequences)


def test_the_indexer_gets_no_gradient_and_gives_none():
    torch.manual_seed(0)
    module, inputs = attention(), random_inputs(30)
    apply(module, inputs, pack_params(torch.tensor([0, 30]).int())).sum().backward()
    assert all(not parameter.requires_grad and parameter.grad is None for parameter in module.indexer.parameters())
    assert [tensor.grad is None for tensor in inputs] == [False] * 3 + [True] * 2


def test_where_no_sequence_has_more_tokens_than_are_chosen_attention_is_dense():
    torch.manual_seed(0)
    module, inputs = attention(Shape(16, 12, 20, False)), random_inputs(33)
    packed = pack_params(torch.tensor([0, 20, 33]).int())
    dense = TorchAttention.forward(module, *inputs[:3], packed_seq_params=packed)
    assert torch.equal(apply(module, inputs, packed), dense)
    module.indexer.shape = Shape(16, 12, 19, False)
    assert not torch.equal(apply(module, inputs, packed), dense)
