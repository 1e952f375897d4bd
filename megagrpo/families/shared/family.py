"""Describes a model family: how to read config.json and map Megatron's parameters to its tensors. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megagrpo.families.shared.architecture import Experts, HfConfig
from megagrpo.families.shared.blocks import BlockRule
from megagrpo.families.shared.vision import ROTARY
from megagrpo.families.shared.wrapper import Wrapper

Raw = dict[str, Any]  # config.json as read
Table = dict[str, BlockRule]

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# values of config.json's layer_types
FULL, SLIDING, LINEAR, CHUNKED = "full_attention", "sliding_attention", "linear_attention", "chunked_attention"
REQUIRED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
# Keys of config.json that are read for every family: by `common_config`, `rope`, Megatron's configuration,
# `config_keys` and `precisions`.
COMMON = (
    *("model_type", "architectures", "auto_map", *REQUIRED, "num_key_value_heads", "head_dim", "tie_word_embeddings"),
    *("rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
    *("max_position_embeddings", "dtype", "torch_dtype", "initializer_range", "quantization_config"),
)
_DROPOUT = (0, "dropout is not supported; set it to 0")
_HEAD_NORMS = (False, "norms of queries and keys are not supported")
_SCALED = "a model-specific scale, as in Granite, MiniCPM or Cohere, is not supported"
# Key of config.json -> the one value that this project's model code implements, and the error for other values. The row
# does not apply to a family that reads or ignores the key.
FIXED: dict[str, tuple[Any, str]] = {
    "hidden_act": ("silu", "only silu is supported"),
    "mlp_bias": (False, "a bias in the MLP is not supported"),
    "attention_bias": (False, "a bias in the output projection of attention is not supported"),
    "attention_out_bias": (False, "a bias in the output projection of attention is not supported"),
    "qkv_bias": (False, "biases on queries, keys and values are not supported"),
    "lm_head_bias": (False, "a bias in the LM head is not supported"),
    "quantization": (None, "quantized weights cannot be trained; use the original weights"),
    "attention_dropout": _DROPOUT,
    "hidden_dropout": _DROPOUT,
    "attn_pdrop": _DROPOUT,
    "resid_pdrop": _DROPOUT,
    "embd_pdrop": _DROPOUT,
    "router_jitter_noise": (0, "noise in the router is not supported; set it to 0"),
    "shared_expert_intermediate_size": (0, "an MLP beside the experts is not supported"),
    "no_rope_layers": (None, "blocks without rotation, as in SmolLM3, are not supported"),
    "rope_interleaved": (False, "only the rotation of the two halves of a head is supported"),
    "use_mrope": (False, "rotation by several positions, as in vision-language models, is not supported"),
    "use_sliding_window": (False, "windows are not supported"),
    "is_causal": (True, "only causal attention is supported"),
    "use_bidirectional_attention": (False, "only causal attention is supported"),
    "is_encoder_decoder": (False, "only decoders are supported"),
    "add_cross_attention": (False, "only decoders are supported"),
    "pruned_heads": ({}, "pruned heads are not supported"),
    "use_qk_norm": _HEAD_NORMS,
    "qk_norm": _HEAD_NORMS,
    "qk_layernorm": _HEAD_NORMS,
    "residual_multiplier": (1, _SCALED),
    "attention_multiplier": (None, _SCALED),
    "embedding_multiplier": (1, _SCALED),
    "logits_scaling": (1, _SCALED),
    "logit_scale": (1, _SCALED),
    "scale_emb": (1, _SCALED),
}


@dataclass(frozen=True)
class Family:
    """The description of one family; each file of this folder assigns one to `FAMILY`. No other code knows the family.

    - `table` maps names of HybridModel's parameters, without "decoder.layers.N.", to rules.
    - `read` returns the architecture: `common_config` with the fields that differ in this family.
    - `problems` returns why the model cannot be trained.
    - `keys` are the keys that `read` and `problems` use besides `COMMON`.
    - `ignored` keys change nothing in this family.
    - `fixed` keys have one supported value, besides `FIXED`. Every other key is rejected (`config_keys`).
    - `untrained` returns regular expressions of tensors that files may hold and that stay as loaded.
    - `wrappers` are the multimodal models that have this family's text model inside.
    - `rope_types` are the supported kinds of rotary scaling.
    - `rope_keys` are this family's own rotary parameters, for any kind of scaling.
    - `layer_types` are the supported kinds of blocks in config.json's key of that name.
    - `local_rope` allows rotary parameters of blocks with a window beside those of all others.
    - `names` maps names of sizes in this family's config.json to the usual ones, for `shrink_model`.
    - `aliases` are the model_types of releases whose class is `architecture` too.
    - `classes` are other names in `architectures` of releases, which vLLM maps to the same class.
    - `gpu_only` is the reason why vLLM cannot serve the family on a CPU.
    - `served_flags` returns flags of vLLM, with words or JSON values, without which vLLM computes something else.
    - `merged_only` are projections whose adapters vLLM would apply otherwise: `lora.sync: adapter` is refused for them.
    - `unserved` is the reason why no vLLM serves the family: its models can be converted, not trained.
    - `partial_rotary_factor` is the default share of each head that is rotated, if config.json may set one; None: the
      whole head.
    """

    model_type: str
    architecture: str
    table: Callable[[HfConfig], Table]
    read: Callable[[Raw, HfConfig], HfConfig] = lambda raw, common: common
    problems: Callable[[Raw], list[str]] = lambda raw: []
    required: tuple[str, ...] = REQUIRED
    keys: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    fixed: dict[str, tuple[Any, str]] = field(default_factory=dict)
    untrained: Callable[[HfConfig], tuple[str, ...]] = lambda hf: ()
    wrappers: tuple[Wrapper, ...] = ()
    rope_types: tuple[str, ...] = ROPE_TYPES
    rope_keys: tuple[str, ...] = ()
    local_rope: bool = False
    names: dict[str, str] = field(default_factory=dict)
    served_flags: Callable[[HfConfig], dict[str, Raw | str]] = lambda hf: {}
    merged_only: tuple[str, ...] = ()
    unserved: str | None = None
    partial_rotary_factor: float | None = None
    aliases: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    gpu_only: str | None = None
    layer_types: tuple[str, ...] = (FULL, SLIDING)

    @property
    def fixed_values(self) -> dict[str, tuple[Any, str]]:
        """Key of config.json -> its one supported value and the error: `fixed`, and the rows of `FIXED` that apply."""
        return {key: rule for key, rule in FIXED.items() if key not in (*self.keys, *self.ignored)} | self.fixed


def common_config(family: Family, raw: Raw) -> HfConfig:
    """Return the architecture of a Llama from the keys that all families share."""
    rotary = rope(raw)
    return HfConfig(
        family=family.model_type,
        num_layers=raw.get("num_hidden_layers", 0),
        hidden_size=raw["hidden_size"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=kv_heads(raw),
        head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        intermediate_size=raw.get("intermediate_size", 0),
        vocab_size=raw["vocab_size"],
        tied_embeddings=raw.get("tie_word_embeddings", False),
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=rotary.get("rope_theta", 10000.0),
        rope_type=rotary["rope_type"],
        partial_rotary_factor=rotated_share(raw, family.partial_rotary_factor or 1.0),
        max_positions=raw.get("max_position_embeddings", 2048),
        dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
        raw=raw,
    )


def rope(raw: Raw) -> dict[str, Any]:
    """Return rotary parameters with `rope_type` and `rope_theta`: transformers 5's `rope_parameters` or older keys."""
    old = {"rope_theta": raw.get("rope_theta", 10000.0)} | (raw.get("rope_scaling") or {})
    new = raw.get("rope_parameters") or {}
    # with one set per kind of block: the one of blocks without a window
    new = (new.get(FULL) or {}) if FULL in new else new
    parameters = old | {key: value for key, value in new.items() if value is not None}
    return parameters | {"rope_type": parameters.get("rope_type") or parameters.get("type") or "default"}


def rotated_share(raw: Raw, default: float) -> float:
    """Return the share of each head that is rotated. config.json has it beside or inside the rotary parameters."""
    shares = (rope(raw).get("partial_rotary_factor"), raw.get("partial_rotary_factor"), default)
    return next(share for share in shares if share is not None)


_ROPE = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
# Kind of rotary scaling -> the parameters that transformers and vLLM read alike. `finetuned` is a comment in the first
# Yarn releases.
ROPE_KEYS = {
    "default": _ROPE,
    "linear": (*_ROPE, "factor", "original_max_position_embeddings"),
    "llama3": (*_ROPE, "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *_ROPE,
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate"),
        *("mscale", "mscale_all_dim", "finetuned"),
    ),
    # phi3 rejects four of these with its own messages.
    # HunYuan's: `alpha` scales the base, and transformers reads no other.
    "dynamic": (
        *_ROPE,
        *("alpha", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "original_max_position_embeddings"),
    ),
    "proportional": _ROPE,
    "longrope": (
        *_ROPE,
        *("short_factor", "long_factor", "original_max_position_embeddings"),
        *("factor", "attention_factor", "short_mscale", "long_mscale"),
    ),
}


def rope_problems(family: Family, raw: Raw, kinds: list[str]) -> list[str]:
    """Return what this family's code does not implement of rotations, whose `kinds` config.json names."""
    problems = []
    if unknown := [kind for kind in (rope(raw)["rope_type"], *kinds) if kind not in family.rope_types]:
        said = f"rope_type {unknown[0]!r} is not supported for {family.model_type}"
        problems.append(f"{said}; supported: {', '.join(family.rope_types)}")
    if family.partial_rotary_factor is None and rotated_share(raw, default=1.0) != 1.0:
        problems.append(f"partial_rotary_factor must be 1: {family.model_type} rotates all dimensions of a head")
    return problems


def unknown_rope_keys(family: Family, raw: Raw) -> dict[str, Any]:
    """Return unknown rotary parameters, of all blocks, or of each kind of attention if config.json separates them."""
    unknown: dict[str, Any] = {}
    for section in ROTARY:
        values = raw.get(section) or {}
        kinds = (FULL, SLIDING) if family.local_rope else ()
        parts = {f"{section}.{kind}": values[kind] for kind in kinds if kind in values}
        for name, parameters in (parts or {section: values}).items():
            kind = rope({"rope_parameters": parameters or {}} if parts else raw)["rope_type"]
            known = (*ROPE_KEYS.get(kind, parameters or ()), *family.rope_keys)  # an unknown kind has its own error
            given = parameters if isinstance(parameters, dict) else {}
            unknown |= {f"{name}.{key}": value for key, value in given.items() if key not in known}
    return unknown


def kv_heads(raw: Raw) -> int:
    """Return the number of key and value heads. A config.json without the key has as many as query heads."""
    return raw.get("num_key_value_heads") or raw["num_attention_heads"]


EXPERT_KEYS = ("num_experts", "num_local_experts", "num_experts_per_tok")  # read by `num_experts` and `expert_problems`


def num_experts(raw: Raw) -> int:
    """Return the number of experts of a mixture, from either of its two key names."""
    return raw.get("num_experts") or raw["num_local_experts"]


def mixture(raw: Raw, **fields: Any) -> Experts:
    """Return experts in all blocks, as wide as a dense MLP and with normalized weights, unless `fields` differ."""
    everywhere: dict[str, Any] = dict(normalized=True, blocks=frozenset(range(raw["num_hidden_layers"])))
    everywhere |= dict(intermediate_size=raw.get("intermediate_size"))
    return Experts(num_experts(raw), raw["num_experts_per_tok"], **(everywhere | fields))


def windows(
    raw: Raw, size: int | None, slides: Callable[[int], bool] | None = None, kind: str = SLIDING
) -> tuple[int | None, ...]:
    """Return `HfConfig.windows`: `size` in every block, or with `slides` only in sliding blocks.

    `layer_types` names the sliding blocks, of this `kind`; without that key `slides(block)` decides.
    """
    blocks = range(raw["num_hidden_layers"])
    if size is None:
        return ()
    if slides is None:
        return (size,) * len(blocks)
    types = raw.get("layer_types") or [kind if slides(block) else FULL for block in blocks]
    return tuple(size if one == kind else None for one in types)


def rotates(raw: Raw) -> list[int]:
    """Return, for each block, 1 if it rotates queries and keys, else 0, as SmolLM3 and Llama 4 name them."""
    every = raw.get("no_rope_layer_interval", 4)
    return raw.get("no_rope_layers") or [int((block + 1) % every != 0) for block in range(raw["num_hidden_layers"])]


def expert_problems(raw: Raw, *required: tuple[str, ...]) -> list[str]:
    """Return the keys of a mixture of experts that config.json lacks, and values that leave no expert. Each tuple in
    `required` needs one key."""
    required = (("num_experts_per_tok",), ("num_experts", "num_local_experts"), *required)
    problems = [f"config.json lacks {' or '.join(keys)}" for keys in required if not any(raw.get(key) for key in keys)]
    if problems:
        return problems
    if raw["num_experts_per_tok"] > (count := num_experts(raw)):
        problems.append(f"num_experts_per_tok={raw['num_experts_per_tok']} is more than the {count} experts")
    if raw.get("routed_scaling_factor") == 0:
        problems.append("routed_scaling_factor is 0, which disables the experts; set it to its value in training")
    if raw.get("topk_group") == 0:
        problems.append("topk_group is 0, which leaves no group of experts; set it to 1 or more")
    return problems
