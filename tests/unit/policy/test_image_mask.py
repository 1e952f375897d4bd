"""Tokens of one image see each other in both directions, also in windows, packs, shared prompts and chunks of ranks."""

from itertools import pairwise

import pytest
import torch

from megagrpo.data.packing.sample_packing import PackingRules, build_micro_batch
from megagrpo.platform.parallel.context import rank_indices
from megagrpo.policy.attention.causal import BLOCK_QUERIES, Window
from megagrpo.policy.attention.context_parallel import batch_chunks
from megagrpo.policy.attention.packed import pack_params
from megagrpo.policy.images.image_inputs import last_seen
from megagrpo.train_types import TrainSample
from tests.unit.policy.test_attention import attention


def sample(length: int, images: list[tuple[int, int]], prompt: int) -> TrainSample:
    """A sample with images of (first token, tokens)."""
    starts, counts = (torch.tensor(column) for column in zip(*images, strict=True)) if images else (None, None)
    inputs = dict(image_starts=starts, image_tokens=counts) if images else {}
    ids = torch.arange(length)
    return TrainSample(ids, ids >= prompt, torch.zeros(length), 1.0, 0, inputs=inputs)


def visible(length: int, images: list[tuple[int, int]], window: int | None) -> torch.Tensor:
    """transformers' mask [L, L] of Gemma 3: (causal or inside one image) and inside the window."""
    own = torch.arange(length)
    image = torch.full((length,), -1)
    for number, (start, count) in enumerate(images):
        image[start : start + count] = number
    seen = (own <= own[:, None]) | ((image == image[:, None]) & (image >= 0))
    return seen if window is None else seen & (own > own[:, None] - window)


SAMPLES = [
    (40, [(3, 9), (20, 9)], 35),
    (30, [], 10),
    (BLOCK_QUERIES * 2 + 50, [(5, 9), (BLOCK_QUERIES - 4, 9), (BLOCK_QUERIES * 2 - 9, 9)], 540),
    (BLOCK_QUERIES + 90, [], 20),
]


def dense(query, key, value, samples, window):
    """Attention of one sample after the other with the whole mask."""
    rows, borders = [], torch.tensor([0, *(length for length, _, _ in samples)]).cumsum(0).tolist()
    for (length, images, _), (a, b) in zip(samples, pairwise(borders), strict=True):
        scores = torch.einsum("qhd,khd->hqk", query[a:b], key[a:b].repeat_interleave(3, 1)) * 0.25
        weights = scores.masked_fill(~visible(length, images, window), float("-inf")).softmax(-1)
        rows.append(torch.einsum("hqk,khd->qhd", weights, value[a:b].repeat_interleave(3, 1)).flatten(1))
    return torch.cat(rows)


@pytest.mark.parametrize("window", [None, 12, 6])
def test_attention_of_packs_is_transformers_mask(window):
    torch.manual_seed(0)
    batch = build_micro_batch([sample(*one) for one in SAMPLES])
    total = int(batch.cu_seqlens[-1])
    query, key, value = (torch.randn(total, heads, 16, requires_grad=True) for heads in (6, 2, 2))
    packed, weight = pack_params(batch.cu_seqlens), torch.randn(total, 96)
    packed.last_seen = last_seen(batch)
    ours, theirs = (
        attention(window)(query, key, value, packed_seq_params=packed),
        dense(query, key, value, SAMPLES, window),
    )
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    grads, oracle = (torch.autograd.grad((out * weight).sum(), (query, key, value)) for out in (ours, theirs))
    torch.testing.assert_close(grads, oracle, atol=1e-5, rtol=1e-4)
    causal = attention(window)(query, key, value, packed_seq_params=pack_params(batch.cu_seqlens))
    assert (causal - theirs).abs().max() > 0.1


@pytest.mark.parametrize("window", [None, 12])
def test_responses_share_a_prompt_with_images(window):
    torch.manual_seed(0)
    inputs = dict(image_starts=torch.tensor([2]), image_tokens=torch.tensor([9]))
    ids = torch.arange(22)
    both = [TrainSample(ids, ids >= 14, torch.zeros(22), 1.0, i, inputs=inputs) for i in range(2)]
    batch = build_micro_batch(both, PackingRules(max_tokens=100, share_prompts=True))
    assert batch.prefixes is not None and batch.cu_seqlens.tolist() == [0, 13, 22, 31]
    packed = pack_params(batch.cu_seqlens, batch.prefixes)
    packed.last_seen = last_seen(batch)
    rows = [torch.randn(31, heads, 16) for heads in (6, 2, 2)]
    ours = attention(window)(*rows, packed_seq_params=packed)
    for own in (range(13, 22), range(22, 31)):
        index = torch.tensor([*range(13), *own])
        theirs = dense(*(row[index] for row in rows), [(22, [(2, 9)], 14)], window)
        torch.testing.assert_close(ours[index], theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 12, 6])
@pytest.mark.parametrize("cp_size", [2, 4])
def test_chunks_of_context_parallel_ranks_have_transformers_mask(cp_size, window):
    rules = PackingRules(max_tokens=2000, align=2 * cp_size, sequence_align=2 * cp_size)
    batch = build_micro_batch([sample(*one) for one in SAMPLES], rules)
    total = int(batch.cu_seqlens[-1])
    found = torch.zeros(total, total, dtype=torch.bool)
    of_ranks = [rank_indices(batch.cu_seqlens, cp_size, rank) for rank in range(cp_size)]
    gathered, through = torch.cat(of_ranks), window and Window(window)
    for rank, own in enumerate(of_ranks):
        device = torch.device("cpu")
        chunks, pack_order = batch_chunks(batch.cu_seqlens, None, cp_size, rank, device, last_seen(batch))
        rows = []
        for chunk in (chunk.within(through) for chunk in chunks):
            shown = chunk.mask(through, torch.float32) == 0
            for keys, of_queries in zip(chunk.keys, shown, strict=True):
                rows += [gathered[keys[row]] for row in of_queries]
        for query, row in zip(own.tolist(), pack_order.tolist(), strict=True):
            found[query, rows[row]] = True
    for (length, images, _), start in zip(SAMPLES, batch.cu_seqlens.tolist(), strict=False):
        inside = found[start : start + length]
        assert torch.equal(inside[:, start : start + length], visible(length, images, window))
        assert inside.sum() == inside[:, start : start + length].sum()


def test_a_shared_prompt_that_ends_inside_an_image_is_refused():
    inputs = dict(image_starts=torch.tensor([2]), image_tokens=torch.tensor([9]))
    ids = torch.arange(20)
    both = [TrainSample(ids, ids >= 13, torch.zeros(20), 1.0, i, inputs=inputs) for i in range(2)]
    batch = build_micro_batch(both, PackingRules(max_tokens=100, align=8, sequence_align=8, share_prompts=True))
    with pytest.raises(ValueError, match=r"^train.share_prompts: .* ends inside an image \(tokens 2 to 10\)"):
        last_seen(batch)
