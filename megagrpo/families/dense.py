"""Families without experts and recurrent blocks: a Llama with other options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megagrpo.families.parts.llama_table import DENSE, GATE_UP, HAS_HEAD_NORMS, LAYER, QK_NORM, QKV_BIAS, UNGATED
from megagrpo.families.parts.qwen import UPPER_WINDOWS, upper_windows
from megagrpo.families.parts.qwen_omni import QWEN2_5_OMNI
from megagrpo.families.parts.qwen_vl import QWEN2_VL, QWEN3_VL
from megagrpo.families.shared.architecture import HfConfig, QueryScale
from megagrpo.families.shared.blocks import same
from megagrpo.families.shared.family import REQUIRED, Family, Raw, Table, rope, rotates, windows
from megagrpo.families.shared.wrapper import TEXT_CONFIG, Naming, Wrapper

# Keys of transformers' classes that published files leave out of `text_config`.
LLAMA_SIZES: Raw = dict(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32)
LLAMA_SIZES |= dict(vocab_size=32000, tie_word_embeddings=False)
MISTRAL_SIZES: Raw = LLAMA_SIZES | dict(intermediate_size=14336, num_key_value_heads=8)
QWEN_SIZES: Raw = LLAMA_SIZES | dict(intermediate_size=22016, num_key_value_heads=32, vocab_size=151936)

_TILES = ("image_grid_pinpoints", "vision_aspect_ratio", "use_image_newline_parameter")
_LLAVA: dict[str, Any] = dict(
    ignored=(*_TILES, "image_seq_length", "ignore_index"), untrained=(r"(model\.)?image_newline",), text_ties=True
)
# Of the connector. Files hold them in `text_config` too.
_CONNECTOR = ("scale_factor", "perceiver_config", "pixel_shuffle_factor", "qk_layer_norms", "use_resampler")
_TEXT_MODEL = Naming("model.text_model.")
_IDEFICS: dict[str, Any] = dict(
    prefix=_TEXT_MODEL.decoder, modules=_TEXT_MODEL, ignored=_CONNECTOR, untrained=(r"model\.connector\..+",)
)
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": ("LlavaForConditionalGeneration", _LLAVA),
    "llava_next": ("LlavaNextForConditionalGeneration", _LLAVA),
    "llava_onevision": ("LlavaOnevisionForConditionalGeneration", _LLAVA),
    "internvl": ("InternVLForConditionalGeneration", dict(ignored=("downsample_ratio", "image_seq_length"))),
    "idefics3": ("Idefics3ForConditionalGeneration", _IDEFICS),
    "smolvlm": ("SmolVLMForConditionalGeneration", _IDEFICS),
}


def around(sizes: Raw, *kinds: str) -> tuple[Wrapper, ...]:
    """Return the multimodal models `kinds` around the text model of a family, whose class in transformers has `sizes`
    by default."""
    return tuple(Wrapper(kind, _KINDS[kind][0], defaults=sizes, **_KINDS[kind][1]) for kind in kinds)


# Llama 2, 3 and derived models, for example SmolLM2: the base of the other families.
LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    table=lambda hf: DENSE,
    wrappers=around(LLAMA_SIZES, "llava", "llava_next", "internvl", "smolvlm", "idefics3"),
)

# Mistral: a Llama whose attention may have a window, of 4096 tokens if config.json does not set one.
MISTRAL3 = Wrapper("mistral3", "Mistral3ForConditionalGeneration")  # around Mistral Small 3.1 and 3.2, and Ministral 3
MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    table=lambda hf: DENSE,
    read=lambda raw, common: replace(common, windows=windows(raw, raw.get("sliding_window", 4096))),
    keys=("sliding_window",),
    wrappers=(MISTRAL3, *around(MISTRAL_SIZES, "llava", "llava_next")),
)

# Ministral 3: a Mistral with yarn, whose queries grow with the position as Llama 4's do.
_STRENGTH, _LENGTH = "llama_4_scaling_beta", "original_max_position_embeddings"


def _ministral3_read(raw: Raw, common: HfConfig) -> HfConfig:
    rotary = rope(raw)
    scale = QueryScale(rotary[_STRENGTH], rotary[_LENGTH], frozenset(range(common.num_layers)))
    return replace(common, windows=windows(raw, raw.get("sliding_window")), query_scale=scale)


def _ministral3_problems(raw: Raw) -> list[str]:
    rotary = rope(raw)
    return [
        f"{key} is {rotary.get(key)!r} in rope_parameters of config.json; it must be a number above 0"
        for key in (_STRENGTH, _LENGTH)
        if not isinstance(rotary.get(key), (int, float)) or rotary[key] <= 0
    ]


def _ministral3_served_flags(hf: HfConfig) -> dict[str, Raw | str]:
    """Return vLLM's own key of the scale: it does not read the one in `rope_parameters`."""
    scale = hf.query_scale
    assert scale is not None, "Ministral 3 scales queries"
    key = {"llama_4_scaling": {"beta": scale.strength, "original_max_position_embeddings": scale.length}}
    return {"--hf-overrides": key if hf.wrapper is None else {TEXT_CONFIG: key}}


MINISTRAL3 = Family(
    "ministral3",
    "Ministral3ForCausalLM",
    table=lambda hf: DENSE,
    read=_ministral3_read,
    problems=_ministral3_problems,
    required=(*REQUIRED, "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters"),
    keys=("sliding_window",),
    rope_types=("yarn",),
    rope_keys=(_STRENGTH, "max_position_embeddings"),  # transformers ignores the second
    served_flags=_ministral3_served_flags,
    wrappers=(MISTRAL3,),
)


# Qwen2 and Qwen2.5: biases on queries, keys and values. A window applies only with `use_sliding_window`, and only
# from some block on.
QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    table=lambda hf: DENSE | QKV_BIAS,
    read=lambda raw, common: replace(common, qkv_bias=True, windows=upper_windows(raw)),
    keys=UPPER_WINDOWS,
    ignored=("attention_bias",),  # the biases do not depend on it
    fixed={"qkv_bias": (True, "queries, keys and values of this family have biases")},
    wrappers=(*QWEN2_VL, QWEN2_5_OMNI, *around(QWEN_SIZES, "llava", "llava_next", "llava_onevision", "internvl")),
)

# Qwen3: queries and keys are normalised per head.
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    table=lambda hf: DENSE | QK_NORM,
    read=lambda raw, common: replace(common, qk_norm=True, windows=upper_windows(raw)),
    keys=UPPER_WINDOWS,
    fixed=HAS_HEAD_NORMS,
    wrappers=(QWEN3_VL, *around(QWEN_SIZES | dict(head_dim=128), "internvl")),
)

# Arcee's AFM: a Llama whose MLP has no gate and squares the ReLU.
ARCEE = Family(
    "arcee",
    "ArceeForCausalLM",
    table=lambda hf: DENSE | UNGATED,
    read=lambda raw, common: replace(common, activation="relu2"),
    required=(*REQUIRED, "rms_norm_eps"),
    fixed={"hidden_act": ("relu2", "only relu2 is supported for this family")},
)

# Seed-OSS: a Llama with biases on queries, keys and values.
SEED_OSS = Family(
    "seed_oss",
    "SeedOssForCausalLM",
    table=lambda hf: DENSE | (QKV_BIAS if hf.qkv_bias else {}),
    read=lambda raw, common: replace(common, qkv_bias=raw.get("attention_bias", True)),
    required=(*REQUIRED, "head_dim"),  # transformers has a default for it in this family
    keys=("attention_bias",),  # of queries, keys and values; `attention_out_bias` is refused
    # Releases have 0.1, the value of their pretraining. Neither vLLM nor the trainer drops activations.
    ignored=("attention_dropout", "residual_dropout"),
)

# Code World Model: a Llama with windows, in three of four blocks if config.json names none.
CWM = Family(
    "cwm",
    "CwmForCausalLM",
    table=lambda hf: DENSE,
    read=lambda raw, common: replace(common, windows=windows(raw, raw["sliding_window"], lambda block: block % 4 != 0)),
    problems=lambda raw: [] if raw.get("sliding_window") else ["config.json lacks sliding_window"],
    required=(*REQUIRED, "num_key_value_heads", "head_dim", "rms_norm_eps", "sliding_window"),
    keys=("sliding_window", "layer_types"),
    ignored=("pretraining_tp",),
    rope_types=("llama3",),  # the rotation of a file without one is llama3 too, with transformers' own factors
)


# SmolLM3: a Llama with blocks that do not rotate queries and keys, every fourth one if config.json names none.
def _smollm3_read(raw: Raw, common: HfConfig) -> HfConfig:
    unrotated = frozenset(block for block in range(common.num_layers) if not rotates(raw)[block])
    tied, theta = raw.get("tie_word_embeddings", True), rope({"rope_theta": 2e6} | raw)["rope_theta"]
    return replace(common, unrotated=unrotated, tied_embeddings=tied, rope_theta=theta)


def _smollm3_problems(raw: Raw) -> list[str]:
    every, layers = raw.get("no_rope_layer_interval", 4), raw.get("num_hidden_layers")
    if type(every) is not int or every < 1:
        return [f"no_rope_layer_interval is {every!r} in config.json; it must be a positive whole number"]
    if isinstance(layers, int) and len(given := rotates(raw)) < layers:
        return [f"no_rope_layers has {len(given)} entries for num_hidden_layers={layers}"]
    return []


SMOLLM3 = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    table=lambda hf: DENSE,
    read=_smollm3_read,
    problems=_smollm3_problems,
    keys=("no_rope_layers", "no_rope_layer_interval"),
    ignored=("sliding_window", "max_window_layers"),  # without `use_sliding_window`, which is refused
)

# GLM-4-0414, alone and inside GLM-4.1V: gate and up projection in one weight, biases on queries, keys and values,
# partial rotation of neighbouring dimensions, and norms on the outputs of attention and MLP.
_GLM4_TABLE: Table = DENSE | GATE_UP
_GLM4_TABLE |= {
    "self_attention.post_norm.weight": same(LAYER + "post_self_attn_layernorm.weight"),
    "mlp.post_norm.weight": same(LAYER + "post_mlp_layernorm.weight"),
}

GLM4 = Family(
    "glm4",
    "Glm4ForCausalLM",
    table=lambda hf: _GLM4_TABLE | (QKV_BIAS if hf.qkv_bias else {}),
    read=lambda raw, common: replace(
        common, qkv_bias=raw.get("attention_bias", True), rotary_interleaved=True, post_norms=True
    ),
    required=(*REQUIRED, "num_key_value_heads", "head_dim", "rms_norm_eps"),
    keys=("attention_bias",),  # of queries, keys and values; the output projection never has one
    fixed={"rope_interleaved": (True, "this family rotates neighbouring dimensions")},
    rope_types=("default", "yarn"),
    partial_rotary_factor=0.5,
    wrappers=(
        Wrapper(
            "glm4v",
            "Glm4vForConditionalGeneration",
            prefix="model.language_model.",
            texts=("glm4v_text",),
            defaults=dict(head_dim=128),
            required=("partial_rotary_factor", "attention_bias"),
        ),
    ),
)

# GLM-4-9B of 2024 and GLM-Edge: GLM-4-0414 without norms on the outputs of attention and MLP.
GLM = replace(
    GLM4,
    model_type="glm",
    architecture="GlmForCausalLM",
    table=lambda hf: DENSE | GATE_UP | (QKV_BIAS if hf.qkv_bias else {}),
    read=lambda raw, common: replace(GLM4.read(raw, common), post_norms=False),
    wrappers=(),
)
