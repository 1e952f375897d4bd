"""Floating-point operations of the whole model, over all ranks. A multiplication with its addition counts as two."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from megagrpo.config import ParallelSection
from megagrpo.families.hf_config import HfConfig
from megagrpo.planner.costs.shapes import expert_parameters, stage_parameters

if TYPE_CHECKING:  # numpy is slow to import, and the command line needs this module's callers
    import numpy as np


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs of one token's forward pass: the blocks' linears without experts (`dense`), experts, and the LM head."""

    dense: float
    experts: float
    head: float

    @property
    def blocks(self) -> float:
        return self.dense + self.experts


@lru_cache(maxsize=64)
def token_flops(model: HfConfig) -> TokenFlops:
    """Return 2 FLOPs per parameter a token uses (Kaplan et al. 2020, arXiv 2001.08361, table 1). Embedding is free."""
    alone = ParallelSection()
    used = expert_parameters(model) * model.experts.per_token / model.experts.count if model.experts else 0
    embedding = model.padded_vocab(1) * model.hidden_size
    dense = stage_parameters(model, alone)[0] - embedding * (1 if model.tied_embeddings else 2)
    return TokenFlops(2 * dense, 2 * used, 2 * embedding)


@lru_cache(maxsize=1024)
def attention_flops(model: HfConfig, length: float) -> float:
    """Return the FLOPs of causal attention's forward pass over one sequence of `length` tokens: half of the score
    square, or the window's band."""
    total = length * _recurrent_flops(model)
    for window, layers in _windows(model):
        total += layers * _band_flops(model, length, min(window or length, length))
    return total


def _windows(model: HfConfig) -> list[tuple[int | None, int]]:
    """Return each width of an attention window, None for whole attention, with its number of layers. The keys that an
    indexer chooses count as a window, its scores do not count."""
    layers = [layer for layer in range(model.num_layers) if model.has_attention(layer)]
    if model.indexer:
        return [(model.indexer.keys, len(layers))]
    return list(Counter(map(model.window, layers)).items())


def _recurrent_flops(model: HfConfig) -> int:
    """Return the FLOPs of a token in all recurrent parts, without projections."""
    recurrence = model.recurrence
    return 0 if recurrence is None else len(recurrence.blocks) * recurrence.flops


def _band_flops[T: (float, np.ndarray)](model: HfConfig, length: T, seen: T) -> T:
    """Return the FLOPs of one layer's attention over `length` tokens, of which each sees at most `seen`."""
    return 2 * (seen * length - seen * seen / 2) * model.num_heads * (model.head_dim + model.value_dim)


def model_flops(model: HfConfig, prompt: float, response: float, frozen: bool = False, together: float = 1.0) -> float:
    """Return the FLOPs of one sample's forward and backward pass, without recompute, as MFU counts them.

    The backward pass counts as two forward passes (Chowdhery et al. 2022, arXiv 2204.02311, appendix B), the LM head
    for response tokens only. `frozen` base weights, below adapters, have no gradients; adapter FLOPs are ignored.
    A prompt that `together` responses share is computed once, so the sample has 1 / `together` of its FLOPs.
    """
    flops = token_flops(model)
    products = (prompt / together + response) * flops.blocks + response * flops.head
    return (2 if frozen else 3) * products + 3 * sample_attention(model, prompt, response, together)


def sample_attention(model: HfConfig, prompt: float, response: float, together: float = 1.0) -> float:
    """Return the FLOPs of attention's forward pass over one sample, with 1 / `together` of those of its prompt alone.

    Each response sees its whole prompt, shared or not.
    """
    return attention_flops(model, prompt + response) - (1 - 1 / together) * attention_flops(model, prompt)


def step_flops(model: HfConfig, spans: np.ndarray, num_loss: int, frozen: bool = False) -> float:
    """Return the FLOPs of one optimizer step's forward and backward pass over all ranks, counted as in `model_flops`.

    `spans` [n, 2] and `num_loss` are the fields of `ComputedTokens`. A prompt that several samples share counts once,
    because it is computed once. Recompute, a router's pass of its own and padding do not count.
    """
    flops = token_flops(model)
    products = int((spans[:, 1] - spans[:, 0]).sum()) * flops.blocks + num_loss * flops.head
    attention = float((spans[:, 1] - spans[:, 0]).sum()) * _recurrent_flops(model)
    for window, layers in _windows(model):
        starts, stops = (_band_flops(model, column, column.clip(max=window)) for column in spans.T)
        attention += layers * float((stops - starts).sum())
    return (2 if frozen else 3) * products + 3 * attention
