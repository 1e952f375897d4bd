"""A model's `config.json` in the words this project uses, and the rules that a parallel layout must obey for it.

Imports no torch, so `plan.py` can check a run on a login node.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Family:
    """What tells a model family from the others: which biases and norms its attention has, and whether it mixes experts."""

    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False


FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", qk_norm=True, experts=True),
    "mixtral": Family("MixtralForCausalLM", experts=True),
}


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: in the decoder blocks `blocks` a router sends each token through `per_token` of `count` MLPs."""

    count: int
    per_token: int
    intermediate_size: int  # of one expert
    normalized: bool  # whether the weights of a token's experts are scaled to add up to 1
    blocks: frozenset[int]


@dataclass(frozen=True)
class HfConfig:
    """The architecture of a decoder. `raw` is config.json as read; the rest is what building and converting need."""

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # of the MLP in blocks without experts
    experts: Experts | None
    vocab_size: int
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    rope_theta: float
    rope_type: str
    max_positions: int
    dtype: str  # of the weights on disk: "bfloat16", "float16" or "float32"
    raw: dict[str, Any] = field(repr=False, compare=False)

    def padded_vocab(self, tp_size: int) -> int:
        """V: the vocabulary rounded up to a multiple of the tensor-parallel size. Rows from `vocab_size` on belong to no token."""
        return -(-self.vocab_size // tp_size) * tp_size

    def has_experts(self, block: int) -> bool:
        """Whether decoder block `block`, counted from 0, has a mixture of experts in place of an MLP."""
        return self.experts is not None and block in self.experts.blocks


class Sizes(Protocol):
    """The part of the `parallel` section that the model must agree with."""

    tp: int
    pp: int
    vpp: int
    pipeline_layers: Sequence[int] | None
    ep: int
    expert_tp: int


def load_hf_config(folder: str | Path) -> HfConfig:
    """`folder/config.json` parsed. Raises ValueError when it is missing, broken, or of a model that is not supported."""
    return parse_hf_config(read_raw_config(folder))


def read_raw_config(folder: str | Path) -> dict[str, Any]:
    """`folder/config.json` as a dict. Raises ValueError when it is missing or broken."""
    path = Path(folder) / "config.json"
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"model: {folder} holds no config.json; name a folder in Hugging Face format") from None
    except json.JSONDecodeError as e:
        raise ValueError(f"model: {path} is not valid JSON: {e}") from None
    return raw


def parse_hf_config(raw: dict[str, Any]) -> HfConfig:
    """The architecture that a config.json describes. Raises ValueError, listing every reason, when it is not supported."""
    problems = architecture_problems(raw)
    if problems:
        raise ValueError("\n".join(problems))
    rope = _rope(raw)
    family = FAMILIES[raw["model_type"]]
    return HfConfig(
        family=raw["model_type"],
        num_layers=raw["num_hidden_layers"],
        hidden_size=raw["hidden_size"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=_kv_heads(raw),
        head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        intermediate_size=raw["intermediate_size"],
        experts=_experts(raw),
        vocab_size=raw["vocab_size"],
        tied_embeddings=raw.get("tie_word_embeddings", False),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=rope.get("rope_theta", 10000.0),
        rope_type=rope["rope_type"],
        max_positions=raw.get("max_position_embeddings", 2048),
        dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
        raw=raw,
    )


def architecture_problems(raw: dict[str, Any]) -> list[str]:
    """Why this config.json cannot be trained, one line each; empty when it can."""
    model_type = raw.get("model_type")
    if model_type not in FAMILIES:
        names = ", ".join(f"{name} ({family.architecture})" for name, family in FAMILIES.items())
        return [f"model: architecture {model_type or raw.get('architectures')} is not supported; supported: {names}"]
    required = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    missing = [f"model: config.json lacks {key}" for key in required if key not in raw] + _expert_size_problems(raw)
    # value that the model code of this project stands for -> what other values would need
    fixed = {
        "hidden_act": ("silu", "only silu is supported"),
        "mlp_bias": (False, "a bias in the MLP is not supported"),
        "quantization_config": (None, "quantized weights cannot be trained; use the original weights"),
        "attention_dropout": (0, "dropout is not supported; set it to 0"),
        "router_jitter_noise": (0, "noise in the router is not supported; set it to 0"),
    }
    if raw["model_type"] != "qwen2":  # its biases do not depend on this key
        fixed["attention_bias"] = (False, "a bias in the output projection of attention is not supported")
    wrong = [f"model: {key} is {raw[key]!r}; {fix}" for key, (value, fix) in fixed.items() if raw.get(key) not in (None, value)]
    rope = _rope(raw)
    if rope["rope_type"] not in ROPE_TYPES:
        wrong.append(f"model: rope_type {rope['rope_type']!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    if rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        wrong.append("model: partial_rotary_factor is not 1; rotating a part of each head is not supported")
    if _slides(raw):
        wrong.append(f"model: sliding_window {raw.get('sliding_window')}: only full attention is supported")
    return missing + wrong


def model_problems(raw: dict[str, Any], parallel: Sizes) -> list[str]:
    """Why this model cannot be cut into `parallel`, one line each with the valid values; empty when it can."""
    problems = architecture_problems(raw)
    if problems:
        return problems
    tp = parallel.tp
    experts = _experts(raw)
    all_mixed = experts is not None and len(experts.blocks) == raw["num_hidden_layers"]
    sizes = {"num_attention_heads": raw["num_attention_heads"], "num_key_value_heads": _kv_heads(raw)}
    if not all_mixed:
        sizes["intermediate_size"] = raw["intermediate_size"]
    for key, size in sizes.items():
        if size % tp:
            valid = [d for d in _divisors(_kv_heads(raw)) if not any(n % d for n in sizes.values())]
            problems.append(f"parallel.tp: {key}={size} is not divisible by tp={tp}; valid tp: {_words(valid)}")
    return problems + _stage_problems(raw["num_hidden_layers"], parallel) + _expert_problems(raw["model_type"], experts, parallel)


def _stage_problems(layers: int, parallel: Sizes) -> list[str]:
    stages = parallel.pp * parallel.vpp
    example = f"parallel.pipeline_layers=[{','.join(map(str, _nearly_even(layers, stages)))}]"
    if parallel.pipeline_layers is not None and sum(parallel.pipeline_layers) != layers:
        given = f"parallel.pipeline_layers: {list(parallel.pipeline_layers)} sums to {sum(parallel.pipeline_layers)}"
        return [f"{given}, not to num_hidden_layers={layers}" + (f"; {example} would do" if stages <= layers else "")]
    if parallel.pipeline_layers is None and layers % stages:
        valid = f"num_hidden_layers={layers} is not divisible by pp x vpp = {stages}; valid pp x vpp: {_words(_divisors(layers))}"
        return [f"parallel.pp: {valid}" + (f"; or set {example}" if stages <= layers else "")]
    return []


def stage_layers(layers: int, parallel: Sizes) -> list[int]:
    """Decoder layers of each pipeline stage, virtual ones included, in model order."""
    stages = parallel.pp * parallel.vpp
    if parallel.pipeline_layers is None:
        return [layers // stages] * stages
    assert len(parallel.pipeline_layers) == stages, f"{list(parallel.pipeline_layers)} for {stages} stages"
    return list(parallel.pipeline_layers)


def _nearly_even(layers: int, stages: int) -> list[int]:
    """`stages` numbers that sum to `layers`; what is over goes to middle stages first, because the first one embeds and the last one has
    the LM head."""
    favoured = [*range(1, stages - 1), 0][: layers % stages]
    return [layers // stages + (stage in favoured) for stage in range(stages)]


def _expert_problems(family: str, experts: Experts | None, parallel: Sizes) -> list[str]:
    problems = []
    if experts is None:
        if parallel.ep > 1:
            problems.append(f"parallel.ep: {parallel.ep}, but {family} has no experts; set it to 1")
        if parallel.expert_tp != parallel.tp:
            problems.append(f"parallel.etp: {parallel.expert_tp}, but {family} has no experts; leave it empty")
        return problems
    if experts.count % parallel.ep:
        valid = _words(_divisors(experts.count))
        problems.append(f"parallel.ep: the model's {experts.count} experts are not divisible by ep={parallel.ep}; valid ep: {valid}")
    if (width := experts.intermediate_size) % parallel.expert_tp:
        valid = _words(_divisors(width))
        problems.append(f"parallel.etp: the experts' width {width} is not divisible by etp={parallel.expert_tp}; valid etp: {valid}")
    return problems


def _expert_size_problems(raw: dict[str, Any]) -> list[str]:
    if not FAMILIES[raw["model_type"]].experts:
        return []
    required = [("num_experts_per_tok",), ("num_experts", "num_local_experts")]
    if raw["model_type"] == "qwen3_moe":
        required.append(("moe_intermediate_size",))
    problems = [f"model: config.json lacks {' or '.join(keys)}" for keys in required if not any(raw.get(key) for key in keys)]
    if problems or not {"num_hidden_layers", "intermediate_size"} <= raw.keys():
        return problems
    experts = _experts(raw)
    if experts.per_token > experts.count:
        problems.append(f"model: num_experts_per_tok={experts.per_token} is more than the {experts.count} experts")
    if not experts.blocks:
        problems.append("model: mlp_only_layers and decoder_sparse_step leave no block with experts; a dense model is a qwen3")
    return problems


def _experts(raw: dict[str, Any]) -> Experts | None:
    """The mixture of experts that config.json describes, by the defaults of transformers; None for a dense family."""
    if not FAMILIES[raw["model_type"]].experts:
        return None
    mixtral = raw["model_type"] == "mixtral"
    dense, every = raw.get("mlp_only_layers") or [], raw.get("decoder_sparse_step") or 1
    blocks = [b for b in range(raw["num_hidden_layers"]) if mixtral or (b not in dense and (b + 1) % every == 0)]
    return Experts(
        count=raw.get("num_experts") or raw["num_local_experts"],
        per_token=raw["num_experts_per_tok"],
        intermediate_size=raw["intermediate_size"] if mixtral else raw["moe_intermediate_size"],
        normalized=mixtral or raw.get("norm_topk_prob", False),
        blocks=frozenset(blocks),
    )


def architecture_differences(one: HfConfig, other: HfConfig) -> list[str]:
    """What keeps two models from being the same function of their weights, as `key: value of one, value of other`. The length they were
    trained for and the dtype on disk may differ."""
    names = [f.name for f in fields(HfConfig) if f.compare and f.name not in ("max_positions", "dtype")]
    pairs = [(name, getattr(one, name), getattr(other, name)) for name in names]
    ropes = [{key: value for key, value in _rope(config.raw).items() if key != "type"} for config in (one, other)]
    pairs += [(key, ropes[0].get(key), ropes[1].get(key)) for key in sorted(ropes[0].keys() | ropes[1].keys()) if key not in names]
    return [f"{name}: {value}, {different}" for name, value, different in pairs if value != different]


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters with `rope_type` and `rope_theta`, from transformers 5's `rope_parameters` or the older two keys."""
    old = {"rope_theta": raw.get("rope_theta", 10000.0)} | (raw.get("rope_scaling") or {})
    rope = old | (raw.get("rope_parameters") or {})
    return rope | {"rope_type": rope.get("rope_type") or rope.get("type") or "default"}


def _kv_heads(raw: dict[str, Any]) -> int:
    return raw.get("num_key_value_heads") or raw["num_attention_heads"]


def _slides(raw: dict[str, Any]) -> bool:
    """Whether any layer attends to a window only. Qwen writes a window size without using it unless `use_sliding_window`; Mistral
    uses 4096 when its config says nothing."""
    if raw["model_type"] == "mistral":
        return raw.get("sliding_window", 4096) is not None
    if raw["model_type"] == "mixtral":
        return raw.get("sliding_window") is not None
    return bool(raw.get("use_sliding_window"))


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _words(values: list[int]) -> str:
    return ", ".join(map(str, values))
