"""Keys of config.json that a family does not implement are refused by name; keys of published releases are not."""

import json
import subprocess
import sys

import pytest

from megagrpo.config import ParallelSection
from megagrpo.families.config_keys import HARMLESS, architecture_problems
from megagrpo.families.family_index import FAMILIES
from megagrpo.families.hf_config import model_problems, parse_hf_config
from megagrpo.families.shared.family import COMMON
from tests.family_examples import EXAMPLES
from tests.unit.families.published_configs import PUBLISHED, published
from tests.unit.for_each import for_each

FIRST = {kind: name for name, (kind, _) in reversed(PUBLISHED.items())}  # one release of each family


def problems(raw: dict) -> list[str]:
    """Why a model cannot be trained on one rank."""
    return architecture_problems(raw) or [one.text for one in model_problems(parse_hf_config(raw), ParallelSection())]


# Keys that change results in other families' models, each with a value that does.
FOREIGN = (
    dict(embedding_multiplier=12, logits_scaling=8, residual_multiplier=0.22, attention_multiplier=0.015625)
    | dict(scale_emb=12, scale_depth=1.4, dim_model_base=256, logit_scale=0.0625, qk_layernorm=True, clip_qkv=8.0)
    | dict(attention_out_bias=True, norm_type="layernorm", norm_eps=1e-5, layer_norm_eps=1e-5)
    | dict(no_rope_layers=[1, 1, 1, 0], no_rope_layer_interval=4, llama_4_scaling_beta=0.1, parallel_attn=True)
    | dict(position_embedding_type="alibi", dual_chunk_attention_config=dict(chunk_size=262144), is_causal=False)
    | dict(use_bidirectional_attention=True, quantization=dict(bits=4, group_size=64))
    | dict(compression_config=dict(quant_method="compressed-tensors"), text_config=dict(hidden_size=64))
    | dict(index_topk=2048, attn_output_gate=True)
)


@for_each("name", PUBLISHED)
def test_a_published_config_loads(name):
    assert architecture_problems(published(name)) == []
    assert parse_hf_config(published(name)).family == PUBLISHED[name][0]


def test_every_family_has_a_published_config_here_and_an_example():
    assert FIRST.keys() == EXAMPLES.keys() == FAMILIES.keys()


@for_each("kind", FAMILIES)
def test_a_key_of_another_family_is_refused_with_key_value_and_family(kind):
    raw, family = published(FIRST[kind]), FAMILIES[kind]
    for key, value in FOREIGN.items():
        if key in (*family.keys, *family.ignored) or value == family.fixed_values.get(key, [None])[0]:
            continue
        if key == "qk_layernorm" and parse_hf_config(raw).qk_norm:
            value = False
        (problem,) = architecture_problems(raw | {key: value})
        assert f"config.json ({kind}) has {key}={value!r}"[:60] in problem, problem
    interleaved = parse_hf_config(raw).rotary_interleaved or parse_hf_config(raw).mla is not None
    for key, value in dict(rope_interleaved=not interleaved, use_qk_norm=not parse_hf_config(raw).qk_norm).items():
        if key in (*family.keys, *family.ignored):
            continue
        (problem,) = architecture_problems(raw | {key: value})
        assert f"({kind}) has {key}={value}" in problem


@for_each("kind", FAMILIES)
def test_a_key_that_only_other_families_read_is_refused(kind):
    own, raw = FAMILIES[kind], published(FIRST[kind])
    known = HARMLESS.union(COMMON, own.keys, own.ignored, own.fixed_values, ["layer_types"])
    foreign = {key for family in FAMILIES.values() for key in family.keys} - known
    assert foreign
    for key in foreign:
        (problem,) = architecture_problems(raw | {key: 3})
        assert f"({kind}) has {key}=3, a key that the trainer does not know" in problem
        assert architecture_problems(raw | {key: None}) == []


@pytest.mark.parametrize("kind", ["llama", "mistral", "mixtral", "qwen3_moe", "phi3", "glm4", "deepseek_v3"])
def test_layer_types_with_a_window_that_vllm_alone_would_read_are_refused(kind):
    raw = published(FIRST[kind]) | {"sliding_window": 64}
    types = ["sliding_attention", "full_attention"] * raw["num_hidden_layers"]
    problems = architecture_problems(raw | {"layer_types": types[: raw["num_hidden_layers"]]})
    assert any(f"layer_types in config.json ({kind}) lets vLLM choose" in problem for problem in problems)
    full = {"layer_types": ["full_attention"] * raw["num_hidden_layers"], "sliding_window": None}
    assert architecture_problems(raw | full) == []


@pytest.mark.parametrize(
    ("name", "place", "key"),
    [
        ("Llama 3.1 8B Instruct", "rope_scaling", "mrope_section"),
        ("Llama 3.1 8B Instruct", "rope_scaling", "attention_factor"),
        ("Qwen2.5 1.5B, written by transformers 5", "rope_parameters", "mrope_section"),
        ("Qwen2.5 1.5B, written by transformers 5", "rope_parameters", "use_fope"),
        ("DeepSeek V2 Lite", "rope_scaling", "llama_4_scaling_beta"),
    ],
)
def test_an_unknown_rotary_parameter_is_refused(name, place, key):
    raw = published(name)
    (problem,) = architecture_problems(raw | {place: raw[place] | {key: [1, 2]}})
    assert f"has {place}.{key}=[1, 2], a key that the trainer does not know" in problem


def test_another_class_and_code_of_the_models_own_are_refused():
    raw = published("Llama 2 7B")
    (problem,) = architecture_problems(raw | {"architectures": ["GraniteForCausalLM"]})
    assert "architectures=['GraniteForCausalLM'] with model_type=llama, whose class is LlamaForCausalLM" in problem
    code = {"AutoConfig": "configuration_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
    for auto_map in (
        code,
        "modeling_mine.MineForCausalLM",
        {"AutoModelForCausalLM": "owner/mine--modeling_mine.MineForCausalLM"},
    ):
        (problem,) = architecture_problems(raw | {"auto_map": auto_map})
        assert "MineForCausalLM, custom code" in problem and "remove auto_map from a copy of config.json" in problem


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn' in config.json; it must be an object of keys and values"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5' in config.json; it must be a number"),
        ({"layer_types": True}, "layer_types is True in config.json; it must be a list"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false' in config.json; it must be true or false"),
        (
            {"max_position_embeddings": 4096.5},
            "max_position_embeddings is 4096.5 in config.json; it must be a whole number",
        ),
        ({"head_dim": 7}, "7 dimensions of each head are rotated; the number must be even and positive"),
    ],
)
def test_a_value_of_the_wrong_type_is_named(change, text):
    (problem,) = problems(published("Llama 2 7B") | change)
    assert text in problem


@pytest.mark.parametrize("name", ["Mixtral 8x7B", "DeepSeek V3 in bfloat16", "gpt-oss 20B in bfloat16"])
def test_one_expert_a_token_whose_weight_is_always_1_is_refused(name):
    (problem,) = problems(published(name) | {"num_experts_per_tok": 1})
    assert "num_experts_per_tok=1 with normalized expert weights" in problem


def test_plan_refuses_such_a_model_in_one_line_with_exit_code_2(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(published("Llama 2 7B") | {"embedding_multiplier": 12}))
    command = [sys.executable, "-m", "megagrpo", "plan", "configs/quickstart.yaml", f"model.path={tmp_path}"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 2 and "Traceback" not in ran.stderr
    assert "config.json (llama) has embedding_multiplier=12; a model-specific scale" in ran.stdout + ran.stderr
