"""The FP8 settings of a model: the recipe, and which elements of a matrix share a scale under it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megagrpo.config import ModelSection
from megagrpo.platform import device
from megagrpo.policy.fp8.rounding import E4M3, E5M2, Tile

# elements along the summed dim that share a scale; None: all
BLOCKS = {"tensorwise": None, "blockwise": 128, "mxfp8": 32}


@dataclass(frozen=True)
class Fp8:
    """The FP8 settings of a model."""

    recipe: str  # as in `model.fp8_recipe`
    hybrid: bool  # gradients are e5m2
    bf16_layers: frozenset[int] = frozenset()  # decoder layers without FP8, counted from 0
    keeps_weights: bool = False  # weights stay in FP8 between steps

    @classmethod
    def of(cls, model: ModelSection, num_layers: int) -> Fp8 | None:
        """Return the config's FP8 settings for a model with `num_layers` decoder layers; None without FP8.

        Raises ValueError for a layer that the model does not have.
        """
        if model.fp8_recipe == "none":
            return None
        if wrong := [i for i in model.bf16_layers if not -num_layers <= i < num_layers]:
            problem = (
                f"{wrong[0]} is out of range: the model has {num_layers} layers; use -{num_layers} to {num_layers - 1}"
            )
            raise ValueError(f"model.bf16_layers: {problem}")
        return cls(
            model.fp8_recipe,
            model.fp8_recipe == "tensorwise",  # a tensor with one scale needs the range
            frozenset(i % num_layers for i in model.bf16_layers),
            model.fp8_param,
        )

    def megatron_config(self) -> dict[str, Any]:
        """Return the Megatron settings that select this recipe in Transformer Engine; `keep_in_bf16` sets the rest.

        Without Transformer Engine it is empty, and `quantise_linears` emulates the recipe. Raises ValueError when this
        GPU does not support the recipe.
        """
        if problem := device.fp8_problem(self.recipe):
            raise ValueError(
                f"model.fp8_recipe: {self.recipe} does not run here: {problem}; choose none or another recipe"
            )
        if not device.has_transformer_engine():
            return {}
        fields: dict[str, Any] = dict(fp8="hybrid" if self.hybrid else "e4m3", fp8_recipe=self.recipe)
        fields |= dict(fp8_param=True) if self.keeps_weights else {}
        return fields

    @property
    def gradients(self) -> torch.dtype:
        """The FP8 dtype of gradients."""
        return E5M2 if self.hybrid else E4M3

    def tile(self, shape: torch.Size, dim: int, square: bool = False) -> Tile:
        """Return the (rows, columns) of a matrix of `shape` that share a scale in a product that sums over `dim`.

        `square`: a weight, whose tiles are square in recipe `blockwise`.
        """
        block = BLOCKS[self.recipe]
        if block is None:
            return shape[0], shape[1]
        other = block if square and self.recipe == "blockwise" else 1
        return (block, other) if dim == 0 else (other, block)

    @property
    def powers_of_two(self) -> bool:
        """Whether scales are powers of two."""
        return BLOCKS[self.recipe] is not None
