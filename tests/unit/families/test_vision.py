"""The axes that rotate each pair of dimensions, and what config.json of a model with images says."""

import pytest

from megagrpo.families.hf_config import parse_hf_config
from megagrpo.families.shared.vision import qwen_vision
from tests.unit.families.published_configs import MORE

# the published config.json of Qwen2.5-VL-3B-Instruct, shortened in its vision_config
FLAT = (
    dict(architectures=["Qwen2_5_VLForConditionalGeneration"], attention_dropout=0.0, bos_token_id=151643)
    | dict(eos_token_id=151645, vision_start_token_id=151652, vision_end_token_id=151653, vision_token_id=151654)
    | dict(image_token_id=151655, video_token_id=151656, hidden_act="silu", hidden_size=2048)
    | dict(initializer_range=0.02, intermediate_size=11008, max_position_embeddings=128000, max_window_layers=70)
    | dict(model_type="qwen2_5_vl", num_attention_heads=16, num_hidden_layers=36, num_key_value_heads=2)
    | dict(rms_norm_eps=1e-06, rope_theta=1000000.0, sliding_window=32768, tie_word_embeddings=True)
    | dict(torch_dtype="bfloat16", transformers_version="4.41.2", use_cache=True, use_sliding_window=False)
    | dict(vision_config=dict(depth=32, spatial_merge_size=2, tokens_per_second=2, temporal_patch_size=2))
    | dict(rope_scaling=dict(type="mrope", mrope_section=[16, 24, 24]), vocab_size=151936)
)


def test_the_published_config_has_a_tower_and_the_rotation_of_a_qwen2():
    config = parse_hf_config(FLAT)
    assert (config.family, config.rope_type, config.qkv_bias, config.vision.image_token) == (
        "qwen2",
        "default",
        True,
        151655,
    )
    assert config.vision.axes == (0,) * 16 + (1,) * 24 + (2,) * 24 and config.vision.merge == 2
    assert not config.rotates_alike  # no fused kernel has three axes


def test_axes_are_those_of_transformers():
    import torch
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

    for kind, interleaved in ((Qwen2_5_VLRotaryEmbedding, False), (Qwen3VLTextRotaryEmbedding, True)):
        theirs = kind.__new__(kind)
        torch.nn.Module.__init__(theirs)
        theirs.mrope_section = [24, 20, 20]
        frequencies = torch.arange(3.0)[:, None, None, None].expand(3, 1, 1, 64).clone()
        expected = theirs.recomposition_frequencies(frequencies)[0, 0, :64].int().tolist()
        text = dict(rope_parameters=dict(mrope_section=[24, 20, 20]))
        assert list(qwen_vision("Qwen3VLVisionModel", interleaved)(dict(text_config=text)).axes) == expected


@pytest.mark.parametrize("scaling", [None, dict(type="default")])
def test_a_model_without_sections_is_one_of_text(scaling):
    assert parse_hf_config(FLAT | dict(rope_scaling=scaling)).vision is None


def test_an_order_of_axes_that_only_vllm_would_compute_is_refused():
    rotary = FLAT["rope_scaling"] | dict(mrope_interleaved=True)
    with pytest.raises(ValueError, match=r"has mrope_interleaved=True .*; set mrope_interleaved to false there"):
        parse_hf_config(FLAT | dict(rope_scaling=rotary))
    whole = MORE["Qwen3-VL 8B"]
    text = whole["text_config"] | dict(rope_scaling=FLAT["rope_scaling"])
    with pytest.raises(ValueError, match=r"mrope_interleaved=None .*; set mrope_interleaved to true there"):
        parse_hf_config(whole | dict(text_config=text))


@pytest.mark.parametrize(
    ("change", "said"),
    [(dict(norm_topk_prob=False), "always normalises"), (dict(moe_intermediate_size=1024), "of this shape")],
)
def test_experts_that_transformers_and_vllm_compute_differently_are_refused(change, said):
    raw = MORE["Qwen3-VL 30B A3B"]
    with pytest.raises(ValueError, match=said):
        parse_hf_config(raw | dict(text_config=raw["text_config"] | change))


def test_levels_are_those_of_the_tower():
    text = dict(rope_parameters=dict(mrope_section=[24, 20, 20]))
    read = qwen_vision("Qwen3VLVisionModel", interleaved=True, deepstack=True)
    assert read(dict(text_config=text, vision_config=dict(deepstack_visual_indexes=[5, 11]))).levels == 2
    assert read(dict(text_config=text)).levels == 3  # as transformers' class
    assert qwen_vision("Qwen3VLVisionModel", interleaved=True)(dict(text_config=text)).levels == 0


def test_a_text_model_with_axes_is_refused():
    text = {key: value for key, value in FLAT.items() if "token" not in key and key != "vision_config"}
    with pytest.raises(ValueError, match="mrope"):
        parse_hf_config(text | dict(model_type="qwen2", architectures=["Qwen2ForCausalLM"]))
