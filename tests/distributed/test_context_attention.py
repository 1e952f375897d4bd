"""The parts of context parallelism on ranks: attention against a naive one in float64, and rows that are gathered
again."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks

from megagrpo.config import ParallelSection
from megagrpo.platform.parallel.context import gather_rows, gathered_indices, rank_indices
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.attention import context_parallel
from megagrpo.policy.attention.packed import Rotary, TorchAttention, pack_params

HEADS, GROUPS, DIM = 6, 2, 16
PACKS = {
    "one sequence": ([64], None),
    "many lengths": ([8, 240, 16, 8, 96, 40, 0, 24], None),
    "few new tokens beside many": ([24, 8, 32], [-1, 0, -1]),  # both need 32, so that they are padded to one length
    "shared prompts": ([24, 8, 40, 16, 8, 8], [-1, 0, 0, 0, -1, 4]),
}


def pack(name: str) -> tuple[torch.Tensor, torch.Tensor | None, tuple[torch.Tensor, ...]]:
    """Borders, prefixes, and float64 query, key, value and a gradient for the output, of the whole pack."""
    lengths, prefixes = PACKS[name]
    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS, DIM), (GROUPS, DIM), (GROUPS, DIM), (HEADS * DIM,))
    tensors = tuple(torch.randn(sum(lengths), *shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return torch.tensor([0, *lengths]).cumsum(0).int(), None if prefixes is None else torch.tensor(prefixes), tensors


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate each pair (x_i, x_{i + d/2}), as a complex number, by its angle."""
    angles = positions[:, None, None] * frequencies().double()
    turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), -1)


def frequencies() -> torch.Tensor:
    return 1 / 10_000 ** (torch.arange(0, DIM, 2) / DIM)


def naive(name: str, window: int | None, softcap: float | None) -> list[torch.Tensor]:
    """The output [T, HEADS * DIM] and the gradients of query, key and value by the formula, one token at a time."""
    cu_seqlens, prefixes, (query, key, value, weight) = pack(name)
    leaves = [t.clone().requires_grad_() for t in (query, key, value)]
    spans = list(pairwise(cu_seqlens.tolist()))
    seen, positions = [], torch.empty(len(query))
    for i, (start, stop) in enumerate(spans):
        before = list(range(*spans[prefixes[i]])) if prefixes is not None and prefixes[i] >= 0 else []
        for token in range(start, stop):
            seen.append([*before, *range(start, token + 1)])
            positions[token] = len(seen[-1]) - 1
            seen[-1] = seen[-1][-(window or 0) :]
    q, k = rotated(leaves[0], positions), rotated(leaves[1], positions)
    share = HEADS // GROUPS
    k, v = k.repeat_interleave(share, 1), leaves[2].repeat_interleave(share, 1)
    rows = []
    for t, s in enumerate(seen):
        scores = torch.einsum("hd,khd->hk", q[t], k[s]) / DIM**0.5
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        rows.append(torch.einsum("hk,khd->hd", scores.softmax(-1), v[s]))
    out = torch.stack(rows).flatten(1)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


def attend(name: str, cp_size: int, max_queries: int, window: int | None, softcap: float | None) -> list:
    """This rank's tokens, and the results of `naive` for them."""
    from megatron.core.transformer.enums import AttnMaskType

    context_parallel.MAX_QUERIES = max_queries
    layout = init_layout(ParallelSection(cp=cp_size))
    window_size = None if window is None else (window - 1, 0)
    config = SimpleNamespace(
        kv_channels=DIM,
        window_size=window_size,
        window_attn_skip_freq=None,
        softmax_type="vanilla",
        attention_dropout=0.0,
    )
    attention = TorchAttention(config, 1, AttnMaskType.causal, "self", pg_collection=layout.process_groups)
    attention.rotary, attention.softcap = Rotary(frequencies()), softcap
    cu_seqlens, prefixes, tensors = pack(name)
    indices = rank_indices(cu_seqlens, cp_size, layout.cp_rank)
    query, key, value, weight = (t[indices] for t in tensors)
    leaves = [t.requires_grad_() for t in (query, key, value)]
    out = attention(*leaves, packed_seq_params=pack_params(cu_seqlens, prefixes, indices))
    results = [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]
    layout.close()
    return [indices.numpy(), *(r.numpy() for r in results)]


@pytest.mark.parametrize(
    ("name", "cp_size", "max_queries", "window", "softcap"),
    [
        ("one sequence", 2, 1024, None, None),
        ("many lengths", 4, 1024, None, None),
        ("many lengths", 2, 20, None, None),
        ("many lengths", 2, 1024, 7, None),
        ("many lengths", 2, 20, 50, 2.0),
        ("shared prompts", 2, 1024, None, None),
        ("shared prompts", 4, 1024, None, None),
        ("shared prompts", 2, 1024, 5, None),
        ("few new tokens beside many", 2, 1024, 5, None),
    ],
)
def test_values_and_gradients_equal_the_naive_formula_in_float64(name, cp_size, max_queries, window, softcap):
    expected = naive(name, window, softcap)
    found = [torch.full_like(t, torch.nan) for t in expected]
    for indices, *results in run_ranks(attend, cp_size, name, cp_size, max_queries, window, softcap):
        for whole, part in zip(found, results, strict=True):
            whole[indices] = torch.from_numpy(part)
    for part, whole, reference in zip(("output", "query", "key", "value"), found, expected, strict=True):
        # cos and sin are computed in float32
        torch.testing.assert_close(whole, reference, atol=2e-5, rtol=1e-5, msg=part)


def _gather(cp_size: int) -> tuple:
    layout = init_layout(ParallelSection(cp=cp_size))
    cu_seqlens = torch.tensor([0, 8, 8, 24]).int()
    whole = torch.arange(48.0).view(2, 24)
    indices = rank_indices(cu_seqlens, cp_size, layout.cp_rank)
    mine = whole[:, indices].requires_grad_()
    pack_order = gathered_indices(cu_seqlens, cp_size) if cp_size > 1 else None
    gathered = gather_rows(mine, indices, pack_order, layout.cp_group)
    (gathered**3).sum().backward()
    equal = torch.equal(gathered, whole), torch.equal(mine.grad, 3 * whole[:, indices] ** 2)
    layout.close()
    return equal


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_gathered_rows_are_in_pack_order_and_their_gradient_is_each_ranks_own_part(cp_size):
    assert run_ranks(_gather, cp_size, cp_size) == [(True, True)] * cp_size


def _leaders(parallel: dict) -> tuple:
    layout = init_layout(ParallelSection(**parallel))
    place = (
        layout.dp_rank,
        layout.dp_cp_rank,
        layout.is_dp_leader,
        torch.distributed.get_process_group_ranks(layout.cp_group),
    )
    layout.close()
    return place


def test_one_rank_speaks_for_the_context_parallel_ranks_of_a_replica():
    assert run_ranks(_leaders, 4, dict(cp=2)) == [
        (0, 0, True, [0, 1]),
        (0, 1, False, [0, 1]),
        (1, 2, True, [2, 3]),
        (1, 3, False, [2, 3]),
    ]
    assert [leads for _, _, leads, _ in run_ranks(_leaders, 4, dict(cp=2, tp=2))] == [True, False, False, False]
