"""Lists the numbered rules that a run must satisfy to start, and marks rules that only its own machine can check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megagrpo.config import Problem


@dataclass(frozen=True)
class PlanRule:
    """A numbered rule of docs/plan.md. A problem or a note with its number breaks it.

    `elsewhere` names the place that checks the part that cannot be known here; empty: the plan checks all of it.
    """

    number: int
    what: str
    elsewhere: str = ""


NODE = "the job's nodes, before it starts"
START = "the run, before its first step"
PLAN_RULES = (
    PlanRule(1, "tp divides the attention heads"),
    PlanRule(2, "tp divides the KV heads, or is a multiple of them"),
    PlanRule(3, "tp divides the MLP's width"),
    PlanRule(4, "the vocabulary is padded for tp; exports remove the padding"),
    PlanRule(5, "pp x vpp divides the layers, vpp needs pp"),
    PlanRule(6, "tp x cp x pp divides the ranks"),
    PlanRule(7, "ep divides the experts, and experts with tp need sequence parallelism"),
    PlanRule(8, "sequence parallelism needs tp"),
    PlanRule(9, "micro-batches are cut evenly over cp and tp"),
    PlanRule(10, "a group has two responses or more"),
    PlanRule(11, "every data-parallel rank has samples"),
    PlanRule(12, "optimizer steps divide a step's samples evenly"),
    PlanRule(13, "the data set has enough prompts for a step", START),
    PlanRule(14, "prompt and response fit micro-batch, model and server"),
    PlanRule(15, "responses are long enough to end", "the metric completions/clipped_ratio of the first steps"),
    PlanRule(16, "the tokenizer has a chat template", START),
    PlanRule(17, "the end tokens of model and tokenizer agree", START),
    PlanRule(18, "reward functions exist and respond", START),
    PlanRule(19, "tokenizer and architecture are supported", START),
    PlanRule(20, "everything fits a GPU"),
    PlanRule(21, "PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF agree", NODE),
    PlanRule(22, "CUDA_DEVICE_MAX_CONNECTIONS is 1 where tp or cp needs it", NODE),
    PlanRule(23, "NCCL: interfaces, ports, versions, one rank on a GPU", NODE),
    PlanRule(24, "versions of torch, vLLM, Megatron, driver agree", NODE),
    PlanRule(25, "the run's folder is writable and has free space", NODE),
)


@dataclass(frozen=True)
class RuleVerdict:
    """The verdict on a rule. `state` is holds, broken, note (allowed, but look at it), or unknown.

    A rule that can be checked only in part here is unknown unless it is broken.
    """

    rule: PlanRule
    state: str


def verdicts(problems: Sequence[Problem], notes: Sequence[Problem], gpu: bool) -> list[RuleVerdict]:
    """Return the verdict on every rule. Without the memory of a GPU rule 20 is unknown."""

    def state(rule: PlanRule) -> str:
        for name, said in (("broken", problems), ("note", notes)):
            if any(problem.rule == rule.number for problem in said):
                return name
        return "unknown" if rule.elsewhere or (rule.number == 20 and not gpu) else "holds"

    return [RuleVerdict(rule, state(rule)) for rule in PLAN_RULES]


def rules_text(verdicts: Sequence[RuleVerdict]) -> str:
    """Return one line: how many rules hold, which ones do not, and which ones cannot be checked here."""
    parts = [f"{sum(v.state == 'holds' for v in verdicts)} of {len(verdicts)} hold (docs/plan.md numbers them)"]
    for state, what in (
        ("broken", "broken"),
        ("note", "worth a look"),
        ("unknown", "cannot be checked on this machine"),
    ):
        if numbers := [str(v.rule.number) for v in verdicts if v.state == state]:
            parts.append(f"{what}: {', '.join(numbers)}")
    return "; ".join(parts)
