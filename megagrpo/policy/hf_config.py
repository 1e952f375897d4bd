"""A model's `config.json` in the words this project uses, and the rules that a parallel layout must obey for it.

Imports no torch, so `plan.py` can check a run on a login node.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, Protocol

from megagrpo.config import Problem, ProblemError
from megagrpo.families import FAMILIES
from megagrpo.families.architecture import Experts, HfConfig
from megagrpo.families.family import common_fields, layer_type_problems, rope, rotated_share

MODEL = ("model",)  # the keys of a problem about what is in the model's folder
_DTYPES = ("bfloat16", "float16", "float32", "float64")


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
        raise ProblemError(Problem(MODEL, f"{folder} holds no config.json; name a folder in Hugging Face format")) from None
    except OSError as e:
        raise ProblemError(Problem(MODEL, f"{path} cannot be read: {e.strerror}; name a folder in Hugging Face format")) from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as e:
        raise ProblemError(Problem(MODEL, f"{path} is not valid JSON: {e}; download it again")) from None
    if not isinstance(raw, dict):
        raise ProblemError(Problem(MODEL, f"{path} holds no object of keys and values; download it again"))
    return raw


def parse_hf_config(raw: dict[str, Any]) -> HfConfig:
    """The architecture that a config.json describes. Raises ValueError, listing every reason, when it is not supported."""
    problems = architecture_problems(raw)
    if problems:
        raise ProblemError(*of_model(problems))
    family = FAMILIES[raw["model_type"]]
    return HfConfig(**common_fields(family, raw) | family.read(raw))


def of_model(lines: Sequence[str]) -> list[Problem]:
    """The lines of `architecture_problems` as problems."""
    return [Problem(MODEL, line.removeprefix("model: "), rule=19) for line in lines]


def architecture_problems(raw: dict[str, Any]) -> list[str]:
    """Why this config.json cannot be trained, one line each; empty when it can."""
    family = FAMILIES.get(raw.get("model_type"))
    if family is None:
        return [_unknown(raw)]
    if odd := _no_numbers(raw, family.required):
        return odd
    missing = [f"model: config.json lacks {key}" for key in family.required if key not in raw]
    wrong = [f"model: {key} is {raw[key]!r}; {fix}" for key, (value, fix) in family.fixed.items() if raw.get(key) not in (None, value)]
    rotary = rope(raw)
    if rotary["rope_type"] not in family.rope_types:
        wrong.append(
            f"model: rope_type {rotary['rope_type']!r} is not supported for {family.model_type}; supported: {', '.join(family.rope_types)}"
        )
    if family.partial_rotary_factor is None and rotated_share(raw, default=1.0) != 1.0:
        wrong.append(f"model: partial_rotary_factor is not 1; the attention of {family.model_type} turns all of each head")
    return missing + wrong + layer_type_problems(raw) + family.problems(raw)


def _no_numbers(raw: dict[str, Any], required: Sequence[str]) -> list[str]:
    """Sizes that are none, and a dtype that torch does not know."""
    sizes = {key: raw[key] for key in required if key in raw and key != "rms_norm_eps"}
    sizes |= {key: raw[key] for key in ("num_key_value_heads", "head_dim") if raw.get(key) is not None}
    odd = [
        f"model: {key} is {size!r} in config.json; it must be a positive whole number"
        for key, size in sizes.items()
        if type(size) is not int or size < 1
    ]
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    if dtype not in (None, *_DTYPES):
        odd.append(f"model: dtype is {dtype!r} in config.json; it must be one of {', '.join(_DTYPES)}")
    return odd


def _unknown(raw: dict[str, Any]) -> str:
    """What is said of a model of no known family: the nearest one by name, and all others."""
    if isinstance(text := raw.get("text_config"), dict):
        return (
            f"model: {raw.get('model_type')} is multimodal, and only text is trained; name a folder with its text model alone"
            f" (model_type {text.get('model_type')}); docs/troubleshooting.md has the lines that write it"
        )
    called = str(raw.get("model_type") or (raw.get("architectures") or ["none"])[0])
    likeness = {name: max(_likeness(called, name), _likeness(called, f.architecture)) for name, f in FAMILIES.items()}
    nearest = max(likeness, key=likeness.get)
    names = ", ".join(f"{name} ({family.architecture})" for name, family in FAMILIES.items())
    return (
        f"model: architecture {called} is not supported. The nearest by name is {nearest}: when the model differs from it in its name "
        f"alone, set model_type to {nearest} in a copy of its config.json. Supported: {names}"
    )


def _likeness(a: str, b: str) -> float:
    """How much two names are alike; that both are of the text part of something says nothing."""
    return SequenceMatcher(None, *(name.lower().removesuffix("_text") for name in (a, b))).ratio()


def model_problems(raw: dict[str, Any], parallel: Sizes) -> list[Problem]:
    """Why this model cannot be cut into `parallel`, with the valid values; empty when it can."""
    if lines := architecture_problems(raw):
        return of_model(lines)
    problems: list[Problem] = []
    tp, hf_config = parallel.tp, parse_hf_config(raw)
    sizes = {"num_attention_heads": hf_config.num_heads, "num_key_value_heads": hf_config.num_kv_heads}
    rules = {"num_attention_heads": 1, "num_key_value_heads": 2}  # all others are widths of an MLP
    if not all(map(hf_config.has_experts, range(hf_config.num_layers))):
        sizes["intermediate_size"] = hf_config.intermediate_size
    if hf_config.experts and hf_config.experts.shared_size:
        sizes["moe_intermediate_size x n_shared_experts"] = hf_config.experts.shared_size
    for key, size in sizes.items():
        if size % tp:
            valid = [d for d in _divisors(hf_config.num_kv_heads) if not any(n % d for n in sizes.values())]
            said = f"{key}={size} is not divisible by tp={tp}; valid tp: {_words(valid)}"
            problems.append(Problem(("parallel.tp", "model.path"), said, rule=rules.get(key, 3)))
    return problems + _stage_problems(hf_config.num_layers, parallel) + _expert_problems(hf_config.family, hf_config.experts, parallel)


def _stage_problems(layers: int, parallel: Sizes) -> list[Problem]:
    stages = parallel.pp * parallel.vpp
    example = f"parallel.pipeline_layers=[{','.join(map(str, nearly_even(layers, stages)))}]"
    if parallel.pipeline_layers is not None and sum(parallel.pipeline_layers) != layers:
        said = f"{list(parallel.pipeline_layers)} sums to {sum(parallel.pipeline_layers)}, not to num_hidden_layers={layers}"
        fix = f"; {example} would do" if stages <= layers else ""
        return [Problem(("parallel.pipeline_layers", "model.path"), said + fix, rule=5)]
    if parallel.pipeline_layers is None and layers % stages:
        valid = f"num_hidden_layers={layers} is not divisible by pp x vpp = {stages}; valid pp x vpp: {_words(_divisors(layers))}"
        fix = f"; or set {example}" if stages <= layers else ""
        return [Problem(("parallel.pp", "parallel.vpp", "model.path"), valid + fix, rule=5)]
    return []


def stage_layers(layers: int, parallel: Sizes) -> list[int]:
    """Decoder layers of each pipeline stage, virtual ones included, in model order."""
    stages = parallel.pp * parallel.vpp
    if parallel.pipeline_layers is None:
        return [layers // stages] * stages
    assert len(parallel.pipeline_layers) == stages, f"{list(parallel.pipeline_layers)} for {stages} stages"
    return list(parallel.pipeline_layers)


def nearly_even(layers: int, stages: int) -> list[int]:
    """`stages` numbers that sum to `layers`; what is over goes to middle stages first, because the first one embeds and the last one has
    the LM head."""
    favoured = [*range(1, stages - 1), 0][: layers % stages]
    return [layers // stages + (stage in favoured) for stage in range(stages)]


def _expert_problems(family: str, experts: Experts | None, parallel: Sizes) -> list[Problem]:
    problems = []
    if experts is None:
        if parallel.ep > 1:
            problems.append(Problem(("parallel.ep", "model.path"), f"{parallel.ep}, but {family} has no experts; set it to 1"))
        if parallel.expert_tp != parallel.tp:
            problems.append(Problem(("parallel.etp", "model.path"), f"{parallel.expert_tp}, but {family} has no experts; leave it empty"))
        return problems
    if experts.count % parallel.ep:
        valid = _words(_divisors(experts.count))
        said = f"the model's {experts.count} experts are not divisible by ep={parallel.ep}; valid ep: {valid}"
        problems.append(Problem(("parallel.ep", "model.path"), said, rule=7))
    if (width := experts.intermediate_size) % parallel.expert_tp:
        valid = _words(_divisors(width))
        said = f"the experts' width {width} is not divisible by etp={parallel.expert_tp}; valid etp: {valid}"
        problems.append(Problem(("parallel.etp", "model.path"), said, rule=7))
    return problems


def projections(hf_config: HfConfig) -> dict[str, tuple[str, ...]]:
    """Megatron's linears outside of experts, and the projections, as in q_proj, that Hugging Face keeps the weights of each in."""
    table = FAMILIES[hf_config.family].table(hf_config)
    linears = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    rules = {linear: table[f"{linear}.weight"] for linear in linears if f"{linear}.weight" in table}
    return {linear: tuple(name.split(".")[-2] for name in rule.names) for linear, rule in rules.items()}


def architecture_differences(one: HfConfig, other: HfConfig) -> list[str]:
    """What keeps two models from being the same function of their weights, as `key: value of one, value of other`. The length they were
    trained for and the dtype on disk may differ."""
    names = [f.name for f in fields(HfConfig) if f.compare and f.name not in ("max_positions", "dtype")]
    pairs = [(name, getattr(one, name), getattr(other, name)) for name in names]
    ropes = [{key: value for key, value in rope(config.raw).items() if key != "type"} for config in (one, other)]
    pairs += [(key, ropes[0].get(key), ropes[1].get(key)) for key in sorted(ropes[0].keys() | ropes[1].keys()) if key not in names]
    return [f"{name}: {value}, {different}" for name, value, different in pairs if value != different]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _words(values: list[int]) -> str:
    return ", ".join(map(str, values))
