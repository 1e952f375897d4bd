"""Floating-point operations of a model, two for each product with its sum. Whole model, all ranks together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megagrpo.config import ParallelSection
from megagrpo.families.config import HfConfig
from megagrpo.plan.shapes import expert_parameters, stage_parameters


@dataclass(frozen=True)
class TokenFlops:
    """Forward pass of one token: through the blocks' linears outside of experts, through its experts, through the LM head."""

    dense: float
    experts: float
    head: float

    @property
    def blocks(self) -> float:
        return self.dense + self.experts


@lru_cache(maxsize=64)
def token_flops(model: HfConfig) -> TokenFlops:
    """2 FLOPs for each parameter that a token meets (Kaplan et al. 2020, arXiv 2001.08361, table 1). Looking up its embedding is free."""
    alone = ParallelSection()
    used = expert_parameters(model) * model.experts.per_token / model.experts.count if model.experts else 0
    embedding = model.padded_vocab(1) * model.hidden_size
    dense = stage_parameters(model, alone)[0] - embedding * (1 if model.tied_embeddings else 2)
    return TokenFlops(2 * dense, 2 * used, 2 * embedding)


@lru_cache(maxsize=1024)
def attention_flops(model: HfConfig, length: float) -> float:
    """Forward pass of causal attention in one sequence of `length` tokens: half of the scores' square, or the window's band of it."""
    total = 0.0
    for layer in range(model.num_layers):
        window = min(model.window(layer) or length, length)
        pairs = window * length - window * window / 2
        total += 2 * pairs * model.num_heads * (model.head_dim + model.value_dim)
    return total


def model_flops(model: HfConfig, prompt: float, response: float, frozen: bool = False) -> float:
    """Forward and backward pass of one sample, the backward one taken as two forward ones, nothing recomputed: what MFU counts (Chowdhery
    et al. 2022, arXiv 2204.02311, appendix B), with the LM head for response tokens alone. `frozen` weights have no gradients of their own,
    as below adapters, whose own products are nothing."""
    flops = token_flops(model)
    products = (prompt + response) * flops.blocks + response * flops.head
    return (2 if frozen else 3) * products + 3 * attention_flops(model, prompt + response)
