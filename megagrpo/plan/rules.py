"""The rules a run is held to before it starts, by number, and which of them cannot be told without the machine that it will run on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """`says` matches what is said when it is broken; `elsewhere` is who tells what cannot be known here, empty when all of it can."""

    number: int
    what: str
    says: str
    elsewhere: str = ""


NODE = "the job's nodes, before it starts"
START = "the run, before its first step"
RULES = (
    Rule(1, "tp divides the attention heads", r"num_attention_heads=\d+ is not divisible"),
    Rule(2, "tp divides the KV heads", r"num_key_value_heads=\d+ is not divisible"),
    Rule(3, "tp divides the MLP's width", r"intermediate_size(?: x n_shared_experts)?=\d+ is not divisible"),
    Rule(4, "the vocabulary is padded for tp, and cut again on export", r"vocabulary of \d+ is padded"),
    Rule(5, "pp x vpp divides the layers, vpp needs pp", r"num_hidden_layers|^parallel\.vpp: |^parallel\.pipeline_layers: "),
    Rule(6, "tp x cp x pp divides the ranks", r"^world_size: "),
    Rule(
        7,
        "ep divides the experts, and experts with tp need sequence parallelism",
        r"experts are not divisible|has experts, which with|num_experts_per_tok",
    ),
    Rule(8, "sequence parallelism needs tp", r"^parallel\.sequence_parallel: needs parallel\.tp"),
    Rule(9, "micro-batches are cut evenly over cp and tp", r"is cut to \d+, a multiple of|padded to a multiple of"),
    Rule(10, "a group has two responses or more", r"rollout\.num_generations: .*greater than or equal to 2"),
    Rule(11, "every data-parallel rank has samples", r"fewer samples than data-parallel ranks"),
    Rule(12, "optimizer steps share out a step's samples evenly", r"^algorithm\.steps_per_generation: \d+ does not divide"),
    Rule(13, "there are prompts enough for a step", r"so some come twice", START),
    Rule(
        14, "prompt and response fit micro-batch, model and server", r"max_position_embeddings|cannot hold the longest|cannot hold one seq"
    ),
    Rule(15, "responses are long enough to end", r"$^", "the metric completions/clipped_ratio of the first steps"),
    Rule(16, "the tokenizer has a chat template", r"has no chat template", START),
    Rule(17, "responses end where the tokenizer ends them", r"ends responses at", START),
    Rule(18, "rewards exist and answer", r"^rewards\.functions", START),
    Rule(19, "tokenizer and architecture fit", r"outside of the model's vocab_size|^model: architecture", START),
    Rule(20, "everything fits a GPU", r"of the GPU need|a trainer rank needs|of a GPU must hold"),
    Rule(21, "PYTORCH_CUDA_ALLOC_CONF and vLLM's sleep agree", r"$^", NODE),
    Rule(22, "CUDA_DEVICE_MAX_CONNECTIONS is 1 where tp or cp needs it", r"$^", NODE),
    Rule(23, "NCCL: interfaces, ports, versions, one rank on a GPU", r"$^", NODE),
    Rule(24, "versions of torch, vLLM, Megatron, driver agree", r"$^", NODE),
    Rule(25, "the run's folder can be written and has room", r"^run\.output_dir: ", NODE),
)


@dataclass(frozen=True)
class Verdict:
    """`state`: holds, broken, note (nothing stops, but look at it), or unknown. A rule that is only known in part here is unknown unless it
    is broken."""

    rule: Rule
    state: str


def verdicts(problems: Sequence[str], notes: Sequence[str], gpu: bool) -> list[Verdict]:
    """Every rule's. Without the memory of a GPU rule 20 is unknown."""

    def state(rule: Rule) -> str:
        for name, said in (("broken", problems), ("note", notes)):
            if any(re.search(rule.says, text) for text in said):
                return name
        return "unknown" if rule.elsewhere or (rule.number == 20 and not gpu) else "holds"

    return [Verdict(rule, state(rule)) for rule in RULES]


def rules_text(found: Sequence[Verdict]) -> str:
    """One line: how many hold, which do not, and which are somebody else's to check."""
    parts = [f"{sum(v.state == 'holds' for v in found)} of {len(found)} hold (docs/plan.md numbers them)"]
    for state, what in (("broken", "broken"), ("note", "worth a look"), ("unknown", "not to be told here")):
        if numbers := [str(v.rule.number) for v in found if v.state == state]:
            parts.append(f"{what}: {', '.join(numbers)}")
    return "; ".join(parts)
