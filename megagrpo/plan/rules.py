"""Lists the numbered rules that a run must satisfy before it starts, and marks the rules that only the run's own machine can check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megagrpo.config import Problem


@dataclass(frozen=True)
class Rule:
    """A numbered rule of docs/plan.md. A problem or a note with its number breaks it.

    `elsewhere` names the place that checks the part that cannot be known here; empty: the plan checks all of it.
    """

    number: int
    what: str
    elsewhere: str = ""


NODE = "the job's nodes, before it starts"
START = "the run, before its first step"
RULES = (
    Rule(1, "tp divides the attention heads"),
    Rule(2, "tp divides the KV heads"),
    Rule(3, "tp divides the MLP's width"),
    Rule(4, "the vocabulary is padded for tp; exports remove the padding"),
    Rule(5, "pp x vpp divides the layers, vpp needs pp"),
    Rule(6, "tp x cp x pp divides the ranks"),
    Rule(7, "ep divides the experts, and experts with tp need sequence parallelism"),
    Rule(8, "sequence parallelism needs tp"),
    Rule(9, "micro-batches are cut evenly over cp and tp"),
    Rule(10, "a group has two responses or more"),
    Rule(11, "every data-parallel rank has samples"),
    Rule(12, "optimizer steps divide a step's samples evenly"),
    Rule(13, "the data set has enough prompts for a step", START),
    Rule(14, "prompt and response fit micro-batch, model and server"),
    Rule(15, "responses are long enough to end", "the metric completions/clipped_ratio of the first steps"),
    Rule(16, "the tokenizer has a chat template", START),
    Rule(17, "the end tokens of model and tokenizer agree", START),
    Rule(18, "reward functions exist and respond", START),
    Rule(19, "tokenizer and architecture are supported", START),
    Rule(20, "everything fits a GPU"),
    Rule(21, "PYTORCH_CUDA_ALLOC_CONF and vLLM's sleep agree", NODE),
    Rule(22, "CUDA_DEVICE_MAX_CONNECTIONS is 1 where tp or cp needs it", NODE),
    Rule(23, "NCCL: interfaces, ports, versions, one rank on a GPU", NODE),
    Rule(24, "versions of torch, vLLM, Megatron, driver agree", NODE),
    Rule(25, "the run's folder is writable and has free space", NODE),
)


@dataclass(frozen=True)
class Verdict:
    """The verdict on a rule. `state` is holds, broken, note (allowed, but look at it), or unknown.

    A rule that can be checked only in part here is unknown unless it is broken.
    """

    rule: Rule
    state: str


def verdicts(problems: Sequence[Problem], notes: Sequence[Problem], gpu: bool) -> list[Verdict]:
    """Return the verdict on every rule. Without the memory of a GPU rule 20 is unknown."""

    def state(rule: Rule) -> str:
        for name, said in (("broken", problems), ("note", notes)):
            if any(problem.rule == rule.number for problem in said):
                return name
        return "unknown" if rule.elsewhere or (rule.number == 20 and not gpu) else "holds"

    return [Verdict(rule, state(rule)) for rule in RULES]


def rules_text(verdicts: Sequence[Verdict]) -> str:
    """Return one line: how many rules hold, which ones do not, and which ones cannot be checked here."""
    parts = [f"{sum(v.state == 'holds' for v in verdicts)} of {len(verdicts)} hold (docs/plan.md numbers them)"]
    for state, what in (("broken", "broken"), ("note", "worth a look"), ("unknown", "cannot be checked on this machine")):
        if numbers := [str(v.rule.number) for v in verdicts if v.state == state]:
            parts.append(f"{what}: {', '.join(numbers)}")
    return "; ".join(parts)
