"""Packed attention and rotation against one sequence at a time."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from megagrpo.policy.attention.causal import BLOCK_QUERIES, MAX_GROUPED_LENGTH, Scores, Window, causal_attention
from megagrpo.policy.attention.packed import MIN_FILL, TorchAttention, batch_sequences, pack_params
from tests.unit.for_each import for_each


def attention(
    window: int | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None
) -> TorchAttention:
    from megatron.core.transformer.enums import AttnMaskType

    size = None if window is None else (window - 1, 0)
    sizes = dict(kv_channels=16, window_size=size, window_attn_skip_freq=[0, 1])
    if sinks is not None:
        sizes |= dict(num_attention_heads=2 * len(sinks), tensor_model_parallel_size=2, params_dtype=torch.float32)
    kind = "vanilla" if sinks is None else "learnable"
    made = TorchAttention(
        SimpleNamespace(**sizes, softmax_type=kind, attention_dropout=0.0), 2, AttnMaskType.causal, "self"
    )
    made.softcap = softcap
    if sinks is not None:
        made.softmax_offset.data.copy_(sinks)
    return made


def naive(query, key, value, borders, scale, window=None, softcap=None, sinks=None):
    """The formula, one sequence and one head at a time."""
    out = torch.zeros(query.shape[0], query.shape[1], value.shape[2])
    share = query.shape[1] // key.shape[1]
    for a, b in itertools.pairwise(borders):
        for head in range(query.shape[1]):
            scores = query[a:b, head] @ key[a:b, head // share].T * scale
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(torch.ones(b - a, b - a).triu(1).bool(), float("-inf"))
            if window is not None:
                scores = scores.masked_fill(torch.ones(b - a, b - a).tril(-window).bool(), float("-inf"))
            weights = scores.exp()
            total = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks[head].exp())
            out[a:b, head] = weights / total @ value[a:b, head // share]
    return out.flatten(1)


@for_each("lengths", [[5, 40, 1, 39, 0, 12, 44, 3], [MAX_GROUPED_LENGTH + 20, 7, MAX_GROUPED_LENGTH], [1], [30]])
@for_each(("groups", "width"), [(1, 16), (2, 16), (6, 16), (6, 10)])
def test_a_pack_gives_values_and_gradients_of_its_sequences_alone(lengths, groups, width):
    torch.manual_seed(0)
    borders = torch.tensor([0, *lengths]).cumsum(0).int()
    total = sum(lengths)
    sizes = ((6, 16), (groups, 16), (groups, width))
    query, key, value = (torch.randn(total, heads, size, requires_grad=True) for heads, size in sizes)
    weight = torch.randn(total, 6 * width)
    packed = attention()(query, key, value, packed_seq_params=pack_params(borders))
    grads = torch.autograd.grad((packed * weight).sum(), (query, key, value))
    alone = naive(query, key, value, borders.tolist(), 0.25)
    expected = torch.autograd.grad((alone * weight).sum(), (query, key, value))
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)
    for grad, reference in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, reference, atol=1e-5, rtol=1e-4)


@for_each("lengths", [[5, 40, 1, 39, 8], [2 * BLOCK_QUERIES + 44, 9]])
@for_each(("window", "softcap"), [(8, None), (300, None), (None, 2.0), (8, 2.0)])
def test_windows_and_caps_give_values_and_gradients_of_the_formula(lengths, window, softcap):
    torch.manual_seed(0)
    borders = torch.tensor([0, *lengths]).cumsum(0).int()
    leaves = [torch.randn(sum(lengths), heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    weight = torch.randn(sum(lengths), 64)
    packed = attention(window, softcap)(*leaves, packed_seq_params=pack_params(borders))
    alone = naive(*leaves, borders.tolist(), 0.25, window, softcap)
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)
    grads, expected = (torch.autograd.grad((out * weight).sum(), leaves) for out in (packed, alone))
    for grad, reference in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, reference, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("lengths", [[5, 40, 1, 39, 8], [2 * BLOCK_QUERIES + 44, 9]], ids=str)
@pytest.mark.parametrize("size", [8, 300])
def test_chunks_are_attended_to_like_sequences_of_their_own(lengths, size):
    torch.manual_seed(0)
    borders = torch.tensor([0, *lengths]).cumsum(0).int()
    chunks = sorted(
        {*borders.tolist(), *(i for a, b in itertools.pairwise(borders.tolist()) for i in range(a, b, size))}
    )
    query, key, value = (torch.randn(sum(lengths), heads, 16) for heads in (4, 2, 2))
    made = attention()
    made.window = Window(size, chunked=True)
    packed = made(query, key, value, packed_seq_params=pack_params(borders))
    torch.testing.assert_close(packed, naive(query, key, value, chunks, 0.25), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lengths", [[5, 40, 1, 39, 8], [2 * BLOCK_QUERIES + 44, 9]], ids=str)
@pytest.mark.parametrize("window", [None, 8])
def test_sinks_take_their_share_and_get_their_gradient(lengths, window):
    torch.manual_seed(0)
    borders, sinks = torch.tensor([0, *lengths]).cumsum(0).int(), torch.randn(4, requires_grad=True)
    leaves = [torch.randn(sum(lengths), heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    weight = torch.randn(sum(lengths), 64)
    made = attention(window, sinks=sinks)
    packed = made(*leaves, packed_seq_params=pack_params(borders))
    alone = naive(*leaves, borders.tolist(), 0.25, window, sinks=sinks)
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)
    grads = torch.autograd.grad((packed * weight).sum(), (*leaves, made.softmax_offset))
    expected = torch.autograd.grad((alone * weight).sum(), (*leaves, sinks))
    for grad, reference in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, reference, atol=1e-4, rtol=1e-4)


def test_a_layer_that_megatron_leaves_out_has_no_window():
    from megatron.core.transformer.enums import AttnMaskType

    config = SimpleNamespace(
        kv_channels=16, window_size=(7, 0), window_attn_skip_freq=[0, 1], softmax_type="vanilla", attention_dropout=0.0
    )
    assert [TorchAttention(config, number, AttnMaskType.causal, "self").window for number in (1, 2)] == [
        None,
        Window(8),
    ]


def test_an_unpacked_batch_gives_the_same():
    query, key, value = (torch.randn(20, 2, heads, 16) for heads in (6, 2, 2))
    out = attention()(query, key, value)
    for i in range(2):
        torch.testing.assert_close(
            out[:, i], naive(query[:, i], key[:, i], value[:, i], [0, 20], 0.25), atol=1e-5, rtol=1e-5
        )


def test_short_and_long_paths_agree():
    query, key, value = (torch.randn(3, MAX_GROUPED_LENGTH + 1, heads, 16) for heads in (6, 2, 2))
    long = causal_attention(query, key, value, Scores(0.25))
    short = causal_attention(query[:, :-1], key[:, :-1], value[:, :-1], Scores(0.25))
    torch.testing.assert_close(long[:, :-1], short, atol=1e-5, rtol=1e-5)


def test_batches_waste_little_and_place_every_token_once():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 90, (80,), generator=generator).tolist()
    borders = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    batches = batch_sequences(borders, torch.device("cpu"))
    assert sum(rows.numel() for rows in batches.rows) <= borders[-1] / MIN_FILL
    assert len(batches.rows) <= 12
    flat_rows = torch.cat([rows.flatten() for rows in batches.rows])
    assert torch.equal(flat_rows[batches.pack_order], torch.arange(borders[-1]))


def test_a_pack_whose_borders_do_not_match_is_caught():
    tokens = torch.randn(10, 2, 16)
    with pytest.raises(AssertionError, match="cu_seqlens end at 9, the pack has 10 tokens"):
        attention()(tokens, tokens, tokens, packed_seq_params=pack_params(torch.tensor([0, 9]).int()))


@pytest.mark.parametrize("window", [None, 4])
def test_sequences_that_continue_a_prefix_get_values_and_gradients_as_if_it_were_repeated(window):
    torch.manual_seed(0)
    borders, prefixes = torch.tensor([0, 7, 10, 15, 21, 22]).int(), torch.tensor([-1, 0, 0, -1, 3])
    query, key, value = (torch.randn(22, heads, 16, requires_grad=True) for heads in (6, 2, 2))
    weight = torch.randn(22, 96)
    packed = attention(window)(query, key, value, packed_seq_params=pack_params(borders, prefixes))
    # The same tokens, with each prefix repeated before its continuation; the test compares only a sequence's own rows.
    repeated = [(0, 7, None), (7, 10, (0, 7)), (10, 15, (0, 7)), (15, 21, None), (21, 22, (15, 21))]
    expected = []
    for start, stop, prefix in repeated:
        rows = torch.cat([torch.arange(*prefix) if prefix else torch.arange(0), torch.arange(start, stop)])
        alone = naive(query[rows], key[rows], value[rows], [0, len(rows)], 0.25, window)
        expected.append(alone[len(rows) - (stop - start) :])
    expected = torch.cat(expected)
    torch.testing.assert_close(packed, expected, atol=1e-5, rtol=1e-5)
    grads = torch.autograd.grad((packed * weight).sum(), (query, key, value))
    oracle = torch.autograd.grad((expected * weight).sum(), (query, key, value))
    for grad, reference in zip(grads, oracle, strict=True):
        torch.testing.assert_close(grad, reference, atol=1e-5, rtol=1e-4)
