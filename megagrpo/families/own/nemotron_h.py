"""Nemotron-H, Nemotron Nano 2 and Nemotron 3 Nano: blocks of one part each, Mamba-2, attention without rotation, an MLP
or experts, none of which has gates. Layers for predicting several tokens are not trained."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.families.parts.llama_table import EMBEDDING, HEAD, LAYER
from megagrpo.families.parts.mamba import mamba2, mamba_problems, mamba_rows
from megagrpo.families.parts.routed import NORMALIZED
from megagrpo.families.shared.architecture import Experts, HfConfig
from megagrpo.families.shared.blocks import qkv, same, vocab
from megagrpo.families.shared.family import REQUIRED, Family, Raw, Table, expert_problems
from megagrpo.families.shared.wrapper import Naming

_NORM, _MIXER = LAYER + "norm.weight", LAYER + "mixer."
_EXPERTS, _SHARED = _MIXER + "experts.{E}.", _MIXER + "shared_experts."
_LINEARS = (("fc1", "up"), ("fc2", "down"))
_TABLE: Table = {
    EMBEDDING: vocab("model.embeddings.weight"),
    HEAD: vocab("lm_head.weight"),
    "decoder.final_norm.weight": same("model.norm_f.weight"),
    **{f"{name}.weight": same(_NORM) for name in ("input_layernorm", "pre_mlp_layernorm")},
    **{f"{name}.layer_norm_weight": same(_NORM) for name in ("self_attention.linear_qkv", "mlp.linear_fc1")},
    "self_attention.linear_qkv.weight": qkv(_MIXER + "{p}_proj.weight"),
    "self_attention.linear_proj.weight": same(_MIXER + "o_proj.weight"),
}
_MLP: Table = {f"mlp.linear_{fc}.weight": same(f"{_MIXER}{name}_proj.weight") for fc, name in _LINEARS}
_OF_EXPERTS: Table = {
    "mlp.router.weight": same(_MIXER + "gate.weight"),
    "mlp.router.expert_bias": same(_MIXER + "gate.e_score_correction_bias"),
    **{f"mlp.experts.linear_{fc}.weight": same(f"{_EXPERTS}{name}_proj.weight") for fc, name in _LINEARS},
    **{f"mlp.shared_experts.linear_{fc}.weight": same(f"{_SHARED}{name}_proj.weight") for fc, name in _LINEARS},
}
_SIZES = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
_PATTERN, _TYPES = "hybrid_override_pattern", "layers_block_type"
_SYMBOLS = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E"}
_MOE = tuple("n_routed_experts num_experts_per_tok moe_intermediate_size moe_shared_expert_intermediate_size".split())
_OWN: Raw = dict(mixture_module="mixer.", activation="relu2", file_names=Naming("backbone."))
_ROUTING = ("norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group")


def _pattern(raw: Raw) -> str:
    """Return a symbol per block: M Mamba-2, * attention, - MLP, E experts; ? for an unknown kind."""
    if types := raw.get(_TYPES):
        return "".join(_SYMBOLS.get(kind, "?") for kind in types)
    return str(raw.get(_PATTERN) or "")


def _table(hf: HfConfig) -> Table:
    parts = (_MLP if hf.has_dense_mlps else {}) | (_OF_EXPERTS if hf.experts else {})
    return _TABLE | parts | mamba_rows(hf, "mixer.", "norm.weight")


def _read(raw: Raw, common: HfConfig) -> HfConfig:
    kinds = {symbol: frozenset(i for i, one in enumerate(_pattern(raw)) if one == symbol) for symbol in "M*-E"}
    experts = None
    if kinds["E"]:
        count, per_token, width, shared = (raw[key] for key in _MOE)
        groups = dict(groups=raw.get("n_group", 1), groups_per_token=raw.get("topk_group", 1))
        choice = dict(sigmoid=True, bias=True, scale=raw.get("routed_scaling_factor", 1.0)) | groups
        normalized = raw.get("norm_topk_prob", True)
        experts = Experts(count, per_token, width, normalized, kinds["E"], shared_size=shared, **choice)
    return replace(
        common,
        num_layers=len(_pattern(raw)),
        norm_eps=raw.get("layer_norm_epsilon", 1e-5),
        recurrence=mamba2(raw, _SIZES, kinds["M"], raw.get("use_conv_bias", True)) if kinds["M"] else None,
        mlp_blocks=kinds["-"] | kinds["E"],
        experts=experts,
        unrotated=frozenset(range(len(_pattern(raw)))),
        **_OWN,
    )


def _problems(raw: Raw) -> list[str]:
    pattern, layers = _pattern(raw), raw.get("num_hidden_layers")
    if not pattern or {*pattern} - {*"M*-E"}:
        return [f"{_PATTERN} or {_TYPES} of config.json must name M, *, - or E for each block, not {pattern or None!r}"]
    problems = mamba_problems(raw, _SIZES) if "M" in pattern else []
    if "E" in pattern:
        problems += expert_problems(raw | dict(num_experts=raw.get("n_routed_experts")), *((key,) for key in _MOE))
        expected, said = NORMALIZED["norm_topk_prob"]
        problems += [] if raw.get("norm_topk_prob", True) is expected else [f"norm_topk_prob: {said}"]
    if layers not in (None, len(pattern)):
        problems.append(f"num_hidden_layers={layers}, but {_PATTERN} or {_TYPES} has {len(pattern)} blocks")
    return problems


_NAMES = dict(layer_norm_epsilon="rms_norm_eps", mamba_num_heads="mamba_n_heads", mamba_head_dim="mamba_d_head")
_NAMES |= dict(n_groups="mamba_n_groups", ssm_state_size="mamba_d_state")
_NAMES |= dict(moe_shared_expert_intermediate_size="shared_expert_intermediate_size")
FAMILY = Family(
    "nemotron_h",
    "NemotronHForCausalLM",
    table=_table,
    read=_read,
    problems=_problems,
    required=(*REQUIRED[1:], "num_key_value_heads", "head_dim"),  # transformers writes no num_hidden_layers
    keys=(*_SIZES, *_MOE, *_ROUTING, _PATTERN, _TYPES, "layer_norm_epsilon", "use_conv_bias"),
    ignored=(  # sizes of kernels' chunks, initial values, precisions of vLLM's state, and layers that are dropped
        *"chunk_size expand mamba_proj_bias mamba_ssm_cache_dtype use_mamba_kernels residual_in_fp32".split(),
        *"time_step_floor time_step_max time_step_limit rescale_prenorm_residual num_logits_to_keep".split(),
        *"num_nextn_predict_layers mtp_layers_block_type mtp_hybrid_override_pattern moe_shared_expert_overlap".split(),
    ),
    fixed={
        "mlp_hidden_act": ("relu2", "only relu2 is supported"),
        "mamba_hidden_act": ("silu", "only silu is supported"),
        "use_bias": (False, "biases on the projections of Mamba-2 are not supported"),
        "sliding_window": (None, "windows are not supported"),
        "n_shared_experts": (1, "vLLM multiplies the width of the shared experts by it, transformers does not"),
        "moe_latent_size": (None, "experts on latents, as in Nemotron 3 Super, are not supported"),
        "time_step_min": (0.001, "transformers raises steps to it, vLLM and Megatron do not; releases have 0.001"),
    },
    untrained=lambda hf: (r"mtp\..+",),
    rope_types=("default",),
    names=_NAMES,
)
