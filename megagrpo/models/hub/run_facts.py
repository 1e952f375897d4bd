"""What a run's folder records about one of its checkpoints: the config, and the metrics up to its step."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

from megagrpo.config import ConfigError, RunConfig, load_config

RESOLVED, METRICS = "resolved.yaml", "metrics.jsonl"
_STEP = re.compile(r"step_(\d{6,})")
_EVALUATION = "eval/"
Line = dict[str, float]


@dataclass(frozen=True)
class RunFacts:
    """A run up to one of its checkpoints. `steps` and `evaluations` are the lines of metrics.jsonl up to `step`,
    numbers only."""

    config: RunConfig
    step: int
    steps: list[Line]
    evaluations: list[Line]


def read_run(checkpoint: Path) -> RunFacts | None:
    """Return the facts about RUN/checkpoints/step_N, or about the adapter in it. None when the run's folder is not
    there or its config cannot be read."""
    checkpoint = checkpoint.resolve()
    folder = next((each for each in (checkpoint, checkpoint.parent) if _STEP.fullmatch(each.name)), None)
    if folder is None or not (folder.parents[1] / RESOLVED).is_file():
        return None
    run, step = folder.parents[1], int(folder.name.removeprefix("step_"))
    try:
        config = load_config(run / RESOLVED)
    except ConfigError:
        return None
    lines = [line for line in _read_metrics(run / METRICS) if line["step"] <= step]
    evaluations = [line for line in lines if any(name.startswith(_EVALUATION) for name in line)]
    return RunFacts(config, step, [line for line in lines if "reward" in line], evaluations)


def _read_metrics(file: Path) -> list[Line]:
    """Return the finite numbers of each line that has a step. Damaged lines are skipped."""
    lines = []
    for text in file.read_text(errors="replace").splitlines() if file.is_file() else []:
        try:
            values = json.loads(text)
        except ValueError:
            continue
        numbers = (
            {name: value for name, value in values.items() if _is_number(value)} if isinstance(values, dict) else {}
        )
        if "step" in numbers:
            lines.append(numbers)
    return lines


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
