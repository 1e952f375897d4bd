"""Measures the distance between a layout's outcome and the outcome of one process, sets its tolerance, and shows the
results of `megagrpo verify` as text and as JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from megagrpo.config import RunConfig
from megagrpo.families.hf_config import HfConfig
from megagrpo.platform import device
from megagrpo.platform.process.terminal import WIDTH, wrapped
from megagrpo.proof.verify.verified_step import Outcome, relative_error
from megagrpo.train_types import TrainSample

# Tolerance between two float32 computations, relative to the size of the quantity. The order of float32 sums moves it
# by 1e-8 to 3e-6;
# the mildest fault we know moves a gradient by 1e-2.
FLOAT32_TOLERANCES = {
    "loss": 1e-6,
    "log-prob": 2e-6,
    "metric": 1e-6,
    "gradient norm": 1e-5,
    "gradient": 1e-5,
    "next weight": 1e-5,
    "replica": 1e-5,  # ranks that hold the same part of a tensor
    "padding": 0.0,  # gradient of the vocabulary's padding
}
# Other precisions and devices round more, by amounts that differ between tensors. These are measured: the distance of
# one process in the same precision from one process in float32. A layout may be NOISE times as far; in bfloat16 and FP8
# it may always be BFLOAT16_ROUNDING away.
NOISE, BFLOAT16_ROUNDING = 3.0, 2.0**-7
_LAYER = re.compile(r"\d+")  # in a parameter's name
SMALLEST = 1.0  # below this, losses and metrics (in nats or shares) are compared absolutely


@dataclass(frozen=True)
class Distance:
    """The error of one quantity and its tolerance. NaN never passes."""

    kind: str
    name: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance

    @property
    def excess(self) -> float:
        """Error over tolerance, to sort distances of different kinds; infinite for NaN."""
        if self.error != self.error:
            return float("inf")
        return self.error / self.tolerance if self.tolerance else (float("inf") if self.error else 0.0)


def compare(
    outcome: Outcome, expected: Outcome, rounded: Outcome | None = None, coarse: bool = False
) -> list[Distance]:
    """Return the distance of every quantity of `outcome` from `expected`, one process in float32.

    `rounded` is one process in the precision and on the device of `outcome`, if these differ: it measures the effect of
    rounding alone. Raises ValueError when the outcomes hold different quantities.
    """
    noise = distances(rounded, expected) if rounded is not None else {}
    return [
        Distance(kind, name, error, _tolerance(kind, noise.get((kind, name)), coarse))
        for (kind, name), error in distances(outcome, expected).items()
    ]


def _tolerance(kind: str, noise: float | None, coarse: bool) -> float:
    if noise is None or kind == "padding":
        return FLOAT32_TOLERANCES[kind]
    return max(FLOAT32_TOLERANCES[kind], NOISE * max(noise, BFLOAT16_ROUNDING if coarse else 0.0))


def distances(outcome: Outcome, expected: Outcome) -> dict[tuple[str, str], float]:
    """Return (kind, name) -> relative difference. Raises ValueError when the outcomes hold different quantities."""
    errors: dict[tuple[str, str], float] = {}
    for name, ours, theirs in _pairs("metrics", outcome.metrics, expected.metrics):
        # An extreme over tokens is only as exact as a log-prob, not as a mean.
        other = "log-prob" if name in expected.extremes else "metric"
        kind = {"loss": "loss", "grad_norm": "gradient norm"}.get(name, other)
        errors[kind, name] = abs(ours - theirs) / max(abs(theirs), SMALLEST)
    if outcome.logprobs.shape != expected.logprobs.shape:
        counts = outcome.logprobs.numel(), expected.logprobs.numel()
        raise ValueError(f"this layout has {counts[0]} loss tokens, but one process has {counts[1]}")
    if expected.logprobs.numel():
        largest = expected.logprobs.abs().max().item()
        errors["log-prob", "policy"] = (outcome.logprobs - expected.logprobs).abs().max().item() / max(largest, 1.0)
    pairs = ("gradient", outcome.gradients, expected.gradients), ("next weight", outcome.weights, expected.weights)
    for kind, tensors, reference in pairs:
        for name, tensor, whole in _pairs(f"{kind}s", tensors, reference):
            errors[kind, name] = _tensor_error(name, tensor, whole, reference)
    errors["replica", "largest"] = outcome.disagreement
    errors["padding", "largest"] = outcome.padding
    return errors


def _tensor_error(name: str, tensor: Tensor, whole: Tensor, expected: dict[str, Tensor]) -> float:
    """Return the relative error of a tensor. One number is compared with the norm of its parameter over all layers: its
    gradient sums over all elements, and in one layer the sum may cancel to nearly 0, where only rounding is left."""
    if whole.numel() != 1:
        return relative_error(tensor, whole)
    of_layers = [value for other, value in expected.items() if _LAYER.sub("", other) == _LAYER.sub("", name)]
    size = torch.stack([value.norm() for value in of_layers]).norm().item()
    return (tensor - whole).norm().item() / max(size, torch.finfo(torch.float64).tiny)


def _pairs[T](what: str, values: dict[str, T], expected: dict[str, T]) -> list[tuple[str, T, T]]:
    if odd := sorted(values.keys() ^ expected.keys()):
        raise ValueError(f"{what} that only this layout or only one process has: {', '.join(odd)}")
    return [(name, values[name], value) for name, value in expected.items()]


def worst(distances: list[Distance]) -> list[Distance]:
    """Return, for each kind, the distance that uses most of its tolerance, in the order of FLOAT32_TOLERANCES."""
    by_kind = [[d for d in distances if d.kind == kind] for kind in FLOAT32_TOLERANCES]
    return [max(same, key=lambda d: d.excess) for same in by_kind if same]


def silent_tensors(outcome: Outcome) -> list[str]:
    """Return tensors without a gradient, about which the comparison proves nothing."""
    return [name for name, gradient in outcome.gradients.items() if not gradient.norm() > 0]


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
    """Return a text with its numbers at the right edge. A long text is wrapped, its numbers behind the last part."""
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
        subject = f"{passed} of {passed} layouts match" if passed > 1 else "this layout matches"
        return f"\n{subject} one process"
    failed = ", ".join(v.layout for v in verdicts if not v.passed)
    return "\n" + "\n".join(wrapped(f"FAIL: {failed}", whole_words=False))


def as_row(v: Verdict) -> dict[str, Any]:
    """Return a verdict as plain data. Errors that are NaN or infinite become None."""
    return dict(
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


def _finite(distance: Distance) -> dict[str, Any]:
    values = asdict(distance) | dict(passed=distance.passed)
    infinite = {key for key, value in values.items() if isinstance(value, float) and not abs(value) < float("inf")}
    return {key: None if key in infinite else value for key, value in values.items()}
