"""GPU peaks from data sheets, for servers with eight GPUs, and the seconds of a layout's messages: bytes divided by the
rate of the link that they cross."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2
from typing import NamedTuple

from megagrpo.config import ParallelSection

GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Gpu:
    """Peak rates of a GPU: dense TFLOP/s (half the figure with sparsity), memory in GB/s, links in GB/s per direction.

    `network_gb_per_s` is one GPU's share of its server's network cards. `memory_gib` is the memory CUDA reports,
    rounded down. `source` names the documents. `cuda_names` are CUDA's names of GPUs with this BF16 peak.
    """

    name: str
    bf16_tflops: float
    fp8_tflops: float  # 0: the GPU has no FP8
    memory_gib: float
    memory_gb_per_s: float
    nvlink_gb_per_s: float
    network_gb_per_s: float
    source: str
    cuda_names: tuple[str, ...]
    mxfp8: bool = False  # supports MXFP8 (32 elements share a scale)
    hopper: bool = False  # can run the kernels of `train.fused_logprobs`


_A100 = ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe", "NVIDIA A100-PCIE-40GB")
_SOURCES = {
    "a100": "NVIDIA A100 80GB SXM data sheet; DGX A100 data sheet: 8 x 200 Gb/s",
    "h100": "NVIDIA H100 SXM data sheet, 80 GB; DGX H100 data sheet: 8 x 400 Gb/s",
    "h200": "NVIDIA H200 SXM data sheet, 141 GB; DGX H200 data sheet: 8 x 400 Gb/s",
    "b200": "DGX B200 data sheet, an eighth of it: 1,440 GB, 64 TB/s; 8 x 400 Gb/s",
}
_ROWS = (
    Gpu("a100", 312, 0, 79, 2039, 300, 25, _SOURCES["a100"], _A100),
    Gpu("h100", 989, 1979, 79, 3350, 450, 50, _SOURCES["h100"], ("NVIDIA H100 80GB HBM3",), hopper=True),
    Gpu("h200", 989, 1979, 139, 4800, 450, 50, _SOURCES["h200"], ("NVIDIA H200",), hopper=True),
    Gpu("b200", 2250, 4500, 178, 8000, 900, 50, _SOURCES["b200"], ("NVIDIA B200",), mxfp8=True),
)
GPUS = {gpu.name: gpu for gpu in _ROWS}


def bf16_tflops_of(cuda_name: str) -> float | None:
    """Return the dense BF16 peak of the GPU that CUDA calls `cuda_name`; None for a GPU without a row in `GPUS`.

    Only whole names match: an H100 with PCIe is slower than one with SXM.
    """
    return next((gpu.bf16_tflops for gpu in GPUS.values() if cuda_name in gpu.cuda_names), None)


LINK_EFFICIENCY = 0.7  # share of a link's peak that large messages reach
COLLECTIVE_SECONDS = 20e-6  # latency of one collective with a small message inside a node
HOST_GB_PER_S = 25.0  # between a GPU and host memory
HOP_SECONDS = 20e-6  # added each time the number of nodes doubles


@dataclass(frozen=True)
class Links:
    """Links between ranks. Ranks are numbered tp fastest, then cp, dp, pp; `GPUS_PER_NODE` neighbours share a node."""

    gpu: Gpu
    per_node: int = GPUS_PER_NODE

    def seconds(self, size: float, span: int) -> float:
        """Return the seconds to send `size` bytes from one rank within a group that spans `span` neighbouring ranks."""
        peak = self.gpu.nvlink_gb_per_s if span <= self.per_node else self.gpu.network_gb_per_s
        return size / (peak * 1e9 * LINK_EFFICIENCY)

    def reduce_scatter(self, size: float, group: int, stride: int = 1) -> float:
        """Return the seconds of a ring reduce-scatter or all-gather: `size` total bytes, `group` ranks `stride` apart.

        On several nodes every rank of a node has its own ring, over its own share of the network cards.
        """
        if group == 1:
            return 0.0
        return self.latency(group * stride) + self.seconds(size * (group - 1) / group, group * stride)

    def all_reduce(self, size: float, group: int) -> float:
        """Return the seconds of an all-reduce of a small message, as in decoding: both directions in one collective."""
        return 0.0 if group == 1 else self.latency(group) + 2 * self.seconds(size * (group - 1) / group, group)

    def latency(self, span: int) -> float:
        """Return the latency of a collective over a group spanning `span` neighbour ranks: a tree over its nodes."""
        return COLLECTIVE_SECONDS + HOP_SECONDS * log2(max(1, ceil(span / self.per_node)))

    def all_to_all(self, size: float, group: int, stride: int = 1) -> float:
        """Return an all-to-all's seconds: every rank sends an equal part of its `size` bytes to each rank and itself.

        Parts for ranks of the same node cross NVLink, the others the network.
        """
        if group == 1:
            return 0.0
        near = min(group, max(1, self.per_node // stride))
        inside = self.seconds(size * (near - 1) / group, 1)
        outside = self.seconds(size * (group - near) / group, self.per_node + 1)
        return self.latency(group * stride) + max(inside, outside)


class Messages(NamedTuple):
    """Seconds of decoder layers' messages in a forward pass, by axis."""

    tp: float
    cp: float
    experts: float


def layer_messages(
    links: Links, p: ParallelSection, size: float, tokens: float, kv_size: float, sent: float
) -> Messages:
    """Return seconds of one decoder layer's messages in a forward pass, for `tokens` tokens of a context-parallel rank.

    A token's hidden state has `size` bytes; its keys and values, for a rank's own heads, have `kv_size`. `sent` is the
    number of rows per token that go to experts (`hidden_messages.sent_rows`), 0 in a layer without experts.

    Tensor parallelism gathers and scatters tokens around attention and MLP (Korthikanti et al. 2022, arXiv 2205.05198).
    Context parallelism passes keys and values around, expert parallelism sends tokens to experts and back.
    """
    around = 2 * links.reduce_scatter(tokens * size, p.tp)
    ring = links.reduce_scatter(tokens * p.cp * kv_size, p.cp, p.tp)
    if not sent:
        return Messages(2 * around, ring, 0.0)
    own = tokens / p.tp * sent * size
    experts = 2 * links.all_to_all(own, p.ep, p.expert_tp) + 2 * links.reduce_scatter(own * p.expert_tp, p.expert_tp)
    return Messages(around, ring, experts)
