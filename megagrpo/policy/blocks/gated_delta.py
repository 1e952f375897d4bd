"""Gated DeltaNet (arXiv 2412.06464), the linear attention of Qwen3-Next and Qwen3.5, in plain torch for packs.

Each head keeps a state [key width, value width]. A token lets it decay, replaces what the state returns for its key by
its value, and reads it with its query. Parameters, their sharding and checkpoint keys are megatron-core's; its own
forward pass needs Triton kernels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net import common
from megatron.core.ssm.gated_delta_net.gdn import GatedDeltaNet as MegatronGatedDeltaNet
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from torch import Tensor

from megagrpo.policy.attention.ulysses import CHUNK, over_sequences
from megagrpo.policy.layers.elementwise import rms_norm

L2_EPS = 1e-6  # in the norm of queries and keys
common.HAVE_FLA = True  # megatron-core builds the layer only with its Triton kernels, which only its own forward uses


class GatedDeltaNet(MegatronGatedDeltaNet):
    """megatron-core's layer with a forward pass in plain torch."""

    def _setup_variant_attrs(self) -> None:
        super()._setup_variant_attrs()
        self.gated_delta_rule = gated_delta_rule

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.out_norm.weight.sequence_parallel = False  # `_mix` sums its gradient over the tensor-parallel ranks

    def reset_parameters(self) -> None:
        """Initialise decays and steps as megatron-core does, in the model's dtype, which may be float64."""
        if self.config.perform_initialization:
            with get_cuda_rng_tracker().fork():
                self.dt_bias.data.fill_(1.0)
                self.A_log.data.uniform_(*self.A_init_range).log_()

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (output, bias) of hidden states: packed [T/cp, 1, H], or plain [L, S, H]."""
        projected, _bias = self.in_proj(hidden_states)
        if packed_seq_params is None:
            mixed = self._mix(projected.transpose(0, 1)).transpose(0, 1)
        else:
            parts = projected.squeeze(1).split(self.in_proj_split_sections, -1)
            owned = torch.cat([part.unflatten(-1, (self.cp_size, -1)) for part in parts], -1)
            mixed = over_sequences(self._mix, owned, packed_seq_params, self.pg_collection.cp).unsqueeze(1)
        return self.out_proj(mixed)

    def _mix(self, projected: Tensor) -> Tensor:
        """Return [S, L, heads * value width] of the projections [S, L, width] of right-padded sequences."""
        sizes = [size // self.cp_size for size in self.in_proj_split_sections]
        *qkv, gate, beta, step = projected.split(sizes, -1)
        query, key, value = self._convolve(torch.cat(qkv, -1)).split(sizes[:3], -1)
        query, key = (x.unflatten(-1, (-1, self.key_head_dim)) for x in (query, key))
        value, gate = (x.unflatten(-1, (-1, self.value_head_dim)) for x in (value, gate))
        wide = torch.promote_types(projected.dtype, torch.float32)
        log_decay = -self._own(self.A_log).to(wide).exp() * F.softplus(step.to(wide) + self._own(self.dt_bias))
        mixed = gated_delta_rule(query, key, value, log_decay, beta.sigmoid())
        weight = copy_to_tensor_model_parallel_region(self.out_norm.weight, group=self.pg_collection.tp)
        normed = rms_norm(mixed, weight, self.config.layernorm_epsilon)
        return (normed * F.silu(gate.to(wide))).to(projected.dtype).flatten(-2)

    def _convolve(self, qkv: Tensor) -> Tensor:
        """Return the causal convolution of each channel of [S, L, channels] over its own past, after SiLU."""
        sections = [self.qk_dim_local_tp, self.qk_dim_local_tp, self.v_dim_local_tp]
        weight = torch.cat([self._own(part) for part in self.conv1d.weight.split(sections)])
        past = F.pad(qkv.transpose(1, 2), (self.conv_kernel_dim - 1, 0))
        return F.silu(F.conv1d(past, weight, groups=weight.shape[0])).transpose(1, 2)

    def _own(self, parameter: Tensor) -> Tensor:
        """Return the part of a parameter, sharded by heads, of this context-parallel rank's heads."""
        return parameter.chunk(self.cp_size)[self.pg_collection.cp.rank()]


def gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """Return the outputs [S, L, h, v], in float32 at least, of the recurrence, chunk by chunk.

    query, key [S, L, k, d] are normalised here; a head of key and query serves h / k neighbouring heads of value
    [S, L, h, v]. `log_decay` and `beta` are [S, L, h]. With decay a = exp(log_decay), and state M that starts at 0:
    M <- a M + beta key (value - a M^T key)^T, output = M^T query / sqrt(d).

    Within a chunk the replaced values solve a unit triangular system (arXiv 2406.06484, section 3.3), so that only the
    state goes from chunk to chunk.
    """
    length, heads, wide = value.shape[1], value.shape[2], torch.promote_types(value.dtype, torch.float32)
    query, key = (_normed(x.to(wide)).repeat_interleave(heads // x.shape[2], 2) for x in (query, key))
    query = query * key.shape[-1] ** -0.5
    # [S, h, chunks, CHUNK, ...]; zeros behind the last token change neither outputs nor state
    query, key, value, log_decay, beta = (
        F.pad(x.to(wide).transpose(1, 2).unflatten(-1, (-1, 1)) if x.dim() == 3 else x.to(wide).transpose(1, 2),
              (0, 0, 0, -length % CHUNK)).unflatten(2, (-1, CHUNK))
        for x in (query, key, value, log_decay, beta)
    )  # fmt: skip
    # [..., CHUNK, 1], since the start of the chunk; in float64, because neighbours' small difference is needed below
    since = log_decay.double().cumsum(-2)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=since.device).triu(1)
    between = (since - since.mT).to(wide).masked_fill(later, -torch.inf).exp()  # from token j to token i >= j
    decay, last = since.to(wide).exp(), (since[..., -1:, :] - since).to(wide).exp()
    system = (beta * key @ key.mT * between).tril(-1)
    known = torch.cat((beta * value, beta * key * decay), -1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    values, keys = solved.split((value.shape[-1], key.shape[-1]), -1)
    scores, reading, writing = query @ key.mT * between, query * decay, (key * last).mT
    state, outputs = value.new_zeros(*value.shape[:2], key.shape[-1], value.shape[-1]), []
    for chunk in range(value.shape[2]):
        replaced = values[:, :, chunk] - keys[:, :, chunk] @ state
        outputs.append(reading[:, :, chunk] @ state + scores[:, :, chunk] @ replaced)
        state = state * decay[:, :, chunk, -1:] + writing[:, :, chunk] @ replaced
    return torch.cat(outputs, 2)[:, :, :length].transpose(1, 2)


def _normed(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()
