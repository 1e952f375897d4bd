"""Measures the distance between a layout's outcome and the outcome of one process, and sets its tolerance."""

from __future__ import annotations

from dataclasses import dataclass

from megagrpo.proof.verify.verified_step import Outcome, relative_error

# Tolerance between two float32 computations, relative to the size of the quantity. The order of float32 sums moves it
# by 1e-8 to 3e-6;
# the mildest fault we know moves a gradient by 1e-2.
FLOAT32 = {
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
# it may always be ROUNDING away.
NOISE, ROUNDING = 3.0, 2.0**-7
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
        return FLOAT32[kind]
    return max(FLOAT32[kind], NOISE * max(noise, ROUNDING if coarse else 0.0))


def distances(outcome: Outcome, expected: Outcome) -> dict[tuple[str, str], float]:
    """Return (kind, name) -> relative difference. Raises ValueError when the two outcomes do not hold the same
    quantities."""
    errors: dict[tuple[str, str], float] = {}
    for name, ours, theirs in _pairs("metrics", outcome.metrics, expected.metrics):
        # An extreme over tokens is only as exact as a log-prob, not as a mean.
        kind = {"loss": "loss", "grad_norm": "gradient norm"}.get(
            name, "log-prob" if name in expected.extremes else "metric"
        )
        errors[kind, name] = abs(ours - theirs) / max(abs(theirs), SMALLEST)
    if outcome.logprobs.shape != expected.logprobs.shape:
        raise ValueError(
            f"this layout has {outcome.logprobs.numel()} loss tokens, but one process has {expected.logprobs.numel()}"
        )
    if expected.logprobs.numel():
        largest = expected.logprobs.abs().max().item()
        errors["log-prob", "policy"] = (outcome.logprobs - expected.logprobs).abs().max().item() / max(largest, 1.0)
    pairs = ("gradient", outcome.gradients, expected.gradients), ("next weight", outcome.weights, expected.weights)
    for kind, tensors, reference in pairs:
        for name, tensor, whole in _pairs(f"{kind}s", tensors, reference):
            errors[kind, name] = relative_error(tensor, whole)
    errors["replica", "largest"] = outcome.disagreement
    errors["padding", "largest"] = outcome.padding
    return errors


def _pairs[T](what: str, values: dict[str, T], expected: dict[str, T]) -> list[tuple[str, T, T]]:
    if odd := sorted(values.keys() ^ expected.keys()):
        raise ValueError(f"{what} that only this layout or only one process has: {', '.join(odd)}")
    return [(name, values[name], value) for name, value in expected.items()]


def worst(distances: list[Distance]) -> list[Distance]:
    """Return, for each kind, the distance that uses most of its tolerance, in the order of FLOAT32."""
    by_kind = [[d for d in distances if d.kind == kind] for kind in FLOAT32]
    return [max(same, key=lambda d: d.excess) for same in by_kind if same]


def silent_tensors(outcome: Outcome) -> list[str]:
    """Return tensors without a gradient, about which the comparison proves nothing."""
    return [name for name, gradient in outcome.gradients.items() if not gradient.norm() > 0]
