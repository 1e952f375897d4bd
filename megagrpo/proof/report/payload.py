"""Builds the page's data: one JSON value of all but responses, and one compressed chunk of responses per step."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import PydanticUndefined

from megagrpo.config import RunConfig
from megagrpo.config.key_table import fields
from megagrpo.config.sections.loss_table import ROW_LOSSES
from megagrpo.platform.install.requirements import installed_version
from megagrpo.platform.process.terminal import printable
from megagrpo.proof.report.collect import RunFiles
from megagrpo.proof.report.findings import findings
from megagrpo.proof.report.privacy import SECRET_KEY, mapped, without_secrets
from megagrpo.proof.report.reduce import curves, number, result, rows_per_point, state
from megagrpo.proof.report.shown_responses import Chosen, choose
from megagrpo.proof.report.shown_texts import text_of
from megagrpo.records.checkpoints.run_files import AXES

MAX_BYTES = 2_900_000  # of a page


@dataclass(frozen=True)
class Payload:
    """The data of a page: `head` is JSON; `chunks` maps `RUN-STEP` to the compressed groups of a step, in base64."""

    head: str
    chunks: dict[str, str]
    chosen: list[Chosen]


def payload(runs: Sequence[RunFiles], static_bytes: int) -> Payload:
    """Return the data of the runs. `static_bytes` of the page's limit are used by its code."""
    averaged = rows_per_point([run.steps for run in runs]), rows_per_point([run.evaluations for run in runs])
    described = [describe(run, *averaged) | {"label": label} for run, label in zip(runs, labels(runs), strict=True)]
    used = static_bytes + len(json.dumps(described))  # compression of the head makes room for what is added below
    chosen: list[Chosen] = []
    for index, run in enumerate(runs):
        share = (MAX_BYTES - used) // (len(runs) - index)
        chosen.append(choose(run, max(0, share)))
        used += sum(map(len, chosen[-1].chunks.values()))
        described[index]["responses"] = {
            "steps": [[s, *counts] for s, counts in chosen[-1].shown.items()],
            "count": chosen[-1].responses,
        }
        described[index]["damaged"] = {printable(name): count for name, count in run.damaged.items()}
    head = {"version": installed_version("megagrpo") or "?", "made": round(time.time()), "runs": described}
    chunks = {f"{index}-{step}": text for index, one in enumerate(chosen) for step, text in one.chunks.items()}
    return Payload(json.dumps(head, ensure_ascii=False, allow_nan=False, separators=(",", ":")), chunks, chosen)


def labels(runs: Sequence[RunFiles]) -> list[str]:
    """Return a unique name per run of the page: its own, else with the last parts of its folder, else with a number."""
    names = [run.name for run in runs]
    found = list(names)
    for depth in (1, 2, 3):
        alike = {label for label in found if found.count(label) > 1}
        for i, run in enumerate(runs):
            tail = "/".join(run.folder.resolve().parts[1:][-depth:])
            if found[i] in alike:
                found[i] = (
                    tail if tail.endswith(f"/{names[i]}") else names[i] if tail == names[i] else f"{names[i]} ({tail})"
                )
    found = [printable(without_secrets(label)) for label in found]
    return [
        f"{label} #{found[:i].count(label) + 1}" if found.count(label) > 1 else label for i, label in enumerate(found)
    ]


def describe(run: RunFiles, steps_per_point: int, evaluations_per_point: int) -> dict[str, Any]:
    """Return everything that the page shows of a run but its responses. Metrics and keys are as the run wrote them."""
    start = run.last_start
    notes = {
        "name": printable(run.name),
        "folder": printable(str(run.folder.resolve())),
        "state": state(run),
        "model": printable(str(run.setting("model.path") or "")),
        "facts": facts(run),
        "versions": {printable(str(k)): printable(str(v)) for k, v in start.get("versions", {}).items()}
        if start
        else {},
        "device": printable(str(start.get("device") or "")),
        "findings": findings(run),
    }
    return mapped(notes, without_secrets) | {
        "result": result(run),
        "training": _printable_names(curves(run.steps, steps_per_point)),
        "evaluations": _printable_names(curves(run.evaluations, evaluations_per_point)),
        "config": config_rows(run.config),
        "rows": _learns_from_rows(run),
    }


def facts(run: RunFiles) -> list[list[str]]:
    """Return pairs of name and text that describe the run in one line."""
    of = run.setting
    algorithm = [
        str(of("algorithm.loss_type") or ""),
        f"KL {of('algorithm.beta'):g}" if number(of("algorithm.beta")) else "no KL",
    ]
    if number(of("lora.rank")):
        algorithm.append(f"LoRA rank {of('lora.rank')}")
    if number(of("rollout.max_staleness")):
        algorithm.append(f"asynchronous, staleness up to {of('rollout.max_staleness')}")
    rewards = [str(one.get("function", "")) for one in of("rewards.functions") or [] if isinstance(one, dict)]
    tasks = [str(one.get("name", "")) for one in of("tasks") or [] if isinstance(one, dict)]
    recorded = run.last_start.get("layout")
    recorded = recorded if isinstance(recorded, dict) else {}
    sizes = {axis: number(recorded.get(axis)) or number(of(f"parallel.{axis}")) or 1 for axis in AXES}
    axes = [f"{axis} {size}" for axis, size in sizes.items() if size > 1] or ["one rank"]
    found = [
        ("algorithm", " · ".join(filter(None, algorithm)) if run.config else ""),
        ("step", _step(run)),
        ("tasks", ", ".join(tasks)) if tasks else ("rewards", ", ".join(rewards)),
        ("layout", " × ".join(axes)),
        ("precision", str(run.last_start.get("dtype") or of("model.precision") or "")),
    ]
    return [[name, printable(text)] for name, text in found if text]


def _step(run: RunFiles) -> str:
    """Return the rows of a step, or its prompts and their responses."""
    count, group = run.setting("rollout.prompts_per_step"), " or ".join(map(str, sorted({*run.group_sizes.values()})))
    if _learns_from_rows(run):
        return f"{count} rows"
    return f"{count} prompts × {group} responses" if group else ""


def _learns_from_rows(run: RunFiles) -> bool:
    return run.setting("algorithm.loss_type") in ROW_LOSSES


def _printable_names(curve: dict[str, Any]) -> dict[str, Any]:
    return curve | {"metrics": {printable(name): values for name, values in curve["metrics"].items()}}


def config_rows(config: dict[str, Any]) -> list[list[Any]]:
    """Return [key, value, default, changed] of every key, in order. A key without a default, or that this version
    lacks, has None there and counts as changed if it has a value. Values omit home directories and credentials."""
    defaults = {
        key: PydanticUndefined if info.is_required() else info.get_default(call_default_factory=True)
        for key, info in fields(RunConfig)
    }
    found = []
    for key, value in _flat(config):
        known = defaults.get(_pattern(key, defaults), PydanticUndefined)
        default = None if known is PydanticUndefined else _text(known)
        changed = value is not None and value != known
        text = (
            "<credential>"
            if value and isinstance(value, str) and SECRET_KEY.search(key)
            else without_secrets(_text(value))
        )
        found.append([printable(key), text, default, changed])
    return found


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the scalars, and lists of scalars, below a config with their dotted keys."""
    if isinstance(value, dict) and value:
        for name, below in value.items():
            yield from _flat(below, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list) and any(isinstance(one, dict) for one in value):
        for index, below in enumerate(value):
            yield from _flat(below, f"{key}.{index}")
    else:
        yield key, value


def _pattern(key: str, known: dict[str, Any]) -> str:
    """Return the key of the schema: list indices as `N`, and a name of the user as `NAME`."""
    key = re.sub(r"\.\d+(?=\.|$)", ".N", key)
    if key in known:
        return key
    parts = key.split(".")
    named = (".".join([*parts[:i], "NAME", *parts[i + 1 :]]) for i in range(1, len(parts)))
    return next((one for one in named if one in known), key)


def _text(value: Any) -> str:
    if value is None or value == "":
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list) and all(isinstance(one, (str, int, float)) for one in value):
        return text_of(", ".join(map(_text, value)))
    return text_of(value if isinstance(value, (str, dict, list)) else str(value))
