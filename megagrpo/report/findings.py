"""Alarms of a run: the warnings that it recorded, and conditions in its metrics that docs/metrics.md names."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megagrpo.process.terminal import printable
from megagrpo.report.collect import RunFiles
from megagrpo.report.reduce import evaluation_values, number, state

PAGE = "docs/metrics.md, section Alarms"
TAIL = 0.2  # share of the steps at the end that a lasting condition is judged by
MANY = 0.5  # share of groups, or of responses, above which a lasting condition is an alarm
MOST_LOST = 0.05  # of the first evaluation; smaller falls may be chance
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
    """A condition in the metrics: its name, and a function that returns the steps that violate it, or None if nothing can be checked."""

    name: str
    finding: Finding
    violations: Callable[[RunFiles], list[int] | None]
    evidence: Callable[[RunFiles], str] = lambda run: ""  # what was measured, in words, for a check that passed


def findings(run: RunFiles) -> dict[str, Any]:
    """Return the alarms of the run, [name, evidence] of the checks that passed, and the checks that the run's metrics do not allow."""
    alarms, passed, unknown = [], [], []
    for check in CHECKS:
        steps = check.violations(run)
        if steps is None:
            unknown.append(check.name)
        elif steps:
            made = Finding(**{**asdict(check.finding), "steps": _ranges(steps)})
            alarms.append(made)
        else:
            passed.append([check.name, check.evidence(run)])
    _add_warnings(run, alarms)
    return {"alarms": [asdict(alarm) for alarm in alarms], "passed": passed, "unknown": unknown}


def _add_warnings(run: RunFiles, alarms: list[Finding]) -> None:
    """Add the warnings of `messages.jsonl` to the alarm that they belong to, or to an alarm of their own."""
    rest = Finding("Other warnings", "The run printed these warnings.", "Each warning says what to do.", page="docs/troubleshooting.md")
    steps: set[int] = set()
    by_metric = {alarm.metric: alarm for alarm in alarms}
    for message in run.messages:
        text = printable(str(message.get("text", "")))
        if not text.startswith("warning:"):
            continue
        metric = next((key for words, key in _WORDS.items() if words in text), "")
        alarm = by_metric.get(metric, rest)
        if len(alarm.texts) < MOST_TEXTS:
            alarm.texts.append(text.removeprefix("warning:").strip())
        if alarm is rest:
            steps.add(message["step"])
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


def _grows(name: str) -> Callable[[RunFiles], list[int] | None]:
    """Steps in which a counter of the run is larger than in the step before."""

    def violations(run: RunFiles) -> list[int] | None:
        values = [(row["step"], row[name]) for row in run.steps if number(row.get(name)) is not None]
        before = [0.0, *(value for _, value in values)]
        return [step for (step, value), last in zip(values, before, strict=False) if value > last] if values else None

    return violations


def _above_zero(*endings: str) -> Callable[[RunFiles], list[int] | None]:
    """Steps in which a metric with one of these endings is not 0."""

    def violations(run: RunFiles) -> list[int] | None:
        names = {name for row in run.steps for name in row if name.startswith("rewards/") and name.endswith(endings)}
        return [row["step"] for row in run.steps if any(number(row.get(name)) for name in names)] if names else None

    return violations


def _tail(run: RunFiles, name: str) -> list[tuple[int, float]]:
    values = [(row["step"], value) for row in run.steps if (value := number(row.get(name))) is not None]
    return values[-max(3, round(len(values) * TAIL)) :]


def _stays_above(name: str, limit: float) -> Callable[[RunFiles], list[int] | None]:
    """Steps at the end of the run above the limit, if their mean is above it."""

    def violations(run: RunFiles) -> list[int] | None:
        tail = _tail(run, name)
        if not tail:
            return None
        return [step for step, value in tail if value >= limit] if statistics.fmean(v for _, v in tail) >= limit else []

    return violations


def _mean_at_the_end(name: str, words: str) -> Callable[[RunFiles], str]:
    """Say the mean of a share in the steps that `_stays_above` judges."""

    def evidence(run: RunFiles) -> str:
        tail = _tail(run, name)
        return f"{100 * statistics.fmean(value for _, value in tail):.3g}% {words} in the last {len(tail)} step(s)"

    return evidence


def _largest_mismatch(run: RunFiles) -> str:
    """Say how far the probabilities of vLLM and the trainer were apart at most."""
    factors = [value for row in run.steps if (value := number(row.get("token_mult_prob_error"), 10)) is not None]
    if not factors:
        return ""
    apart = 100 * (max(factors) - 1)
    return f"token probabilities of vLLM and the trainer differ by {apart:.2g}% on average in the worst step"


def _ended_early(run: RunFiles) -> list[int] | None:
    """The last step of a run that neither finished nor was asked to stop."""
    now = state(run)["state"]
    if not run.setting("run.max_steps") or now == "running":
        return None
    return [run.steps[-1]["step"] if run.steps else 0] if now == "failed" else []


def _not_numbers(run: RunFiles) -> list[int] | None:
    """Steps in which a main metric is recorded and is no finite number."""
    names = ("reward", "loss", "entropy", "grad_norm")
    if not any(number(row.get(name)) is not None for row in run.steps for name in names):
        return None
    return [row["step"] for row in run.steps if any(name in row and number(row[name]) is None for name in names)]


def _evaluation_fell(run: RunFiles) -> list[int] | None:
    """The last evaluation, if it is lower than the first one by more than `MOST_LOST`."""
    _, values = evaluation_values(run)
    if len(values) < 2:
        return None
    return [values[-1][0]] if values[-1][1] < values[0][1] - MOST_LOST else []


def _collapsed(run: RunFiles) -> list[int] | None:
    """Steps at the end with almost no entropy, while the reward is no better than at the begin."""
    entropy, reward = _tail(run, "entropy"), [v for row in run.steps if (v := number(row.get("reward"))) is not None]
    if not entropy or not reward:
        return None
    low = [step for step, value in entropy if value < 0.01]
    worse = statistics.fmean(v for _, v in _tail(run, "reward")) <= statistics.fmean(reward[:3])
    return low if worse and len(low) == len(entropy) else []


def _gradient_spikes(run: RunFiles) -> list[int] | None:
    """Steps with more than ten times the median gradient norm, if there are three or more."""
    values = [(row["step"], value) for row in run.steps if (value := number(row.get("grad_norm"))) is not None]
    if not values:
        return None
    limit = 10 * statistics.median(value for _, value in values)
    spikes = [step for step, value in values if value > limit]
    return spikes if len(spikes) >= 3 else []


CHECKS = [
    Check(
        "the run reached its end",
        Finding(
            "The run ended before its last step",
            "No message says that the run finished or was asked to stop: an error ended it, or it was killed.",
            "The last lines of the console, or of the job's log, name the error. Continue from the last checkpoint with --resume.",
            "error",
            metric="run",
            page="docs/troubleshooting.md",
        ),
        _ended_early,
    ),
    Check(
        "trainer and engine agree",
        Finding(
            "Trainer and engine disagree",
            "token_mult_prob_error left its normal range: vLLM samples from other weights, or from another distribution, than the trainer "
            "computes.",
            "After a jump, look at weight_version in completions.jsonl and at vllm_0.log. From the first step on, check "
            "rollout.quantization and rollout.extra_args, and audit a dumped step.",
            metric="mismatch/alarms",
        ),
        _grows("mismatch/alarms"),
        _largest_mismatch,
    ),
    Check(
        "every optimizer step was taken",
        Finding(
            "Optimizer steps were skipped",
            "Loss or gradient was NaN or infinite. A skipped step changes no weight, moment or learning rate.",
            "One skipped step in a long run is harmless. Otherwise lower train.learning_rate, or dump a step with debug.dump_steps.",
            "error",
            metric="train/skipped_steps",
        ),
        _grows("train/skipped_steps"),
    ),
    Check(
        "reward, loss, entropy and gradient norm were numbers",
        Finding(
            "Metrics are not numbers",
            "Reward, loss, entropy or gradient norm is recorded as NaN or infinite in these steps. The curves have gaps there.",
            "Without a reward, look at rewards/NAME/unscorable and at the responses of these steps. Otherwise look for skipped steps.",
            "error",
            metric="reward loss entropy grad_norm",
        ),
        _not_numbers,
    ),
    Check(
        "reward functions never failed",
        Finding(
            "A reward function failed",
            "A function raised, died, hung, or returned no finite number. These responses scored 0.",
            "The console shows the first traceback with its completion. Correct the function, or raise rewards.timeout.",
            metric="rewards/*/exceptions",
        ),
        _above_zero("/exceptions", "/timeouts"),
    ),
    Check(
        "groups have something to learn from",
        Finding(
            "Most groups have equal rewards",
            "frac_reward_zero_std is above one half at the end. Groups with equal rewards have no gradient, so most of the work of these "
            "steps teaches nothing. With a high reward the prompts have become too easy, with a low one they are too hard.",
            "Stop here if the reward is as high as it can be. Otherwise change the prompts, draw others with algorithm.dynamic_sample, "
            "raise rollout.num_generations, or use a reward with values between 0 and 1.",
            metric="frac_reward_zero_std",
        ),
        _stays_above("frac_reward_zero_std", MANY),
        _mean_at_the_end("frac_reward_zero_std", "of the groups have equal rewards"),
    ),
    Check(
        "responses fit their length limit",
        Finding(
            "Many responses are truncated",
            "completions/clipped_ratio stays above one half: responses reach rollout.max_completion_length before their end.",
            "Raise rollout.max_completion_length, or add the reward soft_overlong.",
            metric="completions/clipped_ratio",
        ),
        _stays_above("completions/clipped_ratio", MANY),
        _mean_at_the_end("completions/clipped_ratio", "of the responses are truncated"),
    ),
    Check(
        "the policy did not collapse",
        Finding(
            "The policy collapsed",
            "The entropy fell to 0 and the reward is not higher than at the start: the policy is sure of wrong answers.",
            "Lower train.learning_rate, or raise algorithm.epsilon_high or algorithm.beta.",
            "error",
            metric="entropy",
        ),
        _collapsed,
    ),
    Check(
        "held-out prompts did not get worse",
        Finding(
            "The evaluation fell",
            "The last evaluation is lower than the first one: the policy gets worse on prompts that it does not train on.",
            "Use a checkpoint of an earlier step. Lower train.learning_rate, or raise algorithm.beta.",
            metric="evaluation",
            page="docs/evaluation.md",
        ),
        _evaluation_fell,
    ),
    Check(
        "gradients are steady",
        Finding(
            "Gradient norm has spikes",
            "grad_norm was more than ten times its median in three or more steps.",
            "Lower train.learning_rate.",
            metric="grad_norm",
        ),
        _gradient_spikes,
    ),
    Check(
        "checkpoints were written",
        Finding(
            "A checkpoint could not be written",
            "The run continued without it.",
            "Check the disk space of the run's folder.",
            "error",
            metric="checkpoint/failures",
            page="docs/checkpoints.md",
        ),
        _grows("checkpoint/failures"),
    ),
]
