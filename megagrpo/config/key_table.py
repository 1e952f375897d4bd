"""The keys of a config with their types, defaults and descriptions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from megagrpo.config.basics.yaml_text import flow_text
from megagrpo.config.run_config import RunConfig
from megagrpo.config.sections.section import ShownAs

_CURRICULUM = "write data.curriculum: [0.1, 0.9], the lowest and the highest pass rate"
_DELAYED = "the recipe delayed is gone; choose tensorwise, blockwise or mxfp8 (docs/fp8.md)"
_REPETITION = "use rollout.repetition_penalty, or the rewards repetition or token_repetition"
_AS_FILE = "name the tracker's file in run.trackers (docs/trackers.md)"
# dotted key of an earlier version -> its default then, and what to write instead
REMOVED_KEYS: dict[str, tuple[Any, str]] = {
    "algorithm.real_tau": (0.5, "the loss real is gone; choose another loss_type (docs/losses.md)"),
    "algorithm.router_z_loss_coef": (0.0, "balance routers with algorithm.router_aux_loss_coef"),
    "data.curriculum": ("off", _CURRICULUM),
    "data.curriculum_low": (0.1, _CURRICULUM),
    "data.curriculum_high": (0.9, _CURRICULUM),
    "evaluation.min_p": (0.0, "use evaluation.top_p or evaluation.top_k"),
    "evaluation.sets.NAME.min_p": (None, "use the set's top_p or top_k"),
    "lora.use_dora": (False, "DoRA is gone; train LoRA (docs/lora.md)"),
    "lora.use_rslora": (False, "write lora.alpha times the square root of lora.rank as lora.alpha"),
    "model.fp8_amax_compute_algo": ("max", _DELAYED),
    "model.fp8_amax_history_len": (1024, _DELAYED),
    "model.fp8_format": ("auto", "leave it out: gradients are e5m2 with tensorwise, else e4m3 (docs/fp8.md)"),
    "model.fp8_margin": (0, _DELAYED),
    "model.moe_router_padding_for_quantization": (False, "leave it out: rows of zeros pad each expert's tokens"),
    "multi_turn.completion_length_limit_scope": (
        "total",
        "leave it out: with multi_turn.max_response_length, rollout.max_completion_length limits each turn",
    ),
    "rewards.plugins": ([], "name each function as path/file.py:function in rewards.functions"),
    "run.mlflow": ({"tracking_uri": None, "experiment": None, "tags": {}, "name": None}, _AS_FILE),
    "multi_turn.max_tool_calls": (None, "use multi_turn.max_tool_calling_iterations, the turns with calls"),
    "rollout.bad_words": ([], "ban single tokens with rollout.logit_bias, or punish words in a reward function"),
    "rollout.frequency_penalty": (0.0, _REPETITION),
    "rollout.presence_penalty": (0.0, _REPETITION),
    "run.otel": ({"endpoint": None, "conversations": 16}, _AS_FILE),
    "run.prometheus": ({"port": 9400}, _AS_FILE),
}
PLACEHOLDERS = ("N", "NAME")  # in a dotted key: a list index, and a user-chosen name


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the model of an annotation `Section` or `Section | None`; None for a plain field."""
    for option in (annotation, *get_args(annotation)):
        if isinstance(option, type) and issubclass(option, BaseModel) and get_origin(annotation) not in (list, dict):
            return option
    return None


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield each dotted key of `model` in order with its pydantic field. `N` is a list index, `NAME` a user's key."""
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        origin = get_origin(field.annotation)
        wildcard = "N" if origin is list else "NAME" if origin is dict else None
        elements = [element for a in get_args(field.annotation) if wildcard and (element := section_of(a))]
        yield f"{prefix}{name}", field
        if section:
            yield from fields(section, f"{prefix}{name}.")
        for element in elements:
            yield from fields(element, f"{prefix}{name}.{wildcard}.")


def fits(key: str, loc: Sequence[str | int]) -> bool:
    """Whether the dotted key, whose placeholders stand for any index or name, is the place `loc`."""
    parts = key.split(".")
    return len(parts) == len(loc) and all(part in (*PLACEHOLDERS, here) for part, here in zip(parts, loc, strict=True))


def without_old_defaults(values: dict[Any, Any], loc: tuple[Any, ...] = ()) -> dict[Any, Any]:
    """Return `values` without removed keys that hold the default that they had, as those of an older run's config."""
    kept = {}
    for name, value in values.items():
        here = (*loc, name)
        if not any(fits(key, here) and value == default for key, (default, _) in REMOVED_KEYS.items()):
            kept[name] = without_old_defaults(value, here) if isinstance(value, dict) else value
    return kept


def render_help(within: str = "") -> str:
    """Return all keys' types, defaults and docstrings by section, as text. `within` selects one key and its subkeys."""
    lines: list[str] = []
    for key, field in fields(RunConfig):
        if within and not f"{key}.".startswith(f"{within}."):
            continue
        if section_of(field.annotation):
            lines += ["", f"{key}:  {field.description}" if field.description else f"{key}:"]
            continue
        default = (
            "required" if field.is_required() else f"default {_yaml(field.get_default(call_default_factory=True))}"
        )
        lines += [f"  {key}  ({_type_name(field.annotation, field.metadata)}, {default})"]
        lines += [f"      {line}" for line in (field.description or "").split("\n")]
    return "\n".join(lines).strip("\n")


_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def _type_name(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    if shown := [m.text for m in metadata if isinstance(m, ShownAs)]:
        return shown[0]
    if get_origin(annotation) is Literal:
        return " | ".join(get_args(annotation))
    if hasattr(annotation, "__metadata__"):
        nested = [m for outer in annotation.__metadata__ for m in (getattr(outer, "metadata", None) or [outer])]
        return _type_name(annotation.__origin__, nested)
    if get_origin(annotation) in (list, dict):
        inside = ", ".join(_type_name(a) for a in get_args(annotation))
        return f"{get_origin(annotation).__name__} of {inside}"
    if get_args(annotation):
        return " | ".join("empty" if a is type(None) else _type_name(a) for a in get_args(annotation))
    bounds = [
        f"{sign} {getattr(m, name):g}"
        for m in metadata
        for name, sign in _BOUNDS.items()
        if getattr(m, name, None) is not None
    ]
    return " ".join([getattr(annotation, "__name__", str(annotation)), *[" and ".join(bounds)] * bool(bounds)])


def _yaml(value: Any) -> str:
    if value is PydanticUndefined or value is None:
        return "empty"
    return value if isinstance(value, str) else flow_text(value)
