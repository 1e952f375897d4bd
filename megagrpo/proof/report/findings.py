"""Alarms of a run: the warnings that it recorded, and conditions in its metrics that docs/metrics.md names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from megagrpo.platform.process.terminal import printable
from megagrpo.proof.report.collect import RunFiles
from megagrpo.proof.report.conditions import (
    above_zero,
    collapsed,
    constant_steps,
    constant_texts,
    ended_early,
    evaluation_fell,
    gradient_spikes,
    grows,
    largest_mismatch,
    mean_at_the_end,
    not_numbers,
    stays_above,
    unscored_counts,
    unscored_steps,
    unsolved,
)

PAGE = "docs/metrics.md, section Alarms"
MANY = 0.5  # share of groups, or of responses, above which a lasting condition is an alarm
MOST_RANGES = 200  # ranges of steps listed per alarm
MOST_TEXTS = 20  # messages listed per alarm


@dataclass
class Finding:
    """One alarm: what was seen in which steps, what it means, what to do."""

    title: str
    meaning: str
    advice: str
    severity: str = "warning"  # or "error"
    steps: list[list[int]] = field(default_factory=list)  # [first, last] of each range of steps
    texts: list[str] = field(default_factory=list)
    metric: str = ""  # or several, with spaces between
    page: str = PAGE


@dataclass(frozen=True)
class Check:
    """A condition in the metrics: its name, and a function that returns the violating steps, or None without data."""

    name: str
    finding: Finding
    violations: Callable[[RunFiles], list[int] | None]
    evidence: Callable[[RunFiles], str] = lambda run: ""  # what was measured, in words, for a check that passed
    texts: Callable[[RunFiles], list[str]] = lambda run: []  # what was counted, for an alarm


def findings(run: RunFiles) -> dict[str, Any]:
    """Return the run's alarms, [name, evidence] of the passed checks, and the checks that its metrics do not allow."""
    alarms, passed, unknown = [], [], []
    for check in CHECKS:
        steps = check.violations(run)
        if steps is None:
            unknown.append(check.name)
        elif steps:
            made = Finding(**{**asdict(check.finding), "steps": _ranges(steps), "texts": check.texts(run)})
            alarms.append(made)
        else:
            passed.append([check.name, check.evidence(run)])
    _add_warnings(run, alarms)
    return {"alarms": [asdict(alarm) for alarm in alarms], "passed": passed, "unknown": unknown}


def _add_warnings(run: RunFiles, alarms: list[Finding]) -> None:
    """Add the warnings of `messages.jsonl` to the alarm that they belong to, or to an alarm of their own."""
    rest = Finding(
        "Other warnings",
        "The run printed these warnings.",
        "Each warning says what to do.",
        page="docs/troubleshooting.md",
    )
    steps: set[int] = set()
    by_metric = {alarm.metric: alarm for alarm in alarms}
    inputs = [(words, replace(finding, texts=[])) for words, finding in INPUTS]
    for message in run.messages:
        text = printable(str(message.get("text", "")))
        if not text.startswith("warning:"):
            continue
        metric = next((key for words, key in _WORDS.items() if words in text), "")
        about_inputs = next((finding for words, finding in inputs if any(word in text for word in words)), rest)
        alarm, text = by_metric.get(metric, about_inputs), text.removeprefix("warning:").strip()
        if len(alarm.texts) < MOST_TEXTS and text not in alarm.texts:
            alarm.texts.append(text)
        if alarm is rest:
            steps.add(message["step"])
    alarms += [finding for _, finding in inputs if finding.texts]
    if rest.texts:
        rest.steps = _ranges(sorted(steps))
        alarms.append(rest)


def _ranges(steps: Sequence[int]) -> list[list[int]]:
    """Return growing steps as ranges [first, last], the last `MOST_RANGES` of them."""
    found: list[list[int]] = []
    for step in steps:
        if found and step <= found[-1][1] + 1:
            found[-1][1] = step
        else:
            found.append([step, step])
    return found[-MOST_RANGES:]


_WORDS = {"token_mult_prob_error": "mismatch/alarms", "optimizer step skipped": "train/skipped_steps"}


_ALARMS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("alarms.yaml").read_text(encoding="utf-8"))

# words of warnings at the start of a run, and the alarm that shows these warnings
INPUTS = [(tuple(alarm.pop("words")), Finding(**alarm)) for alarm in _ALARMS["inputs"]]
# name of a check -> condition, evidence and texts of its `Check`
_CONDITIONS: dict[str, tuple[Callable[[RunFiles], Any], ...]] = {
    "the run reached its end": (ended_early,),
    "trainer and engine agree": (grows("mismatch/alarms"), largest_mismatch),
    "every optimizer step was taken": (grows("train/skipped_steps"),),
    "reward, loss, entropy and gradient norm were numbers": (not_numbers,),
    "reward functions never failed": (above_zero("/exceptions", "/timeouts"),),
    "rewards could score the responses": (unscored_steps, lambda run: "", unscored_counts),
    "reward functions tell responses apart": (constant_steps, lambda run: "", constant_texts),
    "groups have something to learn from": (
        unsolved(stays_above("frac_reward_zero_std", MANY)),
        mean_at_the_end("frac_reward_zero_std", "of the groups have equal rewards"),
    ),
    "responses fit their length limit": (
        stays_above("completions/clipped_ratio", MANY),
        mean_at_the_end("completions/clipped_ratio", "of the responses are truncated"),
    ),
    "the policy did not collapse": (collapsed,),
    "held-out prompts did not get worse": (evaluation_fell,),
    "gradients are steady": (gradient_spikes,),
    "checkpoints were written": (grows("checkpoint/failures"),),
}
CHECKS = [Check(name, Finding(**_ALARMS["checks"][name]), *functions) for name, functions in _CONDITIONS.items()]
