"""GPU peaks from data sheets, for servers with eight GPUs."""

from __future__ import annotations

from dataclasses import dataclass

GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Gpu:
    """Peak rates of one GPU: dense TFLOP/s (half of the figure with sparsity), memory in GB/s, links in GB/s per
    direction.

    `network_gb_per_s` is one GPU's share of its server's network cards. `memory_gib` is the memory that CUDA reports,
    rounded down. `source` names the documents. `cuda_names` are the names that CUDA reports for GPUs with this peak in
    BF16.
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
_DGX = "8 x 400 Gb/s"
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            "a100",
            312,
            0,
            79,
            2039,
            300,
            25,
            "NVIDIA A100 80GB SXM data sheet; DGX A100 data sheet: 8 x 200 Gb/s",
            _A100,
        ),
        Gpu(
            *("h100", 989, 1979, 79, 3350, 450, 50, f"NVIDIA H100 SXM data sheet, 80 GB; DGX H100 data sheet: {_DGX}"),
            cuda_names=("NVIDIA H100 80GB HBM3",),
            hopper=True,
        ),
        Gpu(
            *(
                "h200",
                989,
                1979,
                139,
                4800,
                450,
                50,
                f"NVIDIA H200 SXM data sheet, 141 GB; DGX H200 data sheet: {_DGX}",
            ),
            cuda_names=("NVIDIA H200",),
            hopper=True,
        ),
        Gpu(
            *(
                "b200",
                2250,
                4500,
                178,
                8000,
                900,
                50,
                f"DGX B200 data sheet, an eighth of it: 1,440 GB, 64 TB/s; {_DGX}",
            ),
            cuda_names=("NVIDIA B200",),
            mxfp8=True,
        ),
    )
}


def bf16_tflops_of(cuda_name: str) -> float | None:
    """Return the dense BF16 peak of the GPU that CUDA calls `cuda_name`; None for a GPU without a row in `GPUS`.

    Only whole names match: an H100 with PCIe is slower than one with SXM.
    """
    return next((gpu.bf16_tflops for gpu in GPUS.values() if cuda_name in gpu.cuda_names), None)
