"""Predicts the seconds of a layout's messages: bytes divided by the rate of the link that they cross."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from megagrpo.config import ParallelSection
from megagrpo.proof.plan.gpu_specs import GPUS_PER_NODE, Gpu

LINK_EFFICIENCY = 0.7  # share of a link's peak that large messages reach
COLLECTIVE_SECONDS = 20e-6  # latency of one collective with a small message inside a node
HOST_GB_PER_S = 25.0  # between a GPU and host memory
HOP_SECONDS = 20e-6  # added each time the number of nodes doubles


@dataclass(frozen=True)
class Links:
    """The links between ranks. Ranks are numbered tp fastest, then cp, dp, pp; `GPUS_PER_NODE` neighbours share a
    node."""

    gpu: Gpu
    per_node: int = GPUS_PER_NODE

    def seconds(self, size: float, span: int) -> float:
        """Return the seconds to send `size` bytes from one rank within a group that spans `span` neighbouring ranks."""
        peak = self.gpu.nvlink_gb_per_s if span <= self.per_node else self.gpu.network_gb_per_s
        return size / (peak * 1e9 * LINK_EFFICIENCY)

    def reduce_scatter(self, size: float, group: int, stride: int = 1) -> float:
        """Return the seconds of a ring reduce-scatter or all-gather of `size` bytes in total over `group` ranks that
        are `stride` apart.

        On several nodes every rank of a node has its own ring, over its own share of the network cards.
        """
        if group == 1:
            return 0.0
        return self.latency(group * stride) + self.seconds(size * (group - 1) / group, group * stride)

    def all_reduce(self, size: float, group: int) -> float:
        """Return the seconds of an all-reduce of a small message, as in decoding: both directions in one collective."""
        return 0.0 if group == 1 else self.latency(group) + 2 * self.seconds(size * (group - 1) / group, group)

    def latency(self, span: int) -> float:
        """Return the latency of a collective over a group that spans `span` neighbouring ranks: a tree over its
        nodes."""
        return COLLECTIVE_SECONDS + HOP_SECONDS * log2(max(1, ceil(span / self.per_node)))

    def all_to_all(self, size: float, group: int, stride: int = 1) -> float:
        """Return the seconds of an all-to-all: every rank has `size` bytes and sends an equal part to each rank, itself
        included.

        Parts for ranks of the same node cross NVLink, the others the network.
        """
        if group == 1:
            return 0.0
        near = min(group, max(1, self.per_node // stride))
        inside = self.seconds(size * (near - 1) / group, 1)
        outside = self.seconds(size * (group - near) / group, self.per_node + 1)
        return self.latency(group * stride) + max(inside, outside)


def layer_seconds(links: Links, p: ParallelSection, size: float, tokens: float, kv_size: float, sent: float) -> float:
    """Return the seconds of one decoder layer's messages in a forward pass, for `tokens` tokens of a context-parallel
    rank.

    A token's hidden state has `size` bytes; its keys and values, for a rank's own heads, have `kv_size`. `sent` is the
    number of experts per token, 0 in a layer without experts.

    Tensor parallelism gathers and scatters the tokens around attention and around the MLP (Korthikanti et al. 2022,
    arXiv 2205.05198). Context parallelism passes keys and values around. Expert parallelism sends each token to its
    experts and back.
    """
    around = 2 * links.reduce_scatter(tokens * size, p.tp)
    total = around + links.reduce_scatter(tokens * p.cp * kv_size, p.cp, p.tp)
    if not sent:
        return total + around
    own = tokens / p.tp * sent * size
    return (
        total + 2 * links.all_to_all(own, p.ep, p.expert_tp) + 2 * links.reduce_scatter(own * p.expert_tp, p.expert_tp)
    )
