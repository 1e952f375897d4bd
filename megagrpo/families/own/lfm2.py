"""_TABLE, dense and with experts."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.families.parts.llama_table import DENSE, HAS_HEAD_NORMS, LAYER, experts
from megagrpo.families.parts.routed import NORMALIZED
from megagrpo.families.shared.architecture import HfConfig
from megagrpo.families.shared.blocks import gated, part_rows, qkv, same
from megagrpo.families.shared.family import (
    EXPERT_KEYS,
    FULL,
    LINEAR,
    REQUIRED,
    Family,
    Raw,
    Table,
    expert_problems,
    mixture,
    rope,
)
from megagrpo.families.shared.recurrence import ShortConv
from megagrpo.families.shared.wrapper import Wrapper

# _TABLE: short convolutions in place of attention in most blocks, norms per head, and an MLP whose width config.json
# may tell as that of an MLP without a gate.
CONV = "conv"  # of layer_types
_ATTENTION, _CONV, _MLP = LAYER + "self_attn.", LAYER + "conv.", LAYER + "feed_forward."
_OPERATOR, _FFN = same(LAYER + "operator_norm.weight"), same(LAYER + "ffn_norm.weight")
_TABLE: Table = DENSE | {
    "decoder.final_norm.weight": same("model.embedding_norm.weight"),
    "input_layernorm.weight": _OPERATOR,
    "self_attention.linear_qkv.layer_norm_weight": _OPERATOR,
    "self_attention.linear_qkv.weight": qkv(_ATTENTION + "{p}_proj.weight"),
    "self_attention.linear_proj.weight": same(_ATTENTION + "out_proj.weight"),
    "self_attention.q_layernorm.weight": same(_ATTENTION + "q_layernorm.weight"),
    "self_attention.k_layernorm.weight": same(_ATTENTION + "k_layernorm.weight"),
    "norm.weight": _OPERATOR,
    "mixer.in_proj.layer_norm_weight": _OPERATOR,
    "mixer.in_proj.weight": part_rows(dict.fromkeys("BCx", _CONV + "in_proj.weight")),
    "mixer.conv1d_weight": same(_CONV + "conv.weight"),
    "mixer.out_proj.weight": same(_CONV + "out_proj.weight"),
    "pre_mlp_layernorm.weight": _FFN,
    "mlp.linear_fc1.layer_norm_weight": _FFN,
    "mlp.linear_fc1.weight": gated(_MLP + "w1.weight", _MLP + "w3.weight"),
    "mlp.linear_fc2.weight": same(_MLP + "w2.weight"),
}
_KEYS = (
    *("block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of", "block_ff_dim", "norm_eps"),
    *("conv_L_cache", "conv_dim", "block_dim", "full_attn_idxs", "layer_types"),
)
_UNREAD = "block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu block_use_xavier_init"
_UNREAD += " conv_dim_out conv_use_xavier_init num_heads theta use_pos_enc"


def _width(raw: Raw) -> int:
    """Return the width of the MLP."""
    width, multiplier = raw.get("block_ff_dim") or raw["intermediate_size"], raw.get("block_ffn_dim_multiplier", 1.0)
    if not raw.get("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    if multiplier is None:
        return width
    multiple = raw.get("block_multiple_of", 256)
    return multiple * -(-int(multiplier * width) // multiple)


def convolved(raw: Raw, common: HfConfig) -> HfConfig:
    """Return the architecture of blocks with short convolutions, without the width of their MLPs."""
    attention = raw.get("full_attn_idxs") or []
    types = raw.get("layer_types") or [FULL if block in attention else CONV for block in range(common.num_layers)]
    blocks = frozenset(block for block in range(common.num_layers) if types[block] != FULL)
    return replace(
        common,
        norm_eps=raw["norm_eps"],
        rope_theta=rope({"rope_theta": 1e6} | raw)["rope_theta"],
        tied_embeddings=True,
        qk_norm=True,
        recurrence=ShortConv(common.hidden_size, raw["conv_L_cache"], blocks),
    )


def _problems(raw: Raw) -> list[str]:
    problems = [
        f"{key} is {raw.get(key)!r} in config.json; vLLM reads it, and it must be hidden_size"
        for key in ("conv_dim", "block_dim")
        if raw.get(key) != raw.get("hidden_size")
    ]
    if not raw.get("block_ff_dim") and not raw.get("intermediate_size"):
        problems.append("config.json lacks intermediate_size or block_ff_dim")
    if not raw.get("layer_types") and not raw.get("full_attn_idxs"):
        problems.append("config.json lacks layer_types or full_attn_idxs")
    return problems


_TIED = (True, "vLLM always ties the LM head to the embedding")
LFM2_FIXED = HAS_HEAD_NORMS | {
    "conv_bias": (False, "biases of convolutions and their projections are not supported"),
    "tie_embedding": _TIED,
    "tie_word_embeddings": _TIED,
}
_LFM2_VL = Wrapper(
    "lfm2_vl",
    "Lfm2VlForConditionalGeneration",
    prefix="model.language_model.",
    ignored=(
        *("downsample_factor", "projector_hidden_size", "projector_bias", "projector_use_layernorm", "tile_size"),
        *("do_image_splitting", "encoder_patch_size", "max_image_tokens", "min_image_tokens", "max_num_patches"),
        *("max_pixels_tolerance", "max_tiles", "min_tiles", "use_image_special_tokens", "use_thumbnail"),
    ),
)
LFM2 = Family(
    "lfm2",
    "Lfm2ForCausalLM",
    table=lambda hf: _TABLE,
    read=lambda raw, common: replace(convolved(raw, common), intermediate_size=_width(raw)),
    problems=_problems,
    required=("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "norm_eps", "conv_L_cache"),
    keys=_KEYS,
    ignored=(*_UNREAD.split(), "rms_norm_eps"),  # this family's is norm_eps
    fixed=LFM2_FIXED,
    layer_types=(FULL, CONV, LINEAR),
    wrappers=(_LFM2_VL,),
    names={"block_ff_dim": "intermediate_size", "conv_dim": "hidden_size", "block_dim": "hidden_size"},
)

# _TABLE with experts in all but the first blocks, chosen by the sigmoid of the router's logits plus a bias that is not
# trained.
_MOE_TABLE = _TABLE | experts("feed_forward", "w1", "w3", "w2")
_BIAS = {"mlp.router.expert_bias": same(LAYER + "feed_forward.expert_bias")}
_NUM_DENSE = "num_dense_layers"


def _moe_read(raw: Raw, common: HfConfig) -> HfConfig:
    blocks, size = frozenset(range(raw[_NUM_DENSE], common.num_layers)), raw["moe_intermediate_size"]
    scale, bias = raw.get("routed_scaling_factor", 1.0), raw.get("use_expert_bias", True)
    chosen = mixture(raw, intermediate_size=size, blocks=blocks, sigmoid=True, bias=bias, scale=scale)
    return replace(convolved(raw, common), experts=chosen, mixture_module="feed_forward.")


def _moe_problems(raw: Raw) -> list[str]:
    problems = expert_problems(raw, ("moe_intermediate_size",))
    if not isinstance(raw.get(_NUM_DENSE), int) or not 0 <= raw[_NUM_DENSE] < raw.get("num_hidden_layers", 0):
        problems.append(
            f"{_NUM_DENSE} is {raw.get(_NUM_DENSE)!r} in config.json; it must be less than num_hidden_layers"
        )
    return problems


LFM2_MOE = Family(
    "lfm2_moe",
    "Lfm2MoeForCausalLM",
    table=lambda hf: _MOE_TABLE | (_BIAS if hf.mixture.bias else {}),
    read=_moe_read,
    problems=_moe_problems,
    required=(*REQUIRED, "norm_eps", "conv_L_cache", "layer_types"),
    keys=(
        *("norm_eps", "conv_L_cache", "layer_types", "use_expert_bias", "routed_scaling_factor"),
        *(*EXPERT_KEYS, "moe_intermediate_size", _NUM_DENSE),
    ),
    ignored=("rms_norm_eps", "theta"),
    fixed=NORMALIZED | LFM2_FIXED,
    layer_types=(FULL, CONV, LINEAR),
    names={_NUM_DENSE: "first_k_dense_replace"},
)
