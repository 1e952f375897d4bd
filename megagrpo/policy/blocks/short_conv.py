"""Gated short convolutions (LFM2, arXiv 2511.23404) in plain torch for packs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megagrpo.families.shared.recurrence import ShortConv as Sizes
from megagrpo.policy.attention.ulysses import over_sequences
from megagrpo.policy.blocks.mixer import Mixer


class ShortConv(Mixer):
    """The mixer of megatron-core's MambaLayer. Ranks share the channels."""

    def __init__(
        self, config: TransformerConfig, submodules: MambaMixerSubmodules, sizes: Sizes, pg_collection: Any, **_: Any
    ):
        super().__init__(config, submodules, sizes, pg_collection)
        self.channels = self.rows["x"]
        like: dict[str, Any] = dict(dtype=config.params_dtype, device=torch.cuda.current_device())
        self.conv1d_weight = nn.Parameter(torch.empty(self.channels, 1, sizes.kernel, **like))
        set_tensor_model_parallel_attributes(self.conv1d_weight, is_parallel=True, dim=0, stride=1)
        if config.perform_initialization:
            with torch.no_grad(), get_cuda_rng_tracker().fork():
                self.conv1d_weight.uniform_(-(sizes.kernel**-0.5), sizes.kernel**-0.5)

    def forward(
        self, hidden_states: Tensor, packed_seq_params: PackedSeqParams | None = None, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return (output, bias) of hidden states: packed [T/cp, 1, H], or plain [L, S, H]."""
        projected, _bias = self.in_proj(hidden_states)
        b, c, x = projected.split(self.channels, -1)
        gated = b * x
        if packed_seq_params is None:
            mixed = self._convolve(gated.transpose(0, 1)).transpose(0, 1)
        else:
            owned = gated.squeeze(1).unflatten(-1, (self.cp_group.size(), -1))
            mixed = over_sequences(self._convolve, owned, packed_seq_params, self.cp_group).unsqueeze(1)
        return self.out_proj(c * mixed)

    def _convolve(self, gated: Tensor) -> Tensor:
        """Return the causal convolution of each of this rank's channels of [S, L, channels] over its own past."""
        weight = self.conv1d_weight.chunk(self.cp_group.size())[self.cp_group.rank()]
        past = F.pad(gated.transpose(1, 2), (self.sizes.kernel - 1, 0))
        return F.conv1d(past, weight, groups=weight.shape[0]).transpose(1, 2)
