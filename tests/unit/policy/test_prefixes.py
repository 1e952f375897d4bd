"""Keys of sequences that continue others: positions against a loop, gradients against float64, and the mask."""

from itertools import pairwise

import pytest
import torch

from megagrpo.policy.attention.causal import Scores, causal_attention
from megagrpo.policy.attention.packed import pack_params
from megagrpo.policy.attention.prefixes import PackedMask, _RepeatRows, prefixed, seen_keys

BORDERS = torch.tensor([0, 3, 5, 9, 13, 14], dtype=torch.int32)  # sequences 1 and 2 continue 0, 4 continues 3
PREFIXES = torch.tensor([-1, 0, 0, -1, 3])


def test_keys_of_a_sequence_are_those_of_its_prefix_and_its_own():
    index, borders = seen_keys(BORDERS, PREFIXES)
    spans = list(pairwise(BORDERS.tolist()))
    expected = []
    for prefix, span in zip(PREFIXES.tolist(), spans, strict=True):
        expected.append([*(range(*spans[prefix]) if prefix >= 0 else ()), *range(*span)])
    assert index.tolist() == [position for keys in expected for position in keys]
    assert borders.tolist() == [0, 3, 8, 15, 19, 24] and borders.dtype == torch.int32


def test_gradients_of_copies_are_added_in_float32():
    """Sixteen copies of a row: bf16 sums lose the small gradients."""
    rows = torch.ones(2, 4, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.full((17, 4), 2.0**-8, dtype=torch.bfloat16)
    grad[0] = 1.0
    _RepeatRows.apply(rows, torch.tensor([0] * 17)).backward(grad)
    assert rows.grad is not None and rows.grad.dtype == torch.bfloat16
    assert rows.grad[0].tolist() == [1 + 16 * 2.0**-8] * 4 and rows.grad[1].tolist() == [0] * 4


class Naive(torch.nn.Module):
    """Attention with the arguments of Transformer Engine's, sequence by sequence."""

    def forward(self, query, key, value, attention_mask, attn_mask_type, packed_seq_params):
        p, outputs = packed_seq_params, []
        bottom_right = attn_mask_type is PackedMask.padding_causal_bottom_right
        queries, keys = p.cu_seqlens_q.tolist(), (p.cu_seqlens_kv if bottom_right else p.cu_seqlens_q).tolist()
        assert (max(p.cu_seqlens_q.diff()), max(p.cu_seqlens_kv.diff())) == (p.max_seqlen_q, p.max_seqlen_kv)
        for i, (start, stop) in enumerate(pairwise(queries)):
            q, k, v = query[start:stop], key[keys[i] : keys[i + 1]], value[keys[i] : keys[i + 1]]
            scores = torch.einsum("qhd,khd->hqk", q, k)
            hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
            outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
        return torch.cat(outputs).flatten(1)


@pytest.mark.parametrize("shared", [True, False])
def test_attention_over_repeated_keys_is_that_of_whole_sequences(shared):
    torch.manual_seed(0)
    inputs = [torch.randn(14, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    packed = pack_params(BORDERS, PREFIXES if shared else None)
    found = prefixed(Naive)()(*inputs, None, None, packed_seq_params=packed)
    index, borders = seen_keys(BORDERS, PREFIXES if shared else torch.full_like(PREFIXES, -1))
    expected = []
    for i, (start, stop) in enumerate(pairwise(borders.tolist())):
        rows = (each[index[start:stop]][None] for each in inputs)
        expected.append(causal_attention(*rows, Scores(1.0))[0, -int(BORDERS[i + 1] - BORDERS[i]) :])
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(found)
    ours, theirs = (torch.autograd.grad((out * weight).sum(), inputs) for out in (found, torch.cat(expected)))
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
