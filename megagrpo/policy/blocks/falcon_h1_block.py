"""Factors on the parts of a block, as in Falcon-H1, and Mamba-2 beside the attention of a block."""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megagrpo.families.shared.architecture import BesideAttention
from megagrpo.policy.layers.elementwise import swiglu


def beside_mixer(base: Any, factors: BesideAttention, mixer: ModuleSpec) -> Any:
    """Return a subclass of `base`, Megatron's attention, with the `mixer` beside it: both read the normed input of the
    block, and their outputs, times their factors, are added."""

    class WithMixer(base):
        def __init__(self, config: TransformerConfig, *args: Any, pg_collection: Any, **kwargs: Any):
            super().__init__(config, *args, pg_collection=pg_collection, **kwargs)
            self.mixer = build_module(mixer, config=config, pg_collection=pg_collection)

        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
            """Return (output [T, 1, H], no bias) of the normed hidden states [T, 1, H]."""
            attended, bias = super().forward(hidden_states * factors.attention_in, *args, **kwargs)
            assert bias is None, "a bias beside the output would not be scaled"
            packed = dict(packed_seq_params=kwargs.get("packed_seq_params"))
            mixed, _ = self.mixer(hidden_states * factors.mixer_in, **packed)
            return attended * factors.attention_out + mixed * factors.mixer_out, None

    return WithMixer


@functools.cache
def scaled_mlp(base: Any, gate: float, output: float) -> Any:
    """Return a subclass of `base`, Megatron's MLP, with factors on its gate projection and its output."""

    class ScaledMLP(base):
        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
            """Return (output [T, 1, H], no bias) of the hidden states [T, 1, H]."""
            gates, ups = self.linear_fc1(hidden_states)[0].chunk(2, -1)
            down, _ = self.linear_fc2(swiglu(torch.cat((gates * gate, ups), -1)))
            return down * output, None

    return ScaledMLP
