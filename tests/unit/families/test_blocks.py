"""The block rules: blocks of all tensor-parallel ranks tile each Hugging Face tensor, and writes to views reach the
parameter."""

import pickle
from dataclasses import replace

import pytest
import torch

from megagrpo.families.hf_config import parse_hf_config
from megagrpo.families.shared.blocks import Local, gated, in_layer, qkv, same, vocab

HF = parse_hf_config(
    dict(model_type="llama", num_hidden_layers=2, hidden_size=24, num_attention_heads=12)
    | dict(num_key_value_heads=4, head_dim=5, intermediate_size=8, vocab_size=11)
)


def megatron_param(shape, dim):
    param = torch.nn.Parameter(torch.zeros(shape))
    param.tensor_model_parallel, param.partition_dim = dim is not None, dim if dim is not None else -1
    return param


def assemble(rule, shape, dim, tp):
    """Number every element of the ranks' parameters; return the Hugging Face tensors that the blocks make of them."""
    whole, parts = {}, []
    for rank in range(tp):
        param = megatron_param(shape, dim)
        param.data = torch.arange(param.numel(), dtype=torch.float32).view(shape) + rank * 10_000
        parts.append(param)
        for block in rule.blocks(Local(param, tp, rank, HF)):
            full = whole.setdefault(block.name, torch.full(block.shape, -1.0))
            target = full[block.slices]
            assert (target == -1).all() or dim is None, "two ranks hold the same elements"
            assert block.read(param).shape == block.block_shape == target.shape
            target.copy_(block.read(param.data))
    assert all((tensor >= 0).all() for tensor in whole.values()), "a hole"
    return whole, parts


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_qkv_is_split_by_group_across_ranks(tp):
    rows = (4 // tp) * 5 * 5  # groups x (3 queries + key + value) x head_dim
    whole, parts = assemble(qkv("{p}"), (rows, 24), 0, tp)
    assert {name: tensor.shape for name, tensor in whole.items()} == {"q": (60, 24), "k": (20, 24), "v": (20, 24)}
    groups = torch.cat([part.view(-1, 25, 24) for part in parts])  # Megatron: group by group, over the ranks
    for group in range(4):
        assert torch.equal(whole["q"][group * 15 : group * 15 + 15], groups[group, :15])
        assert torch.equal(whole["k"][group * 5 : group * 5 + 5], groups[group, 15:20])
        assert torch.equal(whole["v"][group * 5 : group * 5 + 5], groups[group, 20:])


@pytest.mark.parametrize(("tp", "heads", "kv_heads"), [(4, 12, 2), (8, 16, 4), (4, 4, 1), (8, 8, 1), (2, 2, 1)])
def test_ranks_beyond_the_kv_heads_share_the_rows_of_a_group(tp, heads, kv_heads):
    """Also where a rank has no row of the queries or of the keys, and where a cut is inside a head."""
    hf = replace(HF, num_heads=heads, num_kv_heads=kv_heads, head_dim=8)
    queries = heads // kv_heads
    rows = kv_heads * (queries + 2) * 8
    whole = torch.arange(rows * 3, dtype=torch.float32).view(kv_heads, queries + 2, 8, 3)
    expected = dict(q=whole[:, :queries], k=whole[:, queries], v=whole[:, queries + 1])
    for pattern, names in (("{p}", "qkv"), ("qkv", ["qkv"])):
        found = {name: torch.full_like(whole, -1).view(-1, 3) for name in names}
        for rank, part in enumerate(whole.view(rows, 3).chunk(tp)):
            for block in qkv(pattern).blocks(Local(part, tp, rank, hf)):
                found[block.name] = found[block.name][: block.shape[0]]
                assert (found[block.name][block.slices] == -1).all(), "two ranks hold the same elements"
                found[block.name][block.slices] = block.read(part)
        apart = {name: expected[name].reshape(-1, 3) for name in "qkv"}
        for name, tensor in found.items():
            assert torch.equal(tensor, torch.cat([*apart.values()]) if name == "qkv" else apart[name]), name


def test_qkv_bias_is_split_like_the_weight():
    whole, _ = assemble(qkv("{p}"), (50,), 0, 2)
    assert whole["q"].shape == (60,) and whole["v"].shape == (20,)


@pytest.mark.parametrize("tp", [1, 2])
def test_gate_and_up_are_stacked_per_rank(tp):
    whole, parts = assemble(gated("gate", "up"), (16 // tp, 24), 0, tp)
    assert torch.equal(whole["gate"], torch.cat([part[: 8 // tp] for part in parts]))
    assert torch.equal(whole["up"], torch.cat([part[8 // tp :] for part in parts]))


@pytest.mark.parametrize(("dim", "tp"), [(0, 2), (1, 2), (1, 3), (None, 2)])
def test_same_follows_the_partition_dimension(dim, tp):
    whole, parts = assemble(same("x"), (4, 6), dim, tp)
    assert torch.equal(whole["x"], parts[-1] if dim is None else torch.cat(parts, dim))


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_the_padding_of_the_vocabulary_belongs_to_no_block(tp):
    rows = HF.padded_vocab(tp) // tp
    whole, parts = assemble(vocab("x"), (rows, 24), 0, tp)
    assert torch.equal(whole["x"], torch.cat(list(parts))[:11])


def test_a_rank_that_holds_only_padding_holds_no_block():
    assert vocab("x").blocks(Local(megatron_param((6, 24), 0), 3, 2, HF)) == []


def test_views_write_into_the_parameter_and_blocks_survive_pickling():
    param = megatron_param((100, 24), 0)
    blocks = [
        pickle.loads(pickle.dumps(in_layer(block, 7))) for block in qkv("layer.{L}.{p}").blocks(Local(param, 1, 0, HF))
    ]
    assert [block.name for block in blocks] == ["layer.7.q", "layer.7.k", "layer.7.v"]
    for value, block in enumerate(blocks, 1):
        block.view(param.data).fill_(value)
    assert sorted(param.unique().tolist()) == [1, 2, 3]
    assert replace(blocks[0]) == blocks[0] and len(set(blocks)) == 3
