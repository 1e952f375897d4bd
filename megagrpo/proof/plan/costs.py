"""What the operations of a traced step cost: FLOPs, bytes, kernel launches, messages and memory, by phase. Needs no
torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

PHASES = ("forward", "head", "backward", "reduce", "optimizer")
KINDS = ("products", "experts", "attention", "elementwise")


@dataclass(frozen=True)
class Kernel:
    """One launch on the device: its phase, its kind of `KINDS`, FLOPs, and bytes that it reads and writes."""

    phase: str
    kind: str
    flops: float
    bytes: float


@dataclass(frozen=True)
class Message:
    """One collective or message: its phase, operation, bytes of the larger side on this rank, and ranks of its
    group."""

    phase: str
    operation: str
    bytes: float
    ranks: int


@dataclass
class Costs:
    """The launches and messages of a piece of work, each with the number of times it occurs, and the host's waits by
    phase."""

    kernels: Counter[Kernel] = field(default_factory=Counter)
    messages: Counter[Message] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)

    def plus(self, other: Costs, times: float = 1) -> Costs:
        """Return these costs and `times` the other ones. A negative `times` subtracts; counts stay exact."""
        kernels, messages = _sum(self.kernels, other.kernels, times), _sum(self.messages, other.messages, times)
        return Costs(kernels, messages, _sum(self.waits, other.waits, times))

    def total(self, what: str, phase: str | None = None, kind: str | None = None) -> float:
        """Return the sum of `flops` or `bytes`, or the number of `launches`, of one phase and kind or of all."""
        chosen = ((k, n) for k, n in self.kernels.items() if phase in (None, k.phase) and kind in (None, k.kind))
        return sum(n * (1 if what == "launches" else getattr(k, what)) for k, n in chosen)


def _sum[T](one: Mapping[T, float], other: Mapping[T, float], times: float) -> Counter[T]:
    made: Counter[T] = Counter(one)
    for key, count in other.items():
        made[key] += count * times  # type: ignore[assignment]
    return Counter({key: count for key, count in made.items() if count})


@dataclass(frozen=True)
class Trace:
    """A traced step of one rank: the `fixed` costs of a step, the costs of `each` micro-batch, and the bytes at the
    memory peak by the phase that allocated them.

    `tokens` is the number of tokens of a micro-batch, `loss_tokens` the number of them in the loss.
    """

    fixed: Costs
    each: Costs
    peak: Mapping[str, float]
    tokens: int
    loss_tokens: int

    def step(self, micro_batches: float) -> Costs:
        """Return the costs of a step with this many micro-batches."""
        return self.fixed.plus(self.each, micro_batches)
