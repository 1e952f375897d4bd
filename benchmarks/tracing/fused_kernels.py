"""The kernels that layers have on a GPU with Transformer Engine, where the traced layers have several operations:
norms, attention of packed sequences, sorting of tokens by expert, and gated activations as `model.fusions` says.

A fused kernel reads its inputs and writes its outputs once in each direction. The traced layers are this project's and
Megatron's torch code (`specs.local_spec`), whose operations would each read and write memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from inspect import getmodule
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.tracing.without_floats import StepCounter, size_of
from megagrpo.config import RunConfig
from megagrpo.families.hf_config import HfConfig
from megagrpo.planner.costs.planned_memory import own_attention
from megagrpo.policy.attention.packed import PackedSeqParams, TorchAttention
from megagrpo.policy.layers import norm_modules
from megagrpo.policy.transformer.specs import MLP, SharedExpertMLP
from megagrpo.policy.transformer.transformer_config import fuses_activation

GATED = ("bias_swiglu_impl", "bias_geglu_impl", "weighted_bias_swiglu_impl", "weighted_bias_quick_geglu_impl")


class _Fused(torch.autograd.Function):
    """One kernel in each direction: `shape` of the output, in the dtype of the first input. With `rereads` the backward
    kernel reads the inputs again, which are kept for it."""

    @staticmethod
    def forward(ctx: Any, counter: StepCounter, shape: tuple[int, ...], rereads: bool, *inputs: Tensor) -> Tensor:
        made = inputs[0].new_empty(shape)
        counter.add("elementwise", 0, sum(map(size_of, (*inputs, made))))
        ctx.counter, ctx.likes = counter, [(each.shape, each.dtype, each.device) for each in inputs]
        ctx.save_for_backward(*(inputs if rereads else ()))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        made = [
            torch.empty(shape, dtype=dtype, device=where) if needed else None
            for (shape, dtype, where), needed in zip(ctx.likes, ctx.needs_input_grad[3:], strict=True)
        ]
        written = [each for each in made if each is not None]
        ctx.counter.add("elementwise", 0, sum(map(size_of, (*ctx.saved_tensors, *gradients, *written))))
        return None, None, None, *made


class _Attention(torch.autograd.Function):
    """Attention of packed sequences. It keeps its inputs, the output and one number per row and head."""

    @staticmethod
    def forward(ctx: Any, counter: StepCounter, flops: float, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.new_empty(query.shape[0], query.shape[1] * value.shape[-1])
        rows = query.new_empty(query.shape[:2], dtype=torch.float32)
        ctx.counter, ctx.flops = counter, flops
        ctx.save_for_backward(query, key, value, output, rows)
        counter.add("attention", flops, sum(map(size_of, (query, key, value, output))))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        made = tuple(torch.empty_like(tensor) for tensor in saved[:3])
        ctx.counter.add("attention", 2.5 * ctx.flops, sum(map(size_of, (*saved, *made, *gradients))))
        return None, None, *made


@contextlib.contextmanager
def fused_kernels(config: RunConfig, model: HfConfig, counter: StepCounter) -> Iterator[None]:
    """Count the fused kernels of a GPU with Transformer Engine in place of the traced layers' operations."""

    def fused(shape: tuple[int, ...], rereads: bool, *inputs: Tensor) -> Tensor:
        return _Fused.apply(counter, shape, rereads, *inputs)

    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return fused(tuple(x.shape), True, x, weight)

    def permute(tokens: Tensor, routing_map: Tensor, probs: Tensor, num_out_tokens: Any, **_: Any) -> tuple[Any, ...]:
        count = int(num_out_tokens)
        rows, weights = fused((count, tokens.shape[1]), False, tokens), fused((count,), False, probs)
        return rows, weights, routing_map, None, None

    def unpermute(rows: Tensor, order: Tensor, restore_shape: torch.Size, **_: Any) -> Tensor:
        return fused(tuple(restore_shape), False, rows)

    def sort(rows: Tensor, sizes: Tensor, order: Tensor, probs: Tensor | None = None, **_: Any) -> tuple[Any, ...]:
        weights = None if probs is None else fused(tuple(probs.shape), False, probs)
        return fused(tuple(rows.shape), False, rows), weights

    def gated(x: Tensor, bias: Tensor | None, *more: Any) -> Tensor:
        """Megatron's fused activations: the weights of tokens, where they have some, are the third argument."""
        inputs = [each for each in (x, bias, *more) if isinstance(each, Tensor)]
        return fused((*x.shape[:-1], x.shape[-1] // 2), True, *inputs)

    from megatron.core.transformer.moe import token_dispatcher  # after megagrpo, which prepares it for this machine

    modules = getmodule(MLP), getmodule(SharedExpertMLP)
    patches: list[contextlib.AbstractContextManager[Any]] = [
        mock.patch.object(norm_modules, "rms_norm", norm),
        mock.patch.object(token_dispatcher, "permute", permute),
        mock.patch.object(token_dispatcher, "unpermute", unpermute),
        mock.patch.object(token_dispatcher, "sort_chunks_by_idxs", sort),
        *(mock.patch.object(module, n, gated) for module in modules for n in GATED if hasattr(module, n)),
    ]
    if config.parallel.cp == 1 and not own_attention(config, model):
        patches.append(mock.patch.object(TorchAttention, "forward", _packed_attention(TorchAttention.forward, counter)))
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def _packed_attention(whole: Any, counter: StepCounter) -> Any:
    """Return a `TorchAttention.forward` that reads the packed tokens where they are, in place of batches of copies."""

    def forward(
        attention: TorchAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        packed_seq_params: PackedSeqParams,
        **options: Any,
    ) -> Tensor:
        packed = packed_seq_params
        if packed.prefixes is not None:
            return whole(attention, query, key, value, *args, packed_seq_params=packed, **options)
        query, key = attention._rotated(query, key, packed)
        pairs = 0.0
        for start, stop in pairwise(packed.host_borders.tolist()):
            length = stop - start
            seen = min(attention.window.size if attention.window else length, length)
            pairs += seen * length - seen * seen / 2
        flops = 2 * pairs * query.shape[1] * (query.shape[2] + value.shape[2])
        return _Attention.apply(counter, flops, query, key, value)

    return forward


def take_activations_of_a_gpu(chunks: list[nn.Module], model: HfConfig, fusions: Any) -> None:
    """Have the MLPs of traced chunks take Megatron's gated activation, as Transformer Engine's spec does: fused, or
    operation by operation."""
    for module in (module for chunk in chunks for module in chunk.modules() if isinstance(module, MLP)):
        module.config.use_te_activation_func = False
        module.config.bias_activation_fusion = fuses_activation(model, fusions)
        del module.activation_func
        module.activation_func = module.config.activation_func
