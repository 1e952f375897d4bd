"""Predicts what `train.overlap` and `parallel.expert_dispatcher` save: an overlap hides the smaller of two times, that
of the messages and that of the computation beside them. What both lose by sharing a GPU is not counted.

Which computation is beside which message follows megatron-core 0.19.2: `TransformerLayerSchedulePlan.run` (experts),
`_RegisterDelayedWgradForExperts` (weight_gradients), `MoEAlltoAllTokenDispatcher` (shared_experts), Transformer
Engine's userbuffers (tp). DeepEP and HybridEP send a token once to each rank with one of its experts
(`is_token_in_rank` of `Buffer.dispatch`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import prod

from megagrpo.config import ParallelSection, RunConfig
from megagrpo.config.rules.overlap_rules import OVERLAPS, refusals
from megagrpo.families.hf_config import HfConfig
from megagrpo.planner.costs.flops import token_flops


@dataclass(frozen=True)
class Direction:
    """Seconds of the forward or the backward pass of some micro-batches on a rank.

    `linears` and `experts` are products outside and inside experts, `computing` all computation, `tp` messages of
    tensor parallelism, `sent` the experts' all-to-alls.
    """

    linears: float
    experts: float
    computing: float
    tp: float
    sent: float


@dataclass(frozen=True)
class Overlap:
    """What can overlap in an optimizer step of `micro_batches`: both directions of its passes. `step_times` adds the
    all-gather of weights (`param_gather`)."""

    config: RunConfig
    model: HfConfig
    forward: Direction
    backward: Direction
    micro_batches: float

    def gains(self) -> dict[str, float]:
        """Return the seconds that each overlap hides, or would hide, in addition to the config's other ones; only
        overlaps that config and model do not exclude."""
        on = set(self.config.train.overlap)
        refused = {n for n in OVERLAPS if any(refusals(self.config, n)) or refused_by_model(n, self.model)}
        possible = [name for name in OVERLAPS if name in on or name not in refused]
        return {name: sum(self.hidden_by(on | {name})) - sum(self.hidden_by(on - {name})) for name in possible}

    def hidden_by(self, names: Collection[str]) -> tuple[float, float]:
        """Return the seconds of messages, (forward, backward), that these overlaps hide together."""
        f, b, shared = self.forward, self.backward, self._shared
        ahead = back = 0.0
        if "tp" in names:
            ahead, back = min(f.tp, f.linears), min(b.tp, b.linears)
        recomputed = self.config.model.recompute == "full"
        weights = b.experts / (3 if recomputed else 2)  # beside input gradients, and the products of a recomputation
        if "experts" in names:
            delayed = weights if "weight_gradients" in names else 0.0
            ahead += self._steady * (min(f.sent / 2, b.computing - b.experts) + min(f.sent / 2, b.experts - delayed))
            back += self._steady * (min(b.sent / 2, f.computing - f.experts) + min(b.sent / 2, f.experts + delayed))
        else:
            beside = shared * b.linears if "shared_experts" in names else 0.0
            if "weight_gradients" in names:
                beside += min(b.sent / (4 if recomputed else 2), weights)
            ahead += min(f.sent, shared * f.linears) if "shared_experts" in names else 0.0
            back += min(b.sent, beside)
        return ahead, back

    @property
    def _steady(self) -> float:
        """The share of micro-batches whose forward pass has the backward pass of another beside it, on the first
        stage."""
        p = self.config.parallel
        warm = 1 if p.pp == 1 else 2 * (p.pp - 1) + (p.vpp - 1) * p.pp + 1
        return max(0.0, 1 - warm / (self.micro_batches * p.vpp))

    @property
    def _shared(self) -> float:
        """The shared experts' part of the products outside routed experts."""
        experts = self.model.experts
        if experts is None:
            return 0.0
        return 6 * self.model.hidden_size * experts.shared_size * len(experts.blocks) / token_flops(self.model).dense


def refused_by_model(name: str, model: HfConfig) -> str:
    """Return why the overlap `name` cannot run with this model; empty if it can."""
    if name in ("experts", "weight_gradients", "shared_experts") and not model.experts:
        return f"{model.family} has no experts"
    if name in ("experts", "weight_gradients") and model.mlp_blocks is not None:
        return f"it runs attention and experts of a block in turn, and a block of {model.family} has one of them"
    if name == "experts" and (model.block_scales or model.residual_scale != 1):
        return f"Megatron's combined schedule leaves out the factors on outputs of {model.family}"
    if name == "shared_experts" and not model.mixture.shared_size:
        return f"{model.family} has no shared experts"
    if name == "shared_experts" and model.mixture.beside_mlp:
        return f"the shared experts of {model.family} have norms of their own"
    # Megatron switches `tp` off for the whole model at the first linear whose name Transformer Engine does not know.
    if name == "tp" and model.mla:
        return f"Transformer Engine cannot overlap {model.family}'s latent attention"
    return ""


def sent_rows(p: ParallelSection, model: HfConfig) -> float:
    """Return the rows that a token sends to expert-parallel ranks: one per expert with `alltoall`, else one per rank
    that has one of its experts, with experts chosen at random."""
    experts = model.mixture
    if p.expert_dispatcher == "alltoall":
        return experts.per_token
    elsewhere = experts.count - experts.count // p.ep
    return p.ep * (1 - prod((elsewhere - i) / (experts.count - i) for i in range(experts.per_token)))


def overlap_row(config: RunConfig, model: HfConfig, gains: dict[str, float]) -> list[tuple[str, str]]:
    """Return the plan's row about overlaps, none if nothing can overlap: `gains` are the seconds of `Overlap.gains`."""
    chosen = config.train.overlap
    parts = [f"{name} hides {gains.get(name, 0.0):.2f} s" for name in chosen]
    parts += [f"{name} is off and would hide {gain:.2f}" for name, gain in gains.items() if name not in chosen and gain]
    parts += [f"dispatcher {config.parallel.expert_dispatcher}"] if model.experts else []
    return [("overlap", ", ".join(parts))] if parts else []
