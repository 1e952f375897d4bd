"""Alarm conditions in a run's metrics: each function returns the steps where one holds, or None without its metric."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from megagrpo.proof.report.collect import RunFiles
from megagrpo.proof.report.reduce import evaluation_values, number, state

TAIL = 0.2  # share of the steps at the end that a lasting condition is judged by
SOLVED = 0.99  # pass@1 of the last evaluation of a solved task
MOST_LOST = 0.05  # of the first evaluation; smaller falls may be chance
FEWEST_STEPS = 5  # of a run, before a function that never varies is an alarm
ON_LONG_RESPONSES = ("soft_overlong", "repetition", "token_repetition")  # functions that often give 0 to all


def grows(name: str) -> Callable[[RunFiles], list[int] | None]:
    """Steps in which a counter of the run is larger than in the step before."""

    def violations(run: RunFiles) -> list[int] | None:
        values = [(row["step"], row[name]) for row in run.steps if number(row.get(name)) is not None]
        before = [0.0, *(value for _, value in values)]
        return [step for (step, value), last in zip(values, before, strict=False) if value > last] if values else None

    return violations


def above_zero(*endings: str) -> Callable[[RunFiles], list[int] | None]:
    """Steps in which a metric with one of these endings is not 0."""

    def violations(run: RunFiles) -> list[int] | None:
        names = {name for row in run.steps for name in row if name.startswith("rewards/") and name.endswith(endings)}
        return [row["step"] for row in run.steps if any(number(row.get(name)) for name in names)] if names else None

    return violations


def _numbers(run: RunFiles, ending: str) -> dict[str, dict[int, float]]:
    """Return function -> step -> value of the metrics rewards/FUNCTION/ending."""
    found: dict[str, dict[int, float]] = {}
    for row in run.steps:
        for name, value in row.items():
            if name.startswith("rewards/") and name.endswith(f"/{ending}") and number(value) is not None:
                found.setdefault(name.removeprefix("rewards/").removesuffix(f"/{ending}"), {})[row["step"]] = value
    return found


def _lost(run: RunFiles) -> tuple[dict[str, dict[int, float]], dict[int, float]] | None:
    """Return each affected function's unscorable responses, and per step the fewest that no function can have scored.

    Functions for different rows, which complement each other, lose none. None without the metric.
    """
    counts, drawn = _numbers(run, "unscorable"), {row["step"]: _drawn(run, row) for row in run.steps}
    if not counts or not all(drawn.values()):
        return None
    some = {name: steps for name, steps in counts.items() if any(steps.values())}
    scored = {step: sum(total - steps.get(step, 0) for steps in some.values()) for step, total in drawn.items()}
    return some, {step: total - scored[step] for step, total in drawn.items() if some and scored[step] < total}


def _drawn(run: RunFiles, row: dict[str, Any]) -> float:
    """Return the responses that a step has drawn; 0 if the config does not say it."""
    prompts = number(row.get("dynamic_sample/groups_drawn")) or number(run.setting("rollout.prompts_per_step")) or 0
    sizes = run.group_sizes
    groups = {name: number(row.get(f"tasks/{name}/groups")) or 0 for name in sizes if name}
    trained = sum(groups.values())
    of_trained = sum(sizes[name] * count for name, count in groups.items())
    return of_trained * prompts / trained if trained else prompts * max(sizes.values(), default=0)


def unscored_steps(run: RunFiles) -> list[int] | None:
    found = _lost(run)
    return None if found is None else sorted(found[1])


def unscored_counts(run: RunFiles) -> list[str]:
    """Say how many responses each function could not score."""
    some, _ = _lost(run) or ({}, {})
    total = sum(_drawn(run, row) for row in run.steps)
    return [
        f"{name} could not score {sum(steps.values()):,.0f} of {total:,.0f} responses" for name, steps in some.items()
    ]


def constant(run: RunFiles) -> dict[str, float]:
    """Return function -> value of the functions that gave all responses of all steps the same, given enough steps."""
    found = {}
    for name, spread in _numbers(run, "std").items():
        means = set(_numbers(run, "mean").get(name, {}).values())
        if (
            len(spread) >= FEWEST_STEPS
            and not any(spread.values())
            and len(means) == 1
            and name not in ON_LONG_RESPONSES
        ):
            found[name] = means.pop()
    return found


def constant_steps(run: RunFiles) -> list[int] | None:
    if not any(len(steps) >= FEWEST_STEPS for steps in _numbers(run, "std").values()):
        return None
    return [row["step"] for row in run.steps] if constant(run) else []


def constant_texts(run: RunFiles) -> list[str]:
    """Say which value each function gave to all responses."""
    return [f"{name} gave every response {value:g}" for name, value in constant(run).items()]


def _tail(run: RunFiles, name: str) -> list[tuple[int, float]]:
    values = [(row["step"], value) for row in run.steps if (value := number(row.get(name))) is not None]
    return values[-max(3, round(len(values) * TAIL)) :]


def stays_above(name: str, limit: float) -> Callable[[RunFiles], list[int] | None]:
    """Steps at the end of the run above the limit, if their mean is above it."""

    def violations(run: RunFiles) -> list[int] | None:
        tail = _tail(run, name)
        if not tail:
            return None
        return [step for step, value in tail if value >= limit] if statistics.fmean(v for _, v in tail) >= limit else []

    return violations


def unsolved(violations: Callable[[RunFiles], list[int] | None]) -> Callable[[RunFiles], list[int] | None]:
    """The steps of a condition, none once held-out prompts are solved: groups of a solved task have equal rewards."""

    def of_unsolved(run: RunFiles) -> list[int] | None:
        name, values = evaluation_values(run)
        return [] if name.endswith("pass@1") and values[-1][1] >= SOLVED else violations(run)

    return of_unsolved


def mean_at_the_end(name: str, words: str) -> Callable[[RunFiles], str]:
    """Say the mean of a share in the steps that `stays_above` judges."""

    def evidence(run: RunFiles) -> str:
        tail = _tail(run, name)
        return f"{100 * statistics.fmean(value for _, value in tail):.3g}% {words} in the last {len(tail)} step(s)"

    return evidence


def largest_mismatch(run: RunFiles) -> str:
    """Say how far the probabilities of vLLM and the trainer were apart at most."""
    factors = [value for row in run.steps if (value := number(row.get("token_mult_prob_error"), 10)) is not None]
    if not factors:
        return ""
    apart = 100 * (max(factors) - 1)
    return f"token probabilities of vLLM and the trainer differ by {apart:.2g}% on average in the worst step"


def ended_early(run: RunFiles) -> list[int] | None:
    """The last step of a run that neither finished nor was asked to stop."""
    now = state(run)["state"]
    if not run.setting("run.max_steps") or now == "running":
        return None
    return [run.steps[-1]["step"] if run.steps else 0] if now == "failed" else []


def not_numbers(run: RunFiles) -> list[int] | None:
    """Steps in which a main metric is recorded and is no finite number."""
    names = ("reward", "loss", "entropy", "grad_norm")
    if not any(number(row.get(name)) is not None for row in run.steps for name in names):
        return None
    return [row["step"] for row in run.steps if any(name in row and number(row[name]) is None for name in names)]


def evaluation_fell(run: RunFiles) -> list[int] | None:
    """The last evaluation, if it is lower than the first one by more than `MOST_LOST`."""
    _, values = evaluation_values(run)
    if len(values) < 2:
        return None
    return [values[-1][0]] if values[-1][1] < values[0][1] - MOST_LOST else []


def collapsed(run: RunFiles) -> list[int] | None:
    """Steps at the end with almost no entropy, while the reward is no better than at the begin."""
    entropy, reward = _tail(run, "entropy"), [v for row in run.steps if (v := number(row.get("reward"))) is not None]
    if not entropy or not reward:
        return None
    low = [step for step, value in entropy if value < 0.01]
    worse = statistics.fmean(v for _, v in _tail(run, "reward")) <= statistics.fmean(reward[:3])
    return low if worse and len(low) == len(entropy) else []


def gradient_spikes(run: RunFiles) -> list[int] | None:
    """Steps with more than ten times the median gradient norm, if there are three or more."""
    values = [(row["step"], value) for row in run.steps if (value := number(row.get("grad_norm"))) is not None]
    if not values:
        return None
    limit = 10 * statistics.median(value for _, value in values)
    spikes = [step for step, value in values if value > limit]
    return spikes if len(spikes) >= 3 else []
