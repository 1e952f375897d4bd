"""The text model of a multimodal config.json, and its names of tensors."""

import json
from pathlib import Path

import pytest

from megagrpo.families.config_keys import architecture_problems, text_config
from megagrpo.families.hf_config import load_hf_config, parse_hf_config, table_of, untrained
from megagrpo.families.parts.llama_table import EMBEDDING, HEAD
from megagrpo.families.shared.stored_names import HEADERS_FILE, INDEX, stored_names
from megagrpo.families.shared.wrapper import NAMINGS, Naming, Wrapper
from megagrpo.weights.blocks.parameter_blocks import tensor_names
from tests.unit.families.published_configs import MORE

# config.json of Gemma 3 4B as published: what transformers takes by default is left out.
GEMMA3 = dict(
    architectures=["Gemma3ForConditionalGeneration"],
    boi_token_index=255999,
    eoi_token_index=256000,
    eos_token_id=[1, 106],
    image_token_index=262144,
    initializer_range=0.02,
    mm_tokens_per_image=256,
    model_type="gemma3",
    text_config=dict(hidden_size=2560, intermediate_size=10240, model_type="gemma3_text", num_hidden_layers=34)
    | dict(rope_scaling=dict(factor=8.0, rope_type="linear"), sliding_window=1024),
    torch_dtype="bfloat16",
    transformers_version="4.50.0.dev0",
    vision_config=dict(hidden_size=1152, model_type="siglip_vision_model"),
)


def published_llava(kind="llama", **outside):
    """config.json of a LLaVA 1.5 as published: sizes that are transformers' defaults are left out."""
    vision = dict(model_type="clip_vision_model", hidden_size=1024, num_attention_heads=16)
    text = dict(model_type=kind, max_position_embeddings=4096, rms_norm_eps=1e-5, torch_dtype="float16")
    keys = dict(image_token_index=32000, ignore_index=-100, projector_hidden_act="gelu", torch_dtype="float16")
    keys |= dict(model_type="llava", architectures=["LlavaForConditionalGeneration"], vision_feature_layer=-2)
    return keys | dict(text_config=text, vision_config=vision) | outside


LAYERS = ("layers.0.mlp.up_proj.weight", "norm.weight")


def test_the_published_config_of_gemma_3_is_the_text_model_that_transformers_builds():
    import transformers

    ours, theirs = parse_hf_config(GEMMA3), transformers.AutoConfig.for_model(**GEMMA3).get_text_config()
    assert (ours.family, ours.dtype, ours.tied_embeddings) == ("gemma3_text", "bfloat16", theirs.tie_word_embeddings)
    assert (ours.num_heads, ours.num_kv_heads, ours.head_dim) == (8, 4, 256)
    for ours_key, key in dict(num_heads="num_attention_heads", num_kv_heads="num_key_value_heads").items():
        assert getattr(ours, ours_key) == getattr(theirs, key)
    for key in ("head_dim", "vocab_size", "hidden_size", "intermediate_size"):
        assert getattr(ours, key) == getattr(theirs, key)
    assert ours.rope_type == theirs.rope_parameters["full_attention"]["rope_type"] == "linear"
    assert ours.windows[:6] == (1024,) * 5 + (None,) and ours.raw["eos_token_id"] == [1, 106]


@pytest.mark.parametrize("naming", NAMINGS[:3])
def test_the_names_of_the_files_decide_and_what_is_outside_of_the_text_model_stays_as_loaded(naming):
    names = [naming.decoder + name for name in LAYERS]
    hf_config = parse_hf_config(GEMMA3, ["vision_tower.x", *names])
    assert hf_config.file_names == naming and {*names} < tensor_names(hf_config)
    assert table_of(hf_config)[EMBEDDING].names == (f"{naming.decoder}embed_tokens.weight",)
    assert table_of(hf_config)[HEAD].names == (f"{naming.head}lm_head.weight",)
    assert hf_config.modules(3)["mlp.linear_fc2"] == ("model.language_model.layers.3.mlp.down_proj",)
    is_untrained = untrained(hf_config)
    for name in (
        "vision_tower.vision_model.head.probe",
        "model.vision_tower.x",
        "multi_modal_projector.mm_soft.weight",
    ):
        assert is_untrained(name)
    assert not is_untrained("model.layers.0.mlp.up_proj.weight") and not is_untrained("vision_tower_2.x")
    for name in (*names, f"{naming.head}lm_head.weight", "mtp.norm.weight"):
        assert naming.of(naming.alone(name)) == name


def test_names_are_read_from_an_index_headers_or_a_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GEMMA3))
    assert load_hf_config(tmp_path).file_names == NAMINGS[0]  # as published
    (tmp_path / HEADERS_FILE).write_text(
        json.dumps({"a.safetensors": json.dumps({"model.language_model.norm.weight": 0})})
    )
    assert load_hf_config(tmp_path).file_names == NAMINGS[1]
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"language_model.model.norm.weight": "a"}}))
    assert load_hf_config(tmp_path).file_names == NAMINGS[0]
    (tmp_path / INDEX).write_text("not json")
    assert stored_names(tmp_path) == [] and stored_names(Path("/nowhere")) == []


def test_keys_of_the_whole_model_are_checked():
    for change, said in [
        (dict(new_key=3), "config.json (gemma3) has new_key=3, a key that the trainer does not know"),
        (
            dict(architectures=["OtherModel"]),
            "architectures=['OtherModel'] with model_type=gemma3, whose class is Gemma3F",
        ),
        (dict(text_config=GEMMA3["text_config"] | dict(new=1)), "text_config of config.json (gemma3_text) has new=1"),
        (
            dict(text_config=GEMMA3["text_config"] | dict(quantization_config=dict(quant_method="new"))),
            "text_config of config.json has quantization_config with quant_method='new'",
        ),
        (dict(text_config=dict(model_type="gemma3_text")), "text_config of config.json lacks num_hidden_layers"),
        (
            dict(tie_word_embeddings=False, text_config=GEMMA3["text_config"] | dict(tie_word_embeddings=True)),
            "config.json has tie_word_embeddings=False, but text_config has True, and vLLM and transformers read",
        ),
    ]:
        assert said in architecture_problems(GEMMA3 | change)[0]


@pytest.mark.parametrize("name", ["Qwen2.5 Omni 7B", "Qwen3 Omni 30B A3B"])
def test_the_text_model_of_a_model_that_speaks_is_inside_its_thinker(name):
    import transformers

    raw = MORE[name]
    thinker = raw["thinker_config"]
    ours, theirs = parse_hf_config(raw), transformers.AutoConfig.for_model(**raw).get_text_config()
    assert (ours.num_layers, ours.hidden_size) == (theirs.num_hidden_layers, theirs.hidden_size)
    assert (ours.num_kv_heads, ours.rope_theta) == (theirs.num_key_value_heads, theirs.rope_parameters["rope_theta"])
    assert table_of(ours)[HEAD].names == ("thinker.lm_head.weight",)
    assert ours.modules(3)["self_attention.linear_proj"] == ("thinker.model.layers.3.self_attn.o_proj",)
    is_untrained = untrained(ours)
    assert all(map(is_untrained, ("talker.model.norm.weight", "thinker.visual.x", "thinker.audio_tower.x")))
    assert not is_untrained("thinker.model.x") and not is_untrained("speaker.x")
    for change, said in [
        (dict(new_key=3), "has new_key=3, a key that the trainer does not know"),
        (dict(thinker_config=thinker | dict(new_key=3)), "has new_key=3, a key that the trainer does not know"),
        (
            dict(thinker_config=thinker | dict(text_config=thinker["text_config"] | dict(new=1))),
            "text_config of config.json (qwen",
        ),
        (
            dict(thinker_config=thinker | dict(text_config=thinker["text_config"] | dict(tie_word_embeddings=True))),
            "has tie_word_embeddings=False, but its text_config True; set both",
        ),
        (dict(architectures=["Other"]), "architectures=['Other'] with model_type="),
    ]:
        assert said in architecture_problems(raw | change)[0], change


def test_a_llava_is_tied_if_its_text_config_is_whatever_stands_outside():
    raw = published_llava(tie_word_embeddings=False)
    assert parse_hf_config(raw | dict(text_config=raw["text_config"] | dict(tie_word_embeddings=True))).tied_embeddings
    assert not parse_hf_config(raw).tied_embeddings
    said = architecture_problems(
        raw | dict(tie_word_embeddings=True, text_config=raw["text_config"] | dict(tie_word_embeddings=False))
    )
    assert "config.json has tie_word_embeddings=True, but text_config has False" in said[0]
    (said,) = architecture_problems(raw | dict(tie_word_embeddings=True))  # vLLM reads text_config alone
    assert "config.json has tie_word_embeddings=True, but text_config has False" in said


def test_sizes_that_a_llava_leaves_out_are_those_of_the_text_models_class():
    import transformers

    for kind in ("llama", "mistral", "qwen2"):
        raw = published_llava(kind)
        ours, theirs = parse_hf_config(raw), transformers.AutoConfig.for_model(**raw).get_text_config()
        assert (ours.family, ours.num_layers, ours.hidden_size) == (kind, 32, theirs.hidden_size)
        assert (ours.num_heads, ours.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
        assert (ours.intermediate_size, ours.vocab_size) == (theirs.intermediate_size, theirs.vocab_size)


def test_keys_without_a_common_default_are_required_in_the_text_model_or_its_rotation():
    raw = MORE["GLM 4.1V 9B Thinking"]
    assert architecture_problems(raw) == []
    without = {key: value for key, value in raw.items() if key not in ("attention_bias", "partial_rotary_factor")}
    assert architecture_problems(without) == [
        "config.json lacks partial_rotary_factor",
        "config.json lacks attention_bias",
    ]
    rotary = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5, mrope_section=[8, 12, 12])
    inside = dict(model_type="glm4v", text_config=without | dict(model_type="glm4v_text", rope_parameters=rotary))
    assert architecture_problems(inside)[0] == "text_config of config.json lacks attention_bias"


def test_the_whole_models_dtype_replaces_the_text_models():
    text = GEMMA3["text_config"] | dict(dtype="float32")
    assert parse_hf_config(GEMMA3 | dict(text_config=text)).dtype == "bfloat16"
    only_inside = {key: value for key, value in GEMMA3.items() if key != "torch_dtype"} | dict(text_config=text)
    assert parse_hf_config(only_inside).dtype == "float32"


def test_a_config_without_text_config_is_its_own_text_model():
    wrapper = Wrapper("flat_vl", "FlatVL", prefix="model.")
    raw = dict(model_type="flat_vl", hidden_size=8, vision_config={}, image_token_id=3, architectures=["FlatVL"])
    assert wrapper.text_of(raw) == dict(hidden_size=8)
    assert wrapper.naming(["visual.x", "model.layers.0.x"]) == Naming()
    assert text_config(raw) is raw  # no family lists it
