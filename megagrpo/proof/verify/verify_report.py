"""Formats the results of `megagrpo verify` as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megagrpo.config import RunConfig
from megagrpo.models.families.hf_config import HfConfig
from megagrpo.platform import device
from megagrpo.platform.process.terminal import WIDTH, wrapped
from megagrpo.proof.verify.verified_step import Outcome
from megagrpo.proof.verify.verify_compare import Distance, silent_tensors, worst
from megagrpo.types import TrainSample

MOST_SHOWN = 8  # limit of the wrong quantities that are shown
ABOUT = {
    "replica": "between ranks that hold the same part of a tensor",
    "padding": "gradient of the vocabulary's padding",
}


@dataclass(frozen=True)
class Verdict:
    """The result of one layout: its outcome, the outcome of one process, and their distances; or the failure."""

    layout: str
    ranks: int
    outcome: Outcome | None = None
    expected: Outcome | None = None
    distances: list[Distance] = field(default_factory=list)
    seconds: float = 0.0
    failure: str = ""

    @property
    def wrong(self) -> list[Distance]:
        """Distances above their tolerance, the worst first."""
        return sorted((d for d in self.distances if not d.passed), key=lambda d: -d.excess)

    @property
    def unproved(self) -> list[str]:
        """Tensors without a gradient even on one process."""
        return silent_tensors(self.expected) if self.expected else []

    @property
    def passed(self) -> bool:
        return not (self.failure or self.wrong or self.unproved)


def header(config: RunConfig, model: HfConfig, samples: Sequence[TrainSample]) -> str:
    """Return the shrunken model and the step as lines."""
    algorithm, tokens = config.algorithm, sum(int(s.response_mask.sum()) for s in samples)
    dtype = str(device.resolve_precision(config.model.precision)).removeprefix("torch.")
    dtype += "" if config.model.fp8_recipe == "none" else f" with FP8 ({config.model.fp8_recipe})"
    lines = (
        f"model   {config.model.path} shrunk: {model.family}, {model.num_layers} layers of width {model.hidden_size}, "
        f"{model.num_heads} heads, {model.num_kv_heads} KV heads, vocabulary {model.vocab_size}; random weights",
        f"step    {len(samples)} samples with {tokens} response tokens, {algorithm.loss_type}, beta "
        f"{algorithm.beta:g}, {dtype}, recompute {config.model.recompute}; reference: one process in float32",
    )
    return "\n".join(part for line in lines for part in wrapped(line, indent=8))


def as_text(verdict: Verdict, full: bool = False) -> str:
    """Return a block of lines; with `full` one line for each tensor."""
    ranks = f"{verdict.ranks} rank{'s' if verdict.ranks > 1 else ''}"
    lines = ["", *_row(f"{verdict.layout} on {ranks}", f"{'difference':>12}{'allowed':>10}")]
    outcome = verdict.outcome
    if verdict.failure or outcome is None:
        return "\n".join([*lines, *(f"  {line}" for line in verdict.failure.rstrip().split("\n")), "  FAIL"])
    shown = sorted(verdict.distances, key=lambda d: -d.excess) if full else worst(verdict.distances)
    for d in shown:
        lines += _row(f"  {_describe(d, verdict, outcome, full)}", f"{d.error:12.1e}{d.tolerance:10.1e}")
    wrong = [f"  {_name(d)}: difference {d.error:.1e} exceeds {d.tolerance:.1e}" for d in verdict.wrong[:MOST_SHOWN]]
    if more := len(verdict.wrong) - MOST_SHOWN:
        wrong += [f"  and {more} more"] if more > 0 else []
    wrong += [f"  {name} has no gradient on one process, so its gradient is not verified" for name in verdict.unproved]
    lines += [part for line in wrong for part in wrapped(line, whole_words=False)]
    return "\n".join([*lines, f"  {'pass' if verdict.passed else 'FAIL'}, {verdict.seconds:.1f} s"])


def _row(text: str, numbers: str) -> list[str]:
    """Return a text with its numbers at the right edge. A long text is wrapped, and its numbers stand behind the last
    part."""
    *before, last = wrapped(text, WIDTH - len(numbers), indent=4, whole_words=False)
    return [*before, f"{last:<{WIDTH - len(numbers)}}{numbers}"]


def _name(distance: Distance) -> str:
    return distance.kind if distance.name in (distance.kind, "largest") else f"{distance.kind} {distance.name}"


def _describe(distance: Distance, verdict: Verdict, outcome: Outcome, full: bool) -> str:
    """Return the subject of a line: the quantity with its value, or the worst of several."""
    kind, metrics = distance.kind, outcome.metrics
    if kind in ("loss", "gradient norm"):
        return f"{kind:<15}{metrics['loss' if kind == 'loss' else 'grad_norm']:.6g}"
    if kind in ABOUT:
        return f"{kind:<15}{ABOUT[kind]}"
    if full:
        return f"{kind:<15}{distance.name}"
    how_many = sum(d.kind == kind for d in verdict.distances)
    if kind == "log-prob":
        return f"{kind:<15}largest of {outcome.logprobs.numel()} tokens"
    return f"{kind:<15}worst of {how_many}: {distance.name}"


def summary(verdicts: Sequence[Verdict]) -> str:
    passed = sum(v.passed for v in verdicts)
    if passed == len(verdicts):
        return (
            f"\n{passed} of {passed} layouts match one process" if passed > 1 else "\nthis layout matches one process"
        )
    return "\n" + "\n".join(
        wrapped(f"FAIL: {', '.join(v.layout for v in verdicts if not v.passed)}", whole_words=False)
    )


def as_json(path: Path, verdicts: Sequence[Verdict]) -> str:
    """Return one JSON object. Errors that are NaN or infinite become null."""
    layouts = [
        dict(
            layout=v.layout,
            ranks=v.ranks,
            passed=v.passed,
            failure=v.failure or None,
            unproved=v.unproved,
            seconds=round(v.seconds, 2),
            metrics=v.outcome.metrics if v.outcome else None,
            worst={d.kind: _finite(d) for d in worst(v.distances)},
            distances=[_finite(d) for d in v.distances],
        )
        for v in verdicts
    ]
    return json.dumps(dict(config=str(path), passed=all(v.passed for v in verdicts), layouts=layouts), indent=1)


def _finite(distance: Distance) -> dict[str, Any]:
    values = asdict(distance) | dict(passed=distance.passed)
    return {
        key: None if isinstance(value, float) and not abs(value) < float("inf") else value
        for key, value in values.items()
    }
