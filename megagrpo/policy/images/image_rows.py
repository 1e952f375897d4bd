"""Rows of images in a micro-batch: they replace embeddings, and are added to hidden states of the first decoder blocks.

A trained tower gets its gradients here. Recomputed blocks run a backward pass of their own, so blocks do not take the
rows from autograd's graph: each keeps its gradient, and the embedding passes all of them to the tower."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, eq=False)
class ImageRows:
    """The `rows` [1 + levels, n, H] of images and the indices `at` [n] int64 of their tokens among those of this rank.
    Rows of a trained tower require gradients, which are collected in `gradients` [1 + levels, n, H]."""

    at: Tensor
    rows: Tensor
    gradients: Tensor

    @classmethod
    def of(cls, at: Tensor, rows: Tensor) -> ImageRows:
        """Return the rows, with gradients of 0."""
        return cls(at, rows, torch.zeros_like(rows) if rows.requires_grad else rows.new_zeros(0))

    def level(self, level: int, dtype: torch.dtype) -> Tensor:
        """Return the rows [n, 1, H] of a level, without a graph."""
        return self.rows.detach()[level, :, None].to(dtype)

    def replace(self, embeddings: Tensor) -> Tensor:
        """Return embeddings [T, 1, H], or [T/tp, 1, H], with the rows of level 0 in place of those of image tokens."""
        replaced: Tensor = _Replaced.apply(embeddings, self.rows, self)
        return replaced

    def add(self, level: int, hidden: Tensor) -> Tensor:
        """Return hidden states [T, 1, H], or [T/tp, 1, H], with the rows of `level` added at image tokens."""
        added: Tensor = _Added.apply(hidden, self, level)
        return added


class _Replaced(torch.autograd.Function):
    """`ImageRows.replace`. Its backward pass follows those of all blocks."""

    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, rows: Tensor, images: ImageRows) -> Tensor:
        ctx.images = images
        return embeddings.index_copy(0, images.at, images.level(0, embeddings.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        images = ctx.images
        if images.rows.requires_grad:
            images.gradients[0] = grad[images.at, 0]
        return grad.index_fill(0, images.at, 0), images.gradients if images.rows.requires_grad else None, None


class _Added(torch.autograd.Function):
    """`ImageRows.add`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, images: ImageRows, level: int) -> Tensor:
        ctx.images, ctx.level = images, level
        return hidden.index_add(0, images.at, images.level(level, hidden.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        images = ctx.images
        if images.rows.requires_grad:
            images.gradients[ctx.level] = grad[images.at, 0]
        return grad, None, None
