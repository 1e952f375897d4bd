"""The planner's model of how vLLM cuts tensors, where vLLM's loaders cannot run: pieces cover each tensor, and errors
name the tensor."""

import pytest

from benchmarks.scaling.loader_slices import EngineLayout, pipeline_stages, wanted_boxes
from megagrpo.families.hf_config import parse_hf_config
from megagrpo.families.shared.boxes import cut, missing, size, whole
from tests.unit.for_each import for_each

RAW = dict(num_hidden_layers=5, hidden_size=8, num_attention_heads=8, num_key_value_heads=2, head_dim=4) | dict(
    intermediate_size=24, vocab_size=100
)
DENSE = parse_hf_config(RAW | {"model_type": "llama", "tie_word_embeddings": True})
MIXED = parse_hf_config(
    RAW | dict(model_type="qwen3_moe", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=8)
)
SHAPES = {
    "model.embed_tokens.weight": (100, 8),
    "model.norm.weight": (8,),
    "model.layers.3.self_attn.k_proj.weight": (8, 8),
    "model.layers.3.self_attn.q_proj.bias": (32,),
    "model.layers.3.self_attn.o_proj.weight": (8, 32),
}


def boxes(name, model, **layout):
    return wanted_boxes({name: SHAPES.get(name, (8, 8))}, model, EngineLayout(**layout))[name]


def test_rows_columns_and_replicated_heads():
    assert boxes("model.layers.3.self_attn.o_proj.weight", DENSE, tp=2) == {
        cut((8, 32), 1, 0, 16): [0],
        cut((8, 32), 1, 16, 32): [1],
    }
    assert boxes("model.layers.3.self_attn.q_proj.bias", DENSE, tp=4) == {
        cut((32,), 0, 8 * i, 8 * i + 8): [i] for i in range(4)
    }
    assert boxes("model.layers.3.self_attn.k_proj.weight", DENSE, tp=4) == {
        cut((8, 8), 0, 0, 4): [0, 1],
        cut((8, 8), 0, 4, 8): [2, 3],
    }
    assert boxes("model.norm.weight", DENSE, tp=2, servers=2) == {whole((8,)): [0, 1, 2, 3]}


def test_the_padded_vocabulary_is_sharded_and_no_rank_needs_its_padding():
    assert boxes("model.embed_tokens.weight", DENSE, tp=4) == {  # 128 rows, 32 on each rank
        cut((100, 8), 0, 32 * i, min(32 * i + 32, 100)): [i] for i in range(4)
    }
    with pytest.raises(
        ValueError,
        match=r"rollout\.tp: model\.embed_tokens\.weight has 128 rows with vLLM's padding, which tp=3 does not",
    ):
        boxes("model.embed_tokens.weight", DENSE, tp=3)


def test_pipeline_stages_take_their_layers_and_the_ends_of_the_model():
    assert pipeline_stages(5, 2) == [range(0, 3), range(3, 5)] and pipeline_stages(10, 4) == [
        range(0, 2),
        range(2, 5),
        range(5, 8),
        range(8, 10),
    ]
    layer = "model.layers.3.self_attn.o_proj.weight"
    assert list(boxes(layer, DENSE, pp=2, servers=2).values()) == [[1, 3]]
    assert list(boxes("model.embed_tokens.weight", DENSE, pp=3).values()) == [[0, 2]]  # tied: the last stage's head
    assert list(boxes("model.embed_tokens.weight", MIXED, pp=3).values()) == [[0]]
    assert list(boxes("model.norm.weight", DENSE, tp=2, pp=2).values()) == [[2, 3]]


def test_experts_are_shared_out_whole_or_cut():
    name = "model.layers.3.mlp.experts.{}.gate_proj.weight"
    assert [list(boxes(name.format(e), MIXED, tp=2, ep=4).values()) for e in range(6)] == [
        [[0]],
        [[0]],
        [[1]],
        [[1]],
        [[2]],
        [[3]],
    ]
    assert boxes(name.format(5), MIXED, tp=2) == {cut((8, 8), 0, 0, 4): [0], cut((8, 8), 0, 4, 8): [1]}
    assert list(boxes("model.layers.3.mlp.gate.weight", MIXED, tp=2, ep=4).values()) == [[0, 1, 2, 3]]
    assert list(boxes("model.layers.3.self_attn.o_proj.weight", MIXED, tp=2, ep=4).values()) == [[0, 2], [1, 3]]


def test_what_cannot_be_cut_is_refused_by_name():
    with pytest.raises(
        ValueError,
        match=r"rollout\.tp: model\.layers\.3\.self_attn\.o_proj\.weight of shape \(8, 32\) cannot be cut into 3",
    ):
        boxes("model.layers.3.self_attn.o_proj.weight", DENSE, tp=3)
    with pytest.raises(
        ValueError, match=r"model\.layers\.0\.odd\.weight: unknown how vLLM shards tensors of this kind"
    ):
        boxes("model.layers.0.odd.weight", DENSE)
    with pytest.raises(ValueError, match="ep 3 workers of a server need a multiple of tp 2"):
        EngineLayout(tp=2, ep=3)


@for_each("tp", [1, 2, 4])
@for_each("name", SHAPES)
def test_the_workers_of_a_server_want_all_of_a_tensor_between_them(name, tp):
    found = boxes(name, DENSE, tp=tp)
    assert missing(whole(SHAPES[name]), found) == [] and all(size(box) for box in found)
