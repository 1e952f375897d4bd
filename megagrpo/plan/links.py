"""Seconds that the messages of one layout take: bytes over the link that they have to cross."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from megagrpo.config import ParallelSection
from megagrpo.plan.gpus import GPUS_PER_NODE, Gpu

LINK_EFFICIENCY = 0.7  # share of a link's peak that large messages get
COLLECTIVE_SECONDS = 20e-6  # to start one collective, and for a small message to get through it inside of a node
HOST_GB_PER_S = 25.0  # between a GPU and the host's memory
HOP_SECONDS = 20e-6  # more for each time that the number of nodes doubles


@dataclass(frozen=True)
class Links:
    """Ranks are numbered tp fastest, then cp, dp, pp, and `GPUS_PER_NODE` neighbours share a node."""

    gpu: Gpu
    per_node: int = GPUS_PER_NODE

    def seconds(self, size: float, span: int) -> float:
        """To send `size` bytes from one rank to others of a group that reaches over `span` neighbouring ranks."""
        peak = self.gpu.nvlink_gb_per_s if span <= self.per_node else self.gpu.network_gb_per_s
        return size / (peak * 1e9 * LINK_EFFICIENCY)

    def reduce_scatter(self, size: float, group: int, stride: int = 1) -> float:
        """Or an all-gather, of `size` bytes altogether over `group` ranks that stand `stride` apart, as a ring. On several nodes every
        rank of a node has such a ring, over its own share of the network cards."""
        if group == 1:
            return 0.0
        return self.latency(group * stride) + self.seconds(size * (group - 1) / group, group * stride)

    def all_reduce(self, size: float, group: int) -> float:
        """Of a small message, as in decoding: there and back in one collective."""
        return 0.0 if group == 1 else self.latency(group) + 2 * self.seconds(size * (group - 1) / group, group)

    def latency(self, span: int) -> float:
        """Of a collective over a group that reaches over `span` neighbouring ranks: a tree over its nodes."""
        return COLLECTIVE_SECONDS + HOP_SECONDS * log2(max(1, ceil(span / self.per_node)))

    def all_to_all(self, size: float, group: int, stride: int = 1) -> float:
        """Every rank of the group has `size` bytes and sends an equal part to each, itself included: to those of its own node over NVLink,
        to the others over the network."""
        if group == 1:
            return 0.0
        near = min(group, max(1, self.per_node // stride))
        inside = self.seconds(size * (near - 1) / group, 1)
        outside = self.seconds(size * (group - near) / group, self.per_node + 1)
        return self.latency(group * stride) + max(inside, outside)


def layer_seconds(links: Links, p: ParallelSection, size: float, tokens: float, kv_size: float, sent: float) -> float:
    """Messages of one decoder layer's forward pass for `tokens` tokens of a context-parallel rank, whose hidden states have `size` bytes
    each and whose keys and values, a rank's own heads, `kv_size`; `sent` is the experts that each token goes to, 0 in a layer without.

    Tensor parallelism gathers and scatters the tokens around attention and around the MLP (Korthikanti et al. 2022, arXiv 2205.05198);
    context parallelism passes keys and values round; expert parallelism sends each token to its experts and back.
    """
    around = 2 * links.reduce_scatter(tokens * size, p.tp)
    total = around + links.reduce_scatter(tokens * p.cp * kv_size, p.cp, p.tp)
    if not sent:
        return total + around
    own = tokens / p.tp * sent * size
    return total + 2 * links.all_to_all(own, p.ep, p.expert_tp) + 2 * links.reduce_scatter(own * p.expert_tp, p.expert_tp)
