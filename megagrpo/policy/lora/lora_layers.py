"""Low-rank adapters on Megatron's linears (LoRA, Hu et al. 2021, arXiv 2106.09685): y = W x + scale B A x, W frozen.

Every Hugging Face projection has its own A [rank, in] and B [out, rank], even where Megatron fuses several in one
linear. A projection fused in the files (qkv, gate_up) has one A and one B, with rows in Megatron's order.

Column-parallel linears (q, k, v, gate, up) shard B along its output and replicate A. With more tensor-parallel ranks
than KV heads q, k and v replicate B too. Row-parallel linears (o, down) shard A along its input and replicate B.
Activations that cross ranks have `rank` columns, not the model's width.
The linears of latent attention whose weight is whole on every rank have whole adapters.
Experts are sharded alike over their own tensor-parallel ranks, and no activation of their adapters crosses ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_data_parallel_rng_tracker_name
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import MoETransformerLayer
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from megagrpo.config import LoraSection
from megagrpo.families.hf_config import HfConfig
from megagrpo.families.shared.blocks import qkv_segments
from megagrpo.policy.attention.latent_attention import WholeLinear
from megagrpo.policy.layers.megatron_modules import layers_of, mix_in
from megagrpo.policy.layers.scalar_head import SCALAR_HEAD

ADAPTER_MODULE = "adapter"  # submodule of a linear that holds its adapters; no other parameter has this in its name


def attach_adapters(chunks: Sequence[nn.Module], hf_config: HfConfig, lora: LoraSection, recompute: str) -> None:
    """Freeze the bare chunks, except a scalar head, and add uninitialised adapters in the weights' dtype to the linears
    that `lora` names."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_(name == SCALAR_HEAD)
        for layer in layers_of([chunk]):
            modules = hf_config.modules((layer.layer_number - 1) // hf_config.layers_per_block)
            for linear, names in ((_find(layer, key), names) for key, names in modules.items()):
                if linear is not None and (wanted := [_projection(name) for name in names if lora.adapts(name)]):
                    kind, mixin = _kinds(linear)
                    parts, groups = _rows(linear, [_projection(name) for name in names], hf_config)
                    if not groups:  # fewer KV heads than ranks
                        kind, groups = SplitGroupsAdapter, linear.config.num_query_groups
                    linear.adapter = kind(linear, parts, groups, wanted, lora)
                    linear.adapter.sections = {name: _sections(linear, name, hf_config) for name in wanted}
                    mix_in(linear, mixin)
            _attach_to_experts(layer, hf_config, lora)
        bare = not any(parameter.requires_grad for parameter in chunk.parameters())
        if (recompute == "full" or bare) and chunk.pre_process:
            # Recompute runs a block's backward pass only if its input requires a gradient, and a pipeline stage needs
            # outputs that do. Nothing before the first block is trained.
            embedding: Any = chunk.embedding
            embedding.register_forward_hook(
                lambda module, inputs, output: output.requires_grad_(torch.is_grad_enabled())
            )


def _attach_to_experts(layer: Any, hf_config: HfConfig, lora: LoraSection) -> None:
    """Add adapters to each expert of a layer with experts. gate_up_proj has one A and one B, as in PEFT."""
    if not isinstance(layer, MoETransformerLayer):
        return
    for key, name in hf_config.expert_parameters((layer.layer_number - 1) // hf_config.layers_per_block).items():
        if lora.adapts_experts(name):
            for expert in layer.mlp.experts.local_experts:
                linear = getattr(expert, key)
                rows, wanted = {_projection(name): linear.weight.shape[0]}, [_projection(name)]
                kind = ExpertColumnAdapter if linear.weight.partition_dim == 0 else ExpertRowAdapter
                linear.adapter = kind(linear, rows, 1, wanted, lora)
                for parameter in linear.adapter.parameters():
                    # of the experts' buffers and optimizer, as the expert's weights are (`prepare_experts`)
                    parameter.allreduce = parameter.sequence_parallel = False
                mix_in(linear, Adapted)


def _find(layer: nn.Module, key: str) -> Any:
    """Return the linear `key` of a hybrid layer, such as mlp.linear_fc1; None if the layer has none of this name."""
    found: Any = layer
    for part in key.split("."):
        found = getattr(found, part, None)
    return found


def _kinds(linear: Any) -> tuple[type[_Adapter], type]:
    if isinstance(linear, WholeLinear):
        return WholeAdapter, AdaptedWhole
    return (ColumnAdapter if linear.weight.partition_dim == 0 else RowAdapter), Adapted


def _projection(module: str) -> str:
    return module.rpartition(".")[2]


def _sections(linear: Any, name: str, hf_config: HfConfig) -> dict[str, int]:
    """Return the rows on this rank of each part of an input projection of a recurrence; empty for others."""
    sections = {} if hf_config.recurrence is None else hf_config.recurrence.sections(name)
    return {part: rows // linear.config.tensor_model_parallel_size for part, rows in sections.items()}


def _rows(linear: Any, names: Sequence[str], hf_config: HfConfig) -> tuple[dict[str, int], int]:
    """Return (rows of each projection in one output group, groups on this rank) of a linear.

    Queries, keys and values are interleaved by group; other projections are one group. With an output gate the queries
    of a group are above their gates.
    """
    config: TransformerConfig = linear.config
    if _sections(linear, names[0], hf_config):
        return {name: sum(_sections(linear, name, hf_config).values()) for name in names}, 1
    if len(names) == 3 or (len(names) == 2 and _projection(names[0]) == "q_proj"):
        head, queries = config.kv_channels, config.num_attention_heads // config.num_query_groups
        queries *= 1 + hf_config.attention_gate
        groups = config.num_query_groups // config.tensor_model_parallel_size
        return dict(zip(names, (queries * head, head, head), strict=False)), groups
    return dict.fromkeys(names, linear.weight.shape[0] // len(names)), 1


class Adapted:
    """A parallel linear that adds the output of `adapter` to its own."""

    def forward(self: Any, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Return (output + adapter output [T, 1, out], bias) of the linear, from input [T, 1, in]."""
        output, bias = super().forward(input_, *args, **kwargs)  # type: ignore[misc]  # the linear's
        return output + self.adapter(input_), bias

    def sharded_state_dict(
        self: Any, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the linear's sharded state and the adapters'."""
        state = self.adapter.state_dict(prefix=f"{ADAPTER_MODULE}.", keep_vars=True)
        axes = {name: value.partition_dim for name, value in state.items() if value.tensor_model_parallel}
        assert metadata is not None, "the state of adapters needs the metadata of groups"
        options = dict(tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"])
        whole = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]  # the linear's
        made = make_sharded_tensors_for_checkpoint(state, prefix, axes, sharded_offsets, **options)
        # a rank's rows: first the gate's, then the up projection's
        if (key := f"{prefix}{ADAPTER_MODULE}.gate_up_proj.lora_B") in made:
            made[key] = apply_swiglu_sharded_factory(made[key], sharded_offsets)
        for name, rows in self.adapter.sections.items():  # so that other ranks can hold other heads
            if len(rows) > 1 and (key := f"{prefix}{ADAPTER_MODULE}.{name}.lora_B") in made:
                made[key] = _split_tensor_factory(made[key], list(rows.values()), list(rows), 0)
        return whole | made


class AdaptedWhole:
    """A linear with whole weights that adds the output of `adapter` to its own. Megatron saves both by default."""

    def forward(self: Any, x: Tensor) -> Tensor:
        """Return the sum of both outputs [..., out], from x [..., in]."""
        return super().forward(x) + self.adapter(x)  # type: ignore[misc]  # the linear's


class LowRank(nn.Module):
    """This rank's shards of A and B of one projection. `cut` holds A's and B's sharded dimension; None: replicated."""

    def __init__(self, linear: Any, rows: int, cut: tuple[int | None, int | None], lora: LoraSection):
        super().__init__()
        weight, config = linear.weight, linear.config
        self.lora_A = nn.Parameter(weight.new_empty(lora.rank, weight.shape[1]))
        self.lora_B = nn.Parameter(weight.new_empty(rows, lora.rank))
        parameters: list[Any] = list(self.parameters())
        for parameter, dim in zip(parameters, cut, strict=True):
            set_tensor_model_parallel_attributes(parameter, dim is not None, -1 if dim is None else dim, 1)
            # Each tensor-parallel rank sees a part of the sequence: finalize_model_grads sums the gradient over them.
            parameter.sequence_parallel = config.sequence_parallel and dim is None


class _Adapter(nn.ModuleDict):
    """Base of one linear's adapters. The linear's projections share one dropout mask. `cut` is as in `LowRank`."""

    cut: tuple[int | None, int | None]

    def __init__(self, linear: Any, parts: dict[str, int], groups: int, wanted: Sequence[str], lora: LoraSection):
        super().__init__({name: LowRank(linear, parts[name] * groups, self.cut, lora) for name in wanted})
        self.parts, self.groups, self.scale, self.dropout = parts, groups, lora.scale, lora.dropout
        self.sections: dict[str, dict[str, int]] = {}  # projection -> rows of each of its parts; set by attach_adapters
        self.tp_group = getattr(linear, "tp_group", None)
        self.sequence_parallel: bool = linear.config.sequence_parallel

    def low_rank(self, name: str) -> LowRank:
        """Return A and B of the projection `name`."""
        part: Any = self[name]
        return part

    def own_rows(self, name: str, rows: Tensor) -> Tensor:
        """Return the rows of B of the projection `name` that this rank computes with."""
        return rows

    def drop(self, x: Tensor, cut: bool) -> Tensor:
        """Apply dropout to `x` [..., in]. Tensor-parallel ranks share the mask unless `x` is sharded (`cut`)."""
        if not self.dropout or not self.training:
            return x
        with get_cuda_rng_tracker().fork(*([] if cut else [get_data_parallel_rng_tracker_name()])):
            return F.dropout(x, self.dropout)


class ColumnAdapter(_Adapter):
    """Adapters of a column-parallel linear. Within each of `groups` the rows of all `parts` are side by side."""

    cut: tuple[int | None, int | None] = None, 0

    def forward(self, x: Tensor) -> Tensor:
        """Return scale B A x, [..., this rank's output rows], from x [..., in]."""
        down = F.linear(
            self.drop(x, cut=self.sequence_parallel), torch.cat([self.low_rank(name).lora_A for name in self])
        )
        if self.sequence_parallel:
            down = gather_from_sequence_parallel_region(down, tensor_parallel_output_grad=True, group=self.tp_group)
        else:
            down = copy_to_tensor_model_parallel_region(down, group=self.tp_group)
        inputs = dict(zip(self.keys(), down.chunk(len(self), dim=-1), strict=True))
        rows = [self._part(name, inputs.get(name), down) for name in self.parts]
        return self.scale * torch.cat(rows, dim=-1).flatten(-2)

    def _part(self, name: str, down: Tensor | None, like: Tensor) -> Tensor:
        """Return the contribution of projection `name`, [..., groups, rows in a group]; 0 if it has no adapter."""
        shape = (*like.shape[:-1], self.groups, self.parts[name])
        if down is None:
            return like.new_zeros(shape)
        return F.linear(down, self.own_rows(name, self.low_rank(name).lora_B)).view(shape)


class SplitGroupsAdapter(ColumnAdapter):
    """Adapters of q, k and v whose rows Megatron cuts inside a group, with fewer KV heads than ranks.

    Every rank has the whole B, and computes its own rows of B A x.
    """

    cut = None, None

    def __init__(self, linear: Any, parts: dict[str, int], groups: int, wanted: Sequence[str], lora: LoraSection):
        super().__init__(linear, parts, groups, wanted, lora)
        config, group = linear.config, linear.tp_group
        segments = qkv_segments(
            config.num_attention_heads, config.num_query_groups, config.kv_channels, group.size(), group.rank()
        )
        self.rows = dict(zip(parts, segments.values(), strict=True))
        self.parts, self.groups = {name: len(rows) for name, rows in self.rows.items()}, 1
        for name in wanted:
            b: Any = self.low_rank(name).lora_B
            b.sequence_parallel = False  # `own_rows` sums the gradient, so finalize_model_grads must not

    def own_rows(self, name: str, rows: Tensor) -> Tensor:
        """Return this rank's rows of a matrix that every rank holds. Backward sums the ranks' gradients."""
        own = self.rows[name]
        return copy_to_tensor_model_parallel_region(rows, group=self.tp_group)[own.start : own.stop]


class RowAdapter(_Adapter):
    """Adapter of a row-parallel linear."""

    cut = 1, None

    def forward(self, x: Tensor) -> Tensor:
        """Return scale B A x, [..., out], from x [..., this rank's input columns]."""
        (name,) = self
        part = self.low_rank(name)
        reduce = (
            reduce_scatter_to_sequence_parallel_region
            if self.sequence_parallel
            else reduce_from_tensor_model_parallel_region
        )
        down = reduce(F.linear(self.drop(x, cut=True), part.lora_A), group=self.tp_group)
        return self.scale * F.linear(down, part.lora_B)


class WholeAdapter(_Adapter):
    """Adapter of a linear whose weight every tensor-parallel rank holds. Each rank computes its own tokens."""

    cut = None, None

    def forward(self, x: Tensor) -> Tensor:
        """Return scale B A x, [..., out], from x [..., in]."""
        (name,) = self
        part = self.low_rank(name)
        down = F.linear(self.drop(x, cut=self.sequence_parallel), part.lora_A)
        return self.scale * F.linear(down, part.lora_B)


class ExpertAdapter(_Adapter):
    """Adapter of one linear of an expert, without communication in its forward pass: the token dispatcher gives all
    ranks that share the expert the same tokens, and adds up their outputs and the gradients of their inputs."""

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's share of scale B A x, [tokens, out], from x [tokens, in]."""
        (name,) = self
        part = self.low_rank(name)
        # The matrix that all of these ranks hold gets a part of its gradient on each.
        a, b = (
            copy_to_tensor_model_parallel_region(matrix, group=self.tp_group) if dim is None else matrix
            for matrix, dim in zip((part.lora_A, part.lora_B), self.cut, strict=True)
        )
        return self.scale * F.linear(F.linear(x, a), b)


class ExpertColumnAdapter(ExpertAdapter):
    """Adapter of an expert's column-parallel linear: every rank has its rows of the output."""

    cut = None, 0


class ExpertRowAdapter(ExpertAdapter):
    """Adapter of an expert's row-parallel linear: every rank has a part of the sum."""

    cut = 1, None


def adapters(chunks: Sequence[nn.Module]) -> Iterator[_Adapter]:
    """Yield the adapters of all linears of this rank."""
    for chunk in chunks:
        yield from (module for module in unwrap_model(chunk).modules() if isinstance(module, _Adapter))


def is_adapter(name: str) -> bool:
    """Whether `name` is the name of an adapter's parameter."""
    return f".{ADAPTER_MODULE}." in name


def is_added(name: str) -> bool:
    """Whether `name` is the name of a parameter that the base model lacks: of an adapter, or a scalar head's."""
    return is_adapter(name) or name == SCALAR_HEAD


@contextlib.contextmanager
def without_dropout(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Context manager: adapters apply no dropout inside it."""
    layers = list(adapters(chunks))
    for adapter in layers:
        adapter.eval()
    try:
        yield
    finally:
        for adapter in layers:
            adapter.train()
