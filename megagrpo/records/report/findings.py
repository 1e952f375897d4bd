"""Alarms of a run: the warnings that it recorded, and conditions in its metrics that docs/metrics.md names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from megagrpo.platform.process.terminal import printable
from megagrpo.records.report.collect import RunFiles
from megagrpo.records.report.conditions import (
    above_zero,
    collapsed,
    constant,
    constant_steps,
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


# Words of warnings at the start of a run, and the alarm that shows these warnings.
INPUTS = [
    (
        ("rows cannot be scored", "rows have no gold"),
        Finding(
            "Rows cannot be scored",
            "The gold of these rows is missing, or no reward function can read it. Their responses teach nothing.",
            "megagrpo check lists the rows. Correct or remove them.",
            page="docs/commands.md, section Check data and rewards",
        ),
    ),
    (
        ("golds do not score best", "no reward gives a gold", "gives every response", "are longer than the"),
        Finding(
            "Right answers do not score best",
            "The right answer of a row gets no more than an empty response or a wrong answer, or cannot be given.",
            "megagrpo check shows the values. Correct the rows, or choose another reward.",
            page="docs/commands.md, section Check data and rewards",
        ),
    ),
    (
        ("prompts are longer than", "prompts repeat an earlier one", "prompts are also in"),
        Finding(
            "Prompts are dropped, truncated or repeated",
            "The run trains on fewer or on other prompts than the data set has, or evaluates on prompts that it "
            "trains on.",
            "Raise rollout.max_prompt_length, or remove the rows.",
            page="docs/commands.md, section Check data and rewards",
        ),
    ),
]
CHECKS = [
    Check(
        "the run reached its end",
        Finding(
            "The run ended before its last step",
            "No message says that the run finished or was asked to stop: an error ended it, or it was killed.",
            "The last lines of the console, or of the job's log, name the error. Continue from the last checkpoint "
            "with --resume.",
            "error",
            metric="run",
            page="docs/troubleshooting.md",
        ),
        ended_early,
    ),
    Check(
        "trainer and engine agree",
        Finding(
            "Trainer and engine disagree",
            "token_mult_prob_error left its normal range: vLLM samples from other weights, or from another "
            "distribution, than the trainer computes.",
            "After a jump, look at weight_version in completions.jsonl and at vllm_0.log. From the first step on, "
            "check rollout.quantization and rollout.extra_args, and audit a dumped step.",
            metric="mismatch/alarms",
        ),
        grows("mismatch/alarms"),
        largest_mismatch,
    ),
    Check(
        "every optimizer step was taken",
        Finding(
            "Optimizer steps were skipped",
            "Loss or gradient was NaN or infinite. A skipped step changes no weight, moment or learning rate.",
            "One skipped step in a long run is harmless. Otherwise lower train.learning_rate, or dump a step with "
            "debug.dump_steps.",
            "error",
            metric="train/skipped_steps",
        ),
        grows("train/skipped_steps"),
    ),
    Check(
        "reward, loss, entropy and gradient norm were numbers",
        Finding(
            "Metrics are not numbers",
            "Reward, loss, entropy or gradient norm is recorded as NaN or infinite in these steps. The curves have "
            "gaps there.",
            "Without a reward, look at rewards/NAME/unscorable and at the responses of these steps. Otherwise look "
            "for skipped steps.",
            "error",
            metric="reward loss entropy grad_norm",
        ),
        not_numbers,
    ),
    Check(
        "reward functions never failed",
        Finding(
            "A reward function failed",
            "A function raised, died, hung, or returned no finite number. These responses scored 0.",
            "The console shows the first traceback with its completion. Correct the function, or raise "
            "rewards.timeout.",
            metric="rewards/*/exceptions",
        ),
        above_zero("/exceptions", "/timeouts"),
    ),
    Check(
        "rewards could score the responses",
        Finding(
            "Rewards could not score responses",
            "A function returned None and no other one scored these responses: the gold of their rows is missing or "
            "unreadable. They teach nothing.",
            "megagrpo check names the rows and the column. Correct or remove the rows.",
            metric="rewards/*/unscorable",
        ),
        unscored_steps,
        texts=unscored_counts,
    ),
    Check(
        "reward functions tell responses apart",
        Finding(
            "A reward function never varies",
            "A function gave every response the same value in every step, so it has taught nothing.",
            "megagrpo check tries it on right answers. Correct what it searches for, or remove it.",
            metric="rewards/*/std",
        ),
        constant_steps,
        texts=lambda run: [f"{name} gave every response {value:g}" for name, value in constant(run).items()],
    ),
    Check(
        "groups have something to learn from",
        Finding(
            "Most groups have equal rewards",
            "frac_reward_zero_std is above one half at the end. Groups with equal rewards have no gradient, so most "
            "of the work of these steps teaches nothing. With a high reward the prompts have become too easy, with a "
            "low one they are too hard.",
            "Stop here if the reward is as high as it can be. Otherwise change the prompts, draw others with "
            "algorithm.dynamic_sample, raise rollout.num_generations, or use a reward with values between 0 and 1.",
            metric="frac_reward_zero_std",
        ),
        stays_above("frac_reward_zero_std", MANY),
        mean_at_the_end("frac_reward_zero_std", "of the groups have equal rewards"),
    ),
    Check(
        "responses fit their length limit",
        Finding(
            "Many responses are truncated",
            "completions/clipped_ratio stays above one half: responses reach rollout.max_completion_length before "
            "their end.",
            "Raise rollout.max_completion_length, or add the reward soft_overlong.",
            metric="completions/clipped_ratio",
        ),
        stays_above("completions/clipped_ratio", MANY),
        mean_at_the_end("completions/clipped_ratio", "of the responses are truncated"),
    ),
    Check(
        "the policy did not collapse",
        Finding(
            "The policy collapsed",
            "The entropy fell to 0 and the reward is not higher than at the start: the policy is sure of wrong "
            "answers.",
            "Lower train.learning_rate, or raise algorithm.epsilon_high or algorithm.beta.",
            "error",
            metric="entropy",
        ),
        collapsed,
    ),
    Check(
        "held-out prompts did not get worse",
        Finding(
            "The evaluation fell",
            "The last evaluation is lower than the first one: the policy gets worse on prompts that it does not train "
            "on.",
            "Use a checkpoint of an earlier step. Lower train.learning_rate, or raise algorithm.beta.",
            metric="evaluation",
            page="docs/evaluation.md",
        ),
        evaluation_fell,
    ),
    Check(
        "gradients are steady",
        Finding(
            "Gradient norm has spikes",
            "grad_norm was more than ten times its median in three or more steps.",
            "Lower train.learning_rate.",
            metric="grad_norm",
        ),
        gradient_spikes,
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
        grows("checkpoint/failures"),
    ),
]
