"""Gemma 4's releases: their blocks, their files, and what is refused."""

import re

from megagrpo.config import ParallelSection
from megagrpo.families.config_keys import architecture_problems
from megagrpo.families.hf_config import model_problems, parse_hf_config, untrained
from megagrpo.weights.blocks.parameter_blocks import tensor_names
from tests.unit.families.published_configs import MORE, published
from tests.unit.for_each import for_each


def test_the_last_blocks_borrow_from_the_last_block_of_their_kind():
    small, large = parse_hf_config(published("Gemma 4 E2B")), parse_hf_config(published("Gemma 4 E4B"))
    assert [small.lender(block) for block in (14, 15, 18, 19, 34)] == [None, 13, 13, 14, 14]
    assert [large.lender(block) for block in (23, 24, 28, 29, 41)] == [None, 22, 22, 23, 23]
    widths = [(model.in_block(0).intermediate_size, model.in_block(40).intermediate_size) for model in (large,)]
    assert [small.in_block(block).intermediate_size for block in (14, 15)] == [6144, 12288]
    assert widths == [(10240, 10240)]


def test_a_released_folder_has_keys_of_borrowers_which_stay_as_loaded():
    decoder = "model.language_model.layers."
    model = parse_hf_config(MORE["Gemma 4 E2B it"], [f"{decoder}0.mlp.up_proj.weight"])
    names, kept = tensor_names(model), untrained(model)
    for part in ("k_proj", "v_proj", "k_norm"):
        assert f"{decoder}14.self_attn.{part}.weight" in names and not kept(f"{decoder}14.self_attn.{part}.weight")
        assert f"{decoder}15.self_attn.{part}.weight" not in names and kept(f"{decoder}15.self_attn.{part}.weight")
    assert {f"{decoder}34.self_attn.q_proj.weight", "model.language_model.embed_tokens_per_layer.weight"} < names


@for_each(
    ("release", "change", "said"),
    [
        ("Gemma 4 26B-A4B", dict(enable_moe_block=False), "enable_moe_block=False, which transformers reads"),
        ("Gemma 4 26B-A4B", dict(num_experts=None), "set num_experts to null in a copy of config.json"),
        ("Gemma 4 26B-A4B", dict(top_k_experts=None), "config.json lacks top_k_experts"),
        ("Gemma 4 26B-A4B", dict(top_k_experts=129), "top_k_experts=129 is more than the 128 experts"),
        ("Gemma 4 26B-A4B", dict(num_kv_shared_layers=6), "num_kv_shared_layers=6 beside experts is not supported"),
        ("Gemma 4 E2B", dict(vocab_size_per_layer_input=262143), "differs from vocab_size=262144"),
        ("Gemma 4 E2B", dict(num_kv_shared_layers=31), "no block before the last num_kv_shared_layers=31 has keys"),
        ("Gemma 4 E2B", dict(num_kv_shared_layers=-1), "must be whole numbers, 0 or more"),
    ],
)
def test_what_is_not_supported_is_named(release, change, said):
    problems = architecture_problems(published(release) | change)
    assert any(said in problem for problem in problems), problems


def test_pipeline_stages_are_refused_with_the_reason():
    small, mixed = parse_hf_config(published("Gemma 4 E2B")), parse_hf_config(published("Gemma 4 26B-A4B"))
    (problem,) = model_problems(small, ParallelSection(pp=5))
    assert re.search(
        "inputs per layer come from the embeddings of tokens, which only the first stage has", str(problem)
    )
    no_inputs = parse_hf_config(published("Gemma 4 E2B") | dict(hidden_size_per_layer_input=0))
    (problem,) = model_problems(no_inputs, ParallelSection(pp=5))
    assert "decoder blocks from 15 on use keys and values of blocks before" in str(problem)
    assert model_problems(mixed, ParallelSection(pp=5)) == []
