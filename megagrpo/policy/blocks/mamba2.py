"""Mamba-2 (arXiv 2405.21060), the recurrent part of Granite 4 and Nemotron-H, in plain torch for packs.

Each head keeps a state [head width, state width]. A token lets it decay, adds its input times its B, and reads it with
its C. Names of parameters and checkpoint keys are those of megatron-core's MambaMixer, which needs GPU kernels.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megagrpo.families.shared.recurrence import Mamba2 as Sizes
from megagrpo.policy.attention.ulysses import CHUNK, over_sequences
from megagrpo.policy.blocks.mixer import Mixer

SEGMENT = 2048  # tokens that are computed at once; their states are computed again in the backward pass
STEPS = (1e-3, 0.1)  # range of the steps of a new model


class GroupNorm(nn.Module):
    """RMSNorm of each of this rank's `groups`, after the gate. Several ranks share one group if `group_ranks` > 1."""

    def __init__(self, width: int, groups: int, eps: float, like: dict[str, Any], tp_group: Any, group_ranks: int):
        super().__init__()
        self.groups, self.eps, self.tp_group, self.group_ranks = groups, eps, tp_group, group_ranks
        self.weight = nn.Parameter(torch.ones(width, **like))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return the normed x * silu(gate) [..., width] in x's dtype, which is wide."""
        x = (x * F.silu(gate.to(x.dtype))).unflatten(-1, (self.groups, -1))
        square = x.square().mean(-1, keepdim=True)
        if self.group_ranks > 1:
            total = reduce_from_tensor_model_parallel_region(square, group=self.tp_group)
            square = copy_to_tensor_model_parallel_region(total, group=self.tp_group) / self.group_ranks
        return (x * (square + self.eps).rsqrt()).flatten(-2) * self.weight

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Return the weight, sharded over tensor-parallel ranks."""
        groups = dict(tp_group=self.tp_group, dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"])
        state = self.state_dict(keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets, **groups)


class Gate(nn.Module):
    """The gate of an output without a norm."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return x * silu(gate) [..., width] in x's dtype, which is wide."""
        return x * F.silu(gate.to(x.dtype))


class Mamba2(Mixer):
    """The mixer of megatron-core's MambaLayer.

    Tensor-parallel ranks share the heads. If they divide the groups, each rank has its heads' groups. Else the model
    has one group: ranks share the rows of its B and C, and gather them after the convolution.
    """

    checkpoint_names: ClassVar[dict[str, str]] = {
        "conv1d_weight": "conv1d.weight",
        "conv1d_bias": "conv1d.bias",
    }  # as MambaMixer's

    def __init__(
        self, config: TransformerConfig, submodules: MambaMixerSubmodules, sizes: Sizes, pg_collection: Any, **_: Any
    ):
        super().__init__(config, submodules, sizes, pg_collection)
        tp = self.tp_group.size()
        self.shares_groups = sizes.groups % tp > 0
        like: dict[str, Any] = dict(dtype=config.params_dtype, device=torch.cuda.current_device())
        channels, heads = sum(self._channels), self.rows["dt"]
        self.conv1d_weight = nn.Parameter(torch.empty(channels, 1, sizes.kernel, **like))
        self.conv1d_bias = nn.Parameter(torch.empty(channels, **like)) if sizes.conv_bias else None
        self.dt_bias, self.A_log, self.D = (nn.Parameter(torch.empty(heads, **like)) for _ in range(3))
        groups, ranks = (1, tp) if self.shares_groups else (sizes.groups // tp, 1)
        norm = (self.rows["z"], groups, config.layernorm_epsilon, like, self.tp_group, ranks)
        self.norm = GroupNorm(*norm) if sizes.normed else Gate()
        for parameter in (*self.parameters(recurse=False), *self.norm.parameters()):
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        if config.perform_initialization:
            self._initialise()

    @property
    def _channels(self) -> tuple[int, int, int]:
        """Rows of x, B and C on this tensor-parallel rank, which the convolution sees."""
        return self.rows["x"], self.rows["B"], self.rows["C"]

    @torch.no_grad()
    def _initialise(self) -> None:
        with get_cuda_rng_tracker().fork():
            bound = self.sizes.kernel**-0.5
            for name, parameter in self.named_parameters(recurse=False):
                if name.startswith("conv1d"):
                    parameter.uniform_(-bound, bound)
            step = torch.empty_like(self.dt_bias).uniform_(*map(math.log, STEPS)).exp()
            self.dt_bias.copy_(step + (-torch.expm1(-step)).log())  # the inverse of softplus
            self.A_log.uniform_(1, 16).log_()
            self.D.fill_(1.0)

    def forward(
        self, hidden_states: Tensor, packed_seq_params: PackedSeqParams | None = None, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return (output, bias) of hidden states: packed [T/cp, 1, H], or plain [L, S, H]."""
        projected, _bias = self.in_proj(hidden_states)
        gate, *parts = projected.split([*self.rows.values()], -1)
        if self.sizes.scales:
            gate, *parts = (part * scale for part, scale in zip((gate, *parts), self.sizes.scales, strict=True))
        owned = self._by_head_owner(parts)
        if packed_seq_params is None:
            mixed = self._mix(owned.squeeze(-2).transpose(0, 1)).transpose(0, 1)
        else:
            mixed = over_sequences(self._mix, owned.squeeze(1), packed_seq_params, self.cp_group).unsqueeze(1)
        # only its inputs are kept, in float32
        normed = checkpoint(self.norm, mixed, gate, use_reentrant=False, preserve_rng_state=False)
        return self.out_proj(normed.to(hidden_states.dtype))

    def _by_head_owner(self, parts: list[Tensor]) -> Tensor:
        """Return [..., cp, width]: x and dt of the heads of each context-parallel rank, and B and C for all of them."""
        x, b, c, dt = parts
        cp = self.cp_group.size()
        x, dt = (part.unflatten(-1, (cp, -1)) for part in (x, dt))
        b, c = (part.unsqueeze(-2).expand(*part.shape[:-1], cp, -1) for part in (b, c))
        return torch.cat((x, b, c, dt), -1)

    def _mix(self, parts: Tensor) -> Tensor:
        """Return [S, L, heads * width], wide, of the x, B, C and dt [S, L, rows] of right-padded sequences."""
        cp, (x_rows, b_rows, c_rows) = self.cp_group.size(), self._channels
        sizes, heads = (x_rows // cp, b_rows, c_rows), self.rows["dt"] // cp
        convolved, step = parts.split((sum(sizes), heads), -1)
        x, b, c = self._convolve(convolved, sizes).split(sizes, -1)
        wide = torch.promote_types(parts.dtype, torch.float32)
        step = F.softplus(step.to(wide) + self._own(self.dt_bias))
        x = x.unflatten(-1, (heads, -1))
        b, c = self._of_heads(torch.cat((b, c), -1), heads).chunk(2, -1)
        decay = -self._own(self.A_log).to(wide).exp()
        mixed = state_space(x, step, decay, b, c)
        return (mixed + self._own(self.D).to(wide)[:, None] * x).flatten(-2)

    def _convolve(self, past: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Return the causal convolution of each channel of [S, L, channels] over its own past, after SiLU."""
        weight = self._own_channels(self.conv1d_weight)
        bias = None if self.conv1d_bias is None else self._own_channels(self.conv1d_bias)
        padded = F.pad(past.transpose(1, 2), (self.sizes.kernel - 1, 0))
        return F.silu(F.conv1d(padded, weight, bias, groups=sum(sizes))).transpose(1, 2)

    def _of_heads(self, both: Tensor, heads: int) -> Tensor:
        """Return [S, L, groups, 2 * state width]: B beside C of the groups of this rank's `heads`, from its rows of B
        and C [S, L, rows]."""
        groups = self.sizes.groups // self.tp_group.size()
        if self.shares_groups:
            ranks = self.tp_group.size()
            both = gather_from_tensor_model_parallel_region(both, group=self.tp_group)
            both = copy_to_tensor_model_parallel_region(both, group=self.tp_group)
            both, groups = both.unflatten(-1, (ranks, 2, -1)).transpose(-3, -2).flatten(-2).flatten(-2), 1
        each = self.rows["dt"] // groups  # heads of a group
        first, count = heads * self.cp_group.rank() // each, max(1, heads // each)
        return both.unflatten(-1, (2, groups, -1)).transpose(-3, -2).flatten(-2)[:, :, first : first + count]

    def _own_channels(self, parameter: Tensor) -> Tensor:
        """Return the rows of a parameter of the convolution for this context-parallel rank's x, and for B and C."""
        x, b, c = parameter.split(self._channels)
        return torch.cat((self._own(x), b, c))

    def _own(self, parameter: Tensor) -> Tensor:
        """Return the part of a parameter, sharded by heads, of this context-parallel rank's heads."""
        return parameter.chunk(self.cp_group.size())[self.cp_group.rank()]

    def parts(self) -> dict[str, dict[str, int]]:
        """Return the rows of each part of the parameters that hold several."""
        convolved = dict(zip("xBC", self._channels, strict=True))
        names = [name for name in self.checkpoint_names if getattr(self, name) is not None]
        return super().parts() | dict.fromkeys(names, convolved)


def state_space(x: Tensor, step: Tensor, decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return the outputs [S, L, h, p], in float32 at least, of the recurrence.

    x [S, L, h, p], step [S, L, h], decay [h] < 0; b and c [S, L, g, n] are for h / g neighbouring heads. With state M
    [p, n] that starts at 0: M <- exp(step decay) M + step x b^T, output = M c.
    """
    wide, outputs = torch.promote_types(x.dtype, torch.float32), []
    for some in zip(*(t.split(max(1, SEGMENT // x.shape[1])) for t in (x, step, b, c)), strict=True):
        state, in_turn = (
            x.new_zeros(len(some[0]), b.shape[2], x[0, 0].numel() // b.shape[2], b.shape[3], dtype=wide),
            [],
        )
        for segment in zip(*(t.split(SEGMENT, 1) for t in some), strict=True):
            output, state = checkpoint(_segment, *segment, decay, state, use_reentrant=False, preserve_rng_state=False)
            in_turn.append(output)
        outputs.append(torch.cat(in_turn, 1))
    return torch.cat(outputs)


def _segment(x: Tensor, step: Tensor, b: Tensor, c: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of a segment of the sequences, chunk by chunk, from the state [S, g, heads of a group p, n]
    before it, and the state after it."""
    length, groups, wide = x.shape[1], b.shape[2], state.dtype
    x, step, b, c = (F.pad(t.to(wide).transpose(1, -1), (0, -length % CHUNK)).transpose(1, -1) for t in (x, step, b, c))
    # [S, g, chunks, CHUNK, heads of a group, ...]; zeros behind the last token change neither outputs nor state
    x, step, log_decay = (
        t.unflatten(1, (-1, CHUNK)).unflatten(3, (groups, -1)).movedim(3, 1)
        for t in ((step[..., None] * x), step, step * decay)
    )
    b, c = (t.unflatten(1, (-1, CHUNK)).movedim(3, 1) for t in (b, c))  # [S, g, chunks, CHUNK, n]
    # [S, g, chunks, heads, CHUNK, 1], since the start of the chunk; in float64, because neighbours' small difference is
    # needed below
    since = log_decay.double().cumsum(3).transpose(3, 4)[..., None]
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=x.device).triu(1)
    between = (since - since.mT).to(wide).masked_fill(later, -torch.inf).exp()  # from token j to token i >= j
    within = ((c @ b.mT)[:, :, :, None] * between) @ x.transpose(3, 4)  # [S, g, chunks, heads, CHUNK, p]
    first, last = since.to(wide).exp(), (since[..., -1:, :] - since).to(wide).exp()
    added = (x * last.transpose(3, 4)).flatten(4).mT @ b  # [S, g, chunks, heads p, n]
    states = []
    for chunk in range(added.shape[2]):
        states.append(state)
        kept = first[:, :, chunk, :, -1:].expand(-1, -1, -1, x.shape[-1], -1).flatten(2, 3)
        state = state * kept + added[:, :, chunk]
    read = (c @ torch.stack(states, 2).mT).unflatten(-1, (-1, x.shape[-1]))  # [S, g, chunks, CHUNK, heads, p]
    outputs = within.transpose(3, 4) + read * first.transpose(3, 4)
    return outputs.movedim(1, 3).flatten(3, 4).flatten(1, 2)[:, :length], state
