"""Reads a model's `config.json` into an `HfConfig`, and checks the rules that a parallel layout must satisfy for it.

Imports no torch, so `plan.py` can check a run on a login node.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from megagrpo.config import ParallelSection, Problem, ProblemError
from megagrpo.models.families import FAMILIES
from megagrpo.models.families.architecture import Experts, HfConfig
from megagrpo.models.families.config_keys import class_problems, key_problems
from megagrpo.models.families.family import COMMON, Family, common_config, layer_type_problems, rope, rotated_share

ROTARY = ("rope_scaling", "rope_parameters")
MODEL = ("model",)  # keys of a problem with the model's folder
_OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "q_lora_rank", "sliding_window")
# Type of values in config.json -> the keys with this type or null, and the type's name.
_TYPES: dict[type | tuple[type, ...], tuple[tuple[str, ...], str]] = {
    dict: (("rope_scaling", "rope_parameters"), "an object of keys and values"),
    list: (("layer_types", "mlp_only_layers"), "a list"),
    (int, float): (
        (
            *("rms_norm_eps", "rope_theta", "rope_local_base_freq", "partial_rotary_factor", "initializer_range"),
            *("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "routed_scaling_factor"),
        ),
        "a number",
    ),
    int: (
        (
            *("max_position_embeddings", "original_max_position_embeddings", "max_window_layers"),
            *("sliding_window_pattern", "num_experts", "num_local_experts", "num_experts_per_tok"),
            *("moe_intermediate_size", "decoder_sparse_step"),
            *("n_routed_experts", "n_shared_experts", "first_k_dense_replace", "n_group", "topk_group"),
        ),
        "a whole number",
    ),
}
_DTYPES = ("bfloat16", "float16", "float32", "float64")


def load_hf_config(folder: str | Path) -> HfConfig:
    """Parse `folder/config.json`. Raises ValueError when it is missing, broken, or of an unsupported model."""
    return parse_hf_config(read_raw_config(folder))


def read_raw_config(folder: str | Path) -> dict[str, Any]:
    """Read `folder/config.json` as a dict. Raises ValueError when it is missing or broken."""
    path = Path(folder) / "config.json"
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        said = f"{folder} holds no config.json; name a folder in Hugging Face format"
    except OSError as e:
        said = f"{path} cannot be read: {e.strerror}; name a folder in Hugging Face format"
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as e:
        said = f"{path} is not valid JSON: {e}; download it again"
    else:
        if isinstance(raw, dict):
            return raw
        said = f"{path} must contain a JSON object; download it again"
    raise ProblemError(Problem(MODEL, said))


def parse_hf_config(raw: dict[str, Any]) -> HfConfig:
    """Return the architecture of a config.json. Raises ValueError, listing every reason, when it is not supported."""
    problems = architecture_problems(raw)
    if problems:
        raise ProblemError(*of_model(problems))
    family = FAMILIES[raw["model_type"]]
    return family.read(raw, common_config(family, raw))


def of_model(lines: Sequence[str]) -> list[Problem]:
    """Convert the lines of `architecture_problems` to problems."""
    return [Problem(MODEL, line.removeprefix("model: "), rule=19) for line in lines]


def architecture_problems(raw: dict[str, Any]) -> list[str]:
    """Return why this config.json cannot be trained, one line each; empty when it can."""
    if not isinstance(kind := raw.get("model_type"), str | None):
        return [f"model: model_type is {kind!r} in config.json; it must be a name"]
    family = FAMILIES.get(kind or "")
    if family is None:
        return [_unknown(raw)]
    if odd := _no_numbers(family, raw):
        return odd
    if odd := [kind for kind in _rope_types(raw) if not isinstance(kind, str)]:
        return [f"model: rope_type is {odd[0]!r} in config.json; it must be a name"]
    missing = [f"model: config.json lacks {key}" for key in family.required if key not in raw]
    wrong = class_problems(family, raw) + key_problems(family, raw)
    unknown = [kind for kind in (rope(raw)["rope_type"], *_rope_types(raw)) if kind not in family.rope_types]
    if unknown:
        said = f"model: rope_type {unknown[0]!r} is not supported for {family.model_type}"
        wrong.append(f"{said}; supported: {', '.join(family.rope_types)}")
    if family.partial_rotary_factor is None and rotated_share(raw, default=1.0) != 1.0:
        wrong.append(f"model: partial_rotary_factor must be 1: {family.model_type} rotates all dimensions of a head")
    return missing + wrong + layer_type_problems(family, raw) + family.problems(raw)


def _unsupported(config: HfConfig) -> list[str]:
    """Return what Megatron cannot compute of a model whose config.json is valid."""
    problems = []
    if config.rotary_dim % 2 or not config.rotary_dim:
        said = f"model: {config.rotary_dim} dimensions of each head are rotated"
        problems.append(f"{said}; the number must be even and positive")
    if config.experts is not None and config.experts.normalized and config.experts.per_token == 1:
        said = "model: num_experts_per_tok=1 with normalized expert weights is not supported"
        problems.append(f"{said}: the only weight would always be 1")
    return problems


def _no_numbers(family: Family, raw: dict[str, Any]) -> list[str]:
    """Return values of the wrong type: sizes, numbers, lists, objects, and a dtype that torch does not know."""
    typed = {key for keys, _ in _TYPES.values() for key in keys}
    sizes = {
        key: raw[key]
        for key in family.required
        if key in raw and key not in typed and (key, raw[key]) != ("q_lora_rank", None)
    }
    sizes |= {key: raw[key] for key in _OPTIONAL_SIZES if raw.get(key) is not None}
    odd = [
        f"model: {key} is {size!r} in config.json; it must be a positive whole number"
        for key, size in sizes.items()
        if type(size) is not int or size < 1
    ]
    for kind, (keys, what) in _TYPES.items():
        values = {
            key: raw[key] for key in keys if raw.get(key) is not None and key in (*COMMON, *family.keys, "layer_types")
        }
        odd += [
            f"model: {key} is {value!r} in config.json; it must be {what}"
            for key, value in values.items()
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)
        ]
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    if dtype not in (None, *_DTYPES):
        odd.append(f"model: dtype is {dtype!r} in config.json; it must be one of {', '.join(_DTYPES)}")
    return odd


def _rope_types(raw: dict[str, Any]) -> list[Any]:
    """Return every kind of rotary scaling in config.json, even if another key overrides it here: vLLM may read it."""
    tables = [raw.get(key) or {} for key in ROTARY]
    tables += [value for table in tables for value in table.values() if isinstance(value, dict)]
    return [
        table[name] for table in tables for name in ("rope_type", "type") if table.get(name) not in (None, "default")
    ]


def _unknown(raw: dict[str, Any]) -> str:
    """Return the error for a model_type without a family. It suggests one only if the classes are the same."""
    kind, classes = raw.get("model_type"), raw.get("architectures") or []
    classes = list(map(str, classes)) if isinstance(classes, list) else [str(classes)]
    if isinstance(text := raw.get("text_config"), dict):
        inside = str(text.get("model_type") or "without model_type")
        if inside not in FAMILIES:
            return f"model: {kind} is multimodal, and its text model {inside} is not supported either{_nearest(inside)}"
        return (
            f"model: {kind} is multimodal, but only text models are supported; name a folder with its text model "
            f"(model_type {inside}); docs/troubleshooting.md has the code that writes it"
        )
    names = ", ".join(f"{name} ({family.architecture})" for name, family in FAMILIES.items())
    if same := [name for name, family in FAMILIES.items() if family.architecture in classes]:
        return (
            f"model: architecture {FAMILIES[same[0]].architecture} is not supported as model_type {kind}, but as "
            f"{same[0]}; set model_type to {same[0]} in a copy of config.json. Then all other keys are checked"
        )
    return (
        f"model: architecture {kind or ', '.join(classes)} is not supported: no file in megagrpo/models/families "
        "describes it, and another family would compute other numbers. docs/add_a_model.md shows how to write that "
        f"file. Supported: {names}"
    )


def _nearest(kind: str) -> str:
    """Return the end of a message that names the supported families, those with a similar name first."""
    near = get_close_matches(kind.removesuffix("_text"), FAMILIES, n=3)
    return f"; supported: {', '.join([*near, *(name for name in FAMILIES if name not in near)])}"


def model_problems(raw: dict[str, Any], parallel: ParallelSection) -> list[Problem]:
    """Return why this model cannot be sharded into `parallel`, with the valid values; empty when it can."""
    if lines := architecture_problems(raw):
        return of_model(lines)
    tp, hf_config = parallel.tp, parse_hf_config(raw)
    problems = of_model(_unsupported(hf_config))
    sizes = {"num_attention_heads": hf_config.num_heads, "num_key_value_heads": hf_config.num_kv_heads}
    rules = {"num_attention_heads": 1, "num_key_value_heads": 2}  # the rule of all other keys, widths of an MLP, is 3
    if not all(map(hf_config.has_experts, range(hf_config.num_layers))):
        sizes["intermediate_size"] = hf_config.intermediate_size
    if hf_config.experts and hf_config.experts.shared_size:
        sizes["moe_intermediate_size x n_shared_experts"] = hf_config.experts.shared_size
    for key, size in sizes.items():
        if size % tp:
            valid = [d for d in _divisors(hf_config.num_kv_heads) if not any(n % d for n in sizes.values())]
            said = f"{key}={size} is not divisible by tp={tp}; valid tp: {_words(valid)}"
            problems.append(Problem(("parallel.tp", "model.path"), said, rule=rules.get(key, 3)))
    problems += _stage_problems(hf_config.num_layers, parallel)
    problems += _expert_problems(hf_config.family, hf_config.experts, parallel)
    return problems


def _stage_problems(layers: int, parallel: ParallelSection) -> Iterator[Problem]:
    stages = parallel.pp * parallel.vpp
    example, own = f"parallel.pipeline_layers=[{_words(nearly_even(layers, stages), ',')}]", parallel.pipeline_layers
    if own is not None and sum(own) != layers:
        fix = f"; for example {example}" if stages <= layers else ""
        said = f"{own} sums to {sum(own)}, not to num_hidden_layers={layers}{fix}"
        yield Problem(("parallel.pipeline_layers", "model.path"), said, rule=5)
    if own is None and layers % stages:
        fix = f"; or set {example}" if stages <= layers else ""
        said = f"num_hidden_layers={layers} is not divisible by pp x vpp = {stages}; valid pp x vpp: "
        yield Problem(("parallel.pp", "parallel.vpp", "model.path"), f"{said}{_words(_divisors(layers))}{fix}", rule=5)


def stage_layers(layers: int, parallel: ParallelSection) -> list[int]:
    """Return the number of decoder layers of each pipeline stage, virtual ones included, in model order."""
    stages = parallel.pp * parallel.vpp
    if parallel.pipeline_layers is None:
        return [layers // stages] * stages
    assert len(parallel.pipeline_layers) == stages, f"{list(parallel.pipeline_layers)} for {stages} stages"
    return list(parallel.pipeline_layers)


def nearly_even(layers: int, stages: int) -> list[int]:
    """Return `stages` numbers that sum to `layers`. The remainder goes to middle stages first, because the first embeds
    and the last has the LM head."""
    favoured = [*range(1, stages - 1), 0][: layers % stages]
    return [layers // stages + (stage in favoured) for stage in range(stages)]


def _expert_problems(family: str, experts: Experts | None, parallel: ParallelSection) -> Iterator[Problem]:
    ep, etp, none = parallel.ep, parallel.expert_tp, f"but {family} has no experts"
    if experts is None:
        if ep > 1:
            yield Problem(("parallel.ep", "model.path"), f"{ep}, {none}; set it to 1")
        if etp != parallel.tp:
            yield Problem(("parallel.etp", "model.path"), f"{etp}, {none}; leave it empty")
        return
    if (count := experts.count) % ep:
        said = f"the model's {count} experts are not divisible by ep={ep}; valid ep: {_words(_divisors(count))}"
        yield Problem(("parallel.ep", "model.path"), said, rule=7)
    if (width := experts.intermediate_size) % etp:
        said = f"the experts' width {width} is not divisible by etp={etp}; valid etp: {_words(_divisors(width))}"
        yield Problem(("parallel.etp", "model.path"), said, rule=7)


def projections(hf_config: HfConfig) -> dict[str, tuple[str, ...]]:
    """Return Megatron's linears outside of experts, each with its Hugging Face projections, for example q_proj."""
    table = FAMILIES[hf_config.family].table(hf_config)
    linears = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    rules = {linear: table[f"{linear}.weight"] for linear in linears if f"{linear}.weight" in table}
    return {linear: tuple(name.split(".")[-2] for name in rule.names) for linear, rule in rules.items()}


def architecture_differences(one: HfConfig, other: HfConfig) -> list[str]:
    """Return what makes two models different functions of their weights, as `key: value of one, value of other`.

    Training length and dtype on disk may differ.
    """
    names = [f.name for f in fields(HfConfig) if f.compare and f.name not in ("max_positions", "dtype")]
    pairs = [(name, getattr(one, name), getattr(other, name)) for name in names]
    ropes = [{key: value for key, value in rope(config.raw).items() if key != "type"} for config in (one, other)]
    pairs += [
        (key, ropes[0].get(key), ropes[1].get(key))
        for key in sorted(ropes[0].keys() | ropes[1].keys())
        if key not in names
    ]
    return [f"{name}: {value}, {different}" for name, value, different in pairs if value != different]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _words(values: list[int], separator: str = ", ") -> str:
    return separator.join(map(str, values))
