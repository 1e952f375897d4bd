"""Low-rank adapters on Megatron's parallel linears (LoRA, Hu et al. 2021, arXiv 2106.09685): y = W x + scale B A x with W frozen.

Every Hugging Face projection has an A [rank, in] and a B [out, rank] of its own, also where Megatron keeps several in one linear; a fused
one (qkv, gate_up) has one A and one B, whose rows lie as those of Megatron's linear. Where a linear is cut by its output (q, k, v, gate,
up), B is cut like it and every rank holds A; where it is cut by its input (o, down), A is cut and every rank holds B. What crosses ranks
between the two has `rank` columns instead of the model's width.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megagrpo.device  # noqa: F401  (prepares the platform before megatron is imported)
from megagrpo.config import LoraSection
from megagrpo.families.config import HfConfig, projections

from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, get_cuda_rng_tracker  # isort: skip
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, reduce_from_tensor_model_parallel_region  # isort: skip
from megatron.core.tensor_parallel import reduce_scatter_to_sequence_parallel_region  # isort: skip
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes  # isort: skip
from megatron.core.tensor_parallel.random import get_data_parallel_rng_tracker_name  # isort: skip
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory  # isort: skip
from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint  # isort: skip
from megatron.core.utils import unwrap_model  # isort: skip

Names = dict[str, tuple[str, ...]]  # linear -> the projections in it
ADAPTER = "adapter"  # the module below a linear that holds its adapters; no other parameter has this in its name


def attach_adapters(chunks: Sequence[nn.Module], hf_config: HfConfig, lora: LoraSection, recompute: str) -> None:
    """Freeze the bare chunks and give the projections that `lora` names adapters in the weights' dtype, uninitialised.

    Experts get none: each expert of a block would need its own, and a mixture's blocks then only have those of the attention.
    """
    names = projections(hf_config)
    for chunk in chunks:
        chunk.requires_grad_(False)
        for layer in chunk.decoder.layers:
            attention, mlp = getattr(layer, "self_attention", None), getattr(layer, "mlp", None)
            for linear, parts, groups in (*_of_attention(attention, names), *_of_mlp(mlp, names)):
                if wanted := [name for name in parts if name in lora.projections]:
                    column = linear.weight.partition_dim == 0
                    _attach(linear, (ColumnAdapter if column else RowAdapter)(linear, parts, groups, wanted, lora))
        if recompute == "full" and chunk.pre_process:
            # A recomputed block has a backward pass only if its input has one, and nothing before the first block is trained.
            chunk.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_(torch.is_grad_enabled()))


def _of_attention(attention: nn.Module | None, names: Names) -> list[tuple[nn.Module, dict[str, int], int]]:
    """(linear, rows of each projection in one group of its output, groups on this rank) of every linear."""
    if not hasattr(attention, "linear_qkv"):
        return []
    config: TransformerConfig = attention.config
    head, queries = config.kv_channels, config.num_attention_heads // config.num_query_groups
    groups = config.num_query_groups // config.tensor_model_parallel_size
    inputs = _rows(names["self_attention.linear_qkv"], (queries * head, head, head))
    outputs = _rows(names["self_attention.linear_proj"], (config.hidden_size,))
    return [(attention.linear_qkv, inputs, groups), (attention.linear_proj, outputs, 1)]


def _of_mlp(mlp: nn.Module | None, names: Names) -> list[tuple[nn.Module, dict[str, int], int]]:
    if not hasattr(mlp, "linear_fc1"):
        return []
    config: TransformerConfig = mlp.config
    width = config.ffn_hidden_size // config.tensor_model_parallel_size
    inputs, outputs = _rows(names["mlp.linear_fc1"], (width, width)), _rows(names["mlp.linear_fc2"], (config.hidden_size,))
    return [(mlp.linear_fc1, inputs, 1), (mlp.linear_fc2, outputs, 1)]


def _rows(names: tuple[str, ...], rows: tuple[int, ...]) -> dict[str, int]:
    """Rows of each projection; all of them are those of the one that holds everything."""
    return dict(zip(names, rows, strict=True)) if len(names) == len(rows) else {names[0]: sum(rows)}


def _attach(linear: nn.Module, adapter: nn.Module) -> None:
    linear.adapter = adapter
    linear.__class__ = _adapted(type(linear))


@functools.cache
def _adapted(linear: type) -> type:
    return type(f"Adapted{linear.__name__}", (Adapted, linear), {})


class Adapted:
    """A parallel linear with `adapter` beside it."""

    def forward(self, input_: Tensor, *args, **kwargs):
        output, bias = super().forward(input_, *args, **kwargs)
        return output + self.adapter(input_), bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        own = self.adapter.state_dict(prefix=f"{ADAPTER}.", keep_vars=True)
        axes = {name: value.partition_dim for name, value in own.items() if value.tensor_model_parallel}
        options = dict(tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"])
        whole = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        made = make_sharded_tensors_for_checkpoint(own, prefix, axes, sharded_offsets, **options)
        if (key := f"{prefix}{ADAPTER}.gate_up_proj.lora_B") in made:  # a rank's rows of the gate above its rows of the up projection
            made[key] = apply_swiglu_sharded_factory(made[key], sharded_offsets)
        return whole | made


class LowRank(nn.Module):
    """A and B of one projection, as far as this rank holds them. `cut` says along which dimension A and B are cut, None for whole."""

    def __init__(self, linear: nn.Module, rows: int, cut: tuple[int | None, int | None], rank: int):
        super().__init__()
        weight, config = linear.weight, linear.config
        self.lora_A = nn.Parameter(weight.new_empty(rank, weight.shape[1]))
        self.lora_B = nn.Parameter(weight.new_empty(rows, rank))
        for parameter, dim in zip((self.lora_A, self.lora_B), cut, strict=True):
            set_tensor_model_parallel_attributes(parameter, dim is not None, -1 if dim is None else dim, 1)
            # Each tensor-parallel rank saw a part of the sequence: finalize_model_grads sums the gradient over them.
            parameter.sequence_parallel = config.sequence_parallel and dim is None


class _Adapter(nn.ModuleDict):
    """What the adapters of one linear have in common. They share one dropout mask."""

    def __init__(self, linear: nn.Module, parts: dict[str, int], groups: int, wanted: Sequence[str], cut: tuple, lora: LoraSection):
        super().__init__({name: LowRank(linear, parts[name] * groups, cut, lora.rank) for name in wanted})
        self.parts, self.groups, self.scale, self.dropout = parts, groups, lora.scale, lora.dropout
        self.tp_group, self.sequence_parallel = linear.tp_group, linear.config.sequence_parallel

    def drop(self, x: Tensor, cut: bool) -> Tensor:
        """Dropout, the same on all tensor-parallel ranks unless each of them holds another part of `x`."""
        if not self.dropout or not self.training:
            return x
        with get_cuda_rng_tracker().fork(*([] if cut else [get_data_parallel_rng_tracker_name()])):
            return F.dropout(x, self.dropout)


class ColumnAdapter(_Adapter):
    """Of a linear that is cut by its output, in which `parts` lie side by side within each of `groups`."""

    def __init__(self, linear: nn.Module, parts: dict[str, int], groups: int, wanted: Sequence[str], lora: LoraSection):
        super().__init__(linear, parts, groups, wanted, (None, 0), lora)

    def forward(self, x: Tensor) -> Tensor:
        down = F.linear(self.drop(x, cut=self.sequence_parallel), torch.cat([part.lora_A for part in self.values()]))
        if self.sequence_parallel:
            down = gather_from_sequence_parallel_region(down, tensor_parallel_output_grad=True, group=self.tp_group)
        else:
            down = copy_to_tensor_model_parallel_region(down, group=self.tp_group)
        inputs = dict(zip(self.keys(), down.chunk(len(self), dim=-1), strict=True))
        rows = [self._part(name, inputs.get(name), down) for name in self.parts]
        return self.scale * torch.cat(rows, dim=-1).flatten(-2)

    def _part(self, name: str, down: Tensor | None, like: Tensor) -> Tensor:
        """[..., groups, rows in a group]: what projection `name` adds; 0 where it has no adapter."""
        shape = (*like.shape[:-1], self.groups, self.parts[name])
        return like.new_zeros(shape) if down is None else F.linear(down, self[name].lora_B).view(shape)


class RowAdapter(_Adapter):
    """Of a linear that is cut by its input."""

    def __init__(self, linear: nn.Module, parts: dict[str, int], groups: int, wanted: Sequence[str], lora: LoraSection):
        super().__init__(linear, parts, groups, wanted, (1, None), lora)

    def forward(self, x: Tensor) -> Tensor:
        (part,) = self.values()
        reduce = reduce_scatter_to_sequence_parallel_region if self.sequence_parallel else reduce_from_tensor_model_parallel_region
        down = reduce(F.linear(self.drop(x, cut=True), part.lora_A), group=self.tp_group)
        return self.scale * F.linear(down, part.lora_B)


def adapters(chunks: Sequence[nn.Module]) -> Iterator[_Adapter]:
    """The adapters of all linears of this rank."""
    for chunk in chunks:
        yield from (module for module in unwrap_model(chunk).modules() if isinstance(module, _Adapter))


def is_adapter(name: str) -> bool:
    """Whether `name` is that of an adapter's parameter."""
    return f".{ADAPTER}." in name


@contextlib.contextmanager
def without_dropout(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Adapters drop nothing inside."""
    found = list(adapters(chunks))
    for adapter in found:
        adapter.eval()
    try:
        yield
    finally:
        for adapter in found:
            adapter.train()
