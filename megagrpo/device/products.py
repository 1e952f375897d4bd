"""Sums of matrix products in a wider dtype on a CPU."""

from __future__ import annotations

import torch

BLOCK_ELEMENTS = 2**20  # of a product that is added while it is in the cache


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Compute total += left right in place, `total` [n, m] in float32, `left` [n, k] and `right` [k, m] in a narrower dtype.

    Blocks of rows are multiplied, rounded to the narrower dtype and added. torch would convert a whole rounded product to float32 first.
    """
    step = max(1, BLOCK_ELEMENTS // total.shape[1])
    for start in range(0, total.shape[0], step):
        rows = slice(start, start + step)
        total[rows] += left[rows] @ right


class WeightGradients:
    """Stands in for apex's module `fused_weight_gradient_mlp_cuda`, with which Megatron's linears add a weight gradient to its sum."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
        """Add grad_output^T inputs to `main_grad` [n, k] float32, of `inputs` [T, k] and `grad_output` [T, n]."""
        add_product(main_grad, grad_output.t(), inputs)
