"""Images in a batch of vLLM for CPU: its kernel computes the mask of Gemma 3, also after a hit in the prefix cache."""

import pytest
import torch

HEADS, GROUPS, WIDTH, BLOCK = 4, 2, 32, 32
# (tokens, tokens whose keys are cached, images as vLLM has them: first and last token)
REQUESTS = [(70, 0, [(3, 11), (20, 28)]), (40, 0, []), (60, 32, [(2, 10), (27, 35), (40, 48)]), (50, 49, [(4, 12)])]


@pytest.fixture(scope="module", autouse=True)
def kernels():
    from vllm.platforms import current_platform

    current_platform.import_kernels()


def batch():
    """vLLM's metadata of the queries of `REQUESTS`, each with three blocks of the cache."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    counts = torch.tensor([length - cached for length, cached, _ in REQUESTS])
    borders = torch.cat([torch.zeros(1), counts.cumsum(0)]).int()
    lengths = torch.tensor([length for length, _, _ in REQUESTS], dtype=torch.int32)
    tables = torch.arange(3 * len(REQUESTS), dtype=torch.int32).view(-1, 3)
    return CommonAttentionMetadata(
        query_start_loc=borders,
        query_start_loc_cpu=borders,
        seq_lens=lengths,
        num_reqs=len(REQUESTS),
        num_actual_tokens=int(borders[-1]),
        max_query_len=int(counts.max()),
        max_seq_len=70,
        block_table_tensor=tables,
        slot_mapping=torch.zeros(int(borders[-1]), dtype=torch.int64),
        mm_req_doc_ranges={i: images for i, (_, _, images) in enumerate(REQUESTS)},
    )


def computed(common, query, caches, window):
    """The kernel's output, as vLLM's attention for CPU calls it."""
    from vllm import _custom_ops as ops

    dynamic = common.causal if isinstance(common.causal, torch.Tensor) else None
    shape = common.num_reqs, HEADS, GROUPS, WIDTH, common.seq_lens, torch.float32, common.query_start_loc
    plan = ops.cpu_attn_get_scheduler_metadata(*shape, dynamic is None, window, "vec", True, dynamic_causal=dynamic)
    out, table = torch.zeros_like(query), common.block_table_tensor
    rows = common.query_start_loc, common.seq_lens, 0.25, dynamic is None, None, window, table, 0.0, plan, None, dynamic
    ops.cpu_attention_with_kv_cache(query, *caches, out, *rows)
    return out


@pytest.mark.parametrize("window", [-1, 9, 16])
def test_the_kernel_computes_the_mask_of_images(window):
    from vllm import _custom_ops as ops

    from megagrpo.sync.vllm_side.cpu.cpu_kernels import split_at_images

    torch.manual_seed(0)
    common, caches, expected, queries = batch(), torch.zeros(3 * len(REQUESTS), GROUPS, BLOCK * 2, WIDTH), [], []
    for number, (length, cached, images) in enumerate(REQUESTS):
        q, k, v = (torch.randn(length, heads, WIDTH) for heads in (HEADS, GROUPS, GROUPS))
        slots = 3 * BLOCK * number + torch.arange(length)
        ops.cpu_attn_reshape_and_cache(k, v, *caches.chunk(2, dim=2), slots, "vec")
        own = torch.arange(length)
        image = torch.full((length,), -1)
        for index, (first, last) in enumerate(images):
            image[first : last + 1] = index
        seen = (own <= own[:, None]) | ((image == image[:, None]) & (image >= 0))
        seen = seen if window < 0 else seen & (own > own[:, None] - window)
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) * 0.25
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        expected.append(torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(2, 1))[cached:])
        queries.append(q[cached:])
    query, expected = torch.cat(queries), torch.cat(expected)
    parts = caches.chunk(2, dim=2)
    torch.testing.assert_close(computed(split_at_images(common), query, parts, window), expected, atol=1e-5, rtol=1e-5)
    assert (computed(common, query, parts, window) - expected).abs().max() > 0.1


def test_batches_without_queries_of_images_stay_as_they_are():
    from megagrpo.sync.vllm_side.cpu.cpu_kernels import split_at_images

    common = batch()
    common.mm_req_doc_ranges = {2: [(2, 10)], 3: [(4, 12)]}  # before the queries
    assert split_at_images(common) is common
    common.mm_req_doc_ranges = None
    assert split_at_images(common) is common


def test_an_image_that_a_chunk_of_the_prompt_cuts_is_no_silent_error():
    from megagrpo.sync.vllm_side.cpu.cpu_kernels import split_at_images

    common = batch()
    common.mm_req_doc_ranges = {0: [(65, 73)]}
    with pytest.raises(AssertionError, match="a chunk of a prompt ends inside an image"):
        split_at_images(common)
