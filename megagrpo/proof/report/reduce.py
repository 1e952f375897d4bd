"""Chooses and rounds the numbers that the page shows: curves of at most `MAX_POINTS` points, and the main figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from megagrpo.proof.report.collect import Row, RunFiles

MAX_POINTS = 2000  # per curve, of all runs of a page together
DIGITS = 5  # significant digits
NEAR_ONE = ("token_mult_prob_error",)  # metrics whose distance from 1 counts; they keep DIGITS decimals more
NOT_CURVES = ("step", "wall_time")


def rows_per_point(rows: Sequence[Sequence[Row]]) -> int:
    """Return how many rows the points of these curves average, so that a page has `MAX_POINTS`. It is the same number
    for all runs, so equal runs of different lengths have equal curves."""
    return max(1, math.ceil(max(map(len, rows)) * len(rows) / MAX_POINTS))


def number(value: Any, digits: int = DIGITS) -> float | None:
    """Return a number with so many significant digits; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def curves(rows: Sequence[Row], per_point: int = 1) -> dict[str, Any]:
    """Return steps, and one list per metric. Each value is the mean of `per_point` rows, None without the metric."""
    parts = [rows[i : i + per_point] for i in range(0, len(rows), per_point)]
    names = dict.fromkeys(name for row in rows for name in row if name not in NOT_CURVES)
    metrics = {name: [_mean(part, name) for part in parts] for name in names}
    return {
        "per_point": per_point,
        "step": [part[-1]["step"] for part in parts],
        "metrics": {name: values for name, values in metrics.items() if any(value is not None for value in values)},
    }


def when_of(row: Row) -> float | None:
    """Return the seconds since 1970 when a row was written; None if it is not recorded."""
    return float(row["wall_time"]) if number(row.get("wall_time")) is not None else None


def _mean(rows: Sequence[Row], name: str) -> float | None:
    values = [float(row[name]) for row in rows if number(row.get(name)) is not None]
    return number(math.fsum(values) / len(values), 2 * DIGITS if name in NEAR_ONE else DIGITS) if values else None


def result(run: RunFiles) -> dict[str, Any]:
    """Return the main figures of a run; a figure that the files lack is None."""
    steps, evaluated = run.steps, main_evaluation(run)
    rewards = [(row["step"], value) for row in steps if (value := number(row.get("reward"))) is not None]
    times = [float(row["time/step"]) for row in steps if number(row.get("time/step")) is not None]
    tokens = [float(row["num_tokens"]) for row in steps if number(row.get("num_tokens")) is not None]
    walls = [when for row in [*steps, *run.evaluations] if (when := when_of(row)) is not None]
    return {
        "steps": steps[-1]["step"] if steps else 0,
        "max_steps": number(run.setting("run.max_steps")),
        "reward": [rewards[0][1], rewards[-1][1]] if rewards else [None, None],
        "reward_steps": [rewards[0][0], rewards[-1][0]] if rewards else [None, None],
        "evaluation": evaluated,
        "training_seconds": number(math.fsum(times)) if times else None,
        "wall_seconds": round(max(walls) - min(walls) + (times[0] if times else 0), 1) if walls else None,
        "began": min(walls) if walls else None,
        "tokens": int(math.fsum(tokens)) if tokens else None,
        "tokens_per_second": number(math.fsum(tokens) / math.fsum(times)) if tokens and math.fsum(times) > 0 else None,
        "peak_memory_gb": max(
            (value for row in steps if (value := number(row.get("memory_gb"))) is not None), default=None
        ),
        "starts": len(run.starts) or None,
    }


def main_evaluation(run: RunFiles) -> dict[str, Any] | None:
    """Return name, first and last value, and steps of the most telling evaluation metric; None without evaluations."""
    name, values = evaluation_values(run)
    if not values:
        return None
    (first_step, first), (last_step, last) = values[0], values[-1]
    return {
        "name": name.removeprefix("eval/"),
        "first": first,
        "last": last,
        "steps": [first_step, last_step],
        "count": len(values),
    }


def evaluation_values(run: RunFiles) -> tuple[str, list[tuple[int, float]]]:
    """Return name and (step, value) pairs of the main evaluation metric: pass@1, else the reward, of the first set."""
    names = list(dict.fromkeys(name for row in run.evaluations for name in row if name.startswith("eval/")))
    for name in [n for n in names if n.endswith("pass@1")] + [n for n in names if n.endswith("/reward")]:
        values = [(row["step"], value) for row in run.evaluations if (value := number(row.get(name))) is not None]
        if values:
            return name, values
    return "", []


def state(run: RunFiles) -> dict[str, str]:
    """Return the run's state and a text for it. `failed`: it ended early and no message says why; else `stopped`."""
    done = run.steps[-1]["step"] if run.steps else 0
    limit = run.setting("run.max_steps")
    texts = [str(message.get("text", "")) for message in run.messages[-5:]]
    of = f" of {limit:,}" if isinstance(limit, int) else ""
    if run.running:
        return {"state": "running", "text": f"running, step {done:,}{of}"}
    if any(text.startswith("finished ") for text in texts) or (isinstance(limit, int) and done >= limit):
        return {"state": "finished", "text": f"finished, {done:,} step{'s' if done != 1 else ''}"}
    if any(text.startswith(("stop requested", "the time limit is near")) for text in texts):
        return {"state": "stopped", "text": f"stopped on request after step {done:,}{of}"}
    return {
        "state": "failed" if of else "stopped",
        "text": f"ended early, after step {done:,}{of}" if of else f"stopped after step {done:,}",
    }
