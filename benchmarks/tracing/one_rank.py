"""One rank of a world whose other ranks do not exist, and the choices that the code makes on a GPU, where Transformer
Engine computes the experts of a layer as grouped products."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.tracing.without_floats import StepCounter, size_of, without_data
from megagrpo.config import ParallelSection
from megagrpo.platform import device
from megagrpo.platform.device import norms
from megagrpo.platform.device.cpu import VARIABLE
from megagrpo.platform.parallel.host_messages import Reduction
from megagrpo.platform.parallel.layout import Layout, init_layout
from megagrpo.platform.process.variables import ENVIRONMENT
from megagrpo.policy.moe.router_losses import BalancedRouter
from megagrpo.policy.transformer.specs import SequentialMLP

GPU_BLOCK_ELEMENTS = 2**24  # `device.block_elements` on a GPU
GRADIENT_BYTES = 4  # bytes per element of `main_grad`


class _Alone(Layout):
    """The layout of a rank without other ranks. Every other rank would send what this rank sends."""

    def all_reduce(self, values: Tensor, reduction: Reduction = "sum", within: float | None = None) -> Tensor:
        return values * self.world_size if reduction == "sum" else values

    def broadcast_object(self, obj: Any, source: int = 0) -> Any:
        return obj

    def all_gather_objects(self, obj: Any, within: float | None = None) -> list[Any]:
        return [obj] * self.world_size


@contextlib.contextmanager
def one_rank(parallel: ParallelSection, world_size: int, rank: int, counter: StepCounter) -> Iterator[Layout]:
    """Yield the layout of one rank of a world whose other ranks do not exist. Collectives return at once.

    Inside, attention counts as one fused kernel, experts get equally many tokens, and precision and block sizes are
    chosen as on a GPU. Raises RuntimeError in a process that already has process groups.
    """
    if dist.is_initialized():
        raise RuntimeError("a step can only be traced in a process without process groups")
    new_group = dist.new_group
    patches: list[contextlib.AbstractContextManager[Any]] = [
        mock.patch.dict(ENVIRONMENT, {VARIABLE: "amd_bf16"}),
        mock.patch.object(dist, "new_group", lambda *args, **kwargs: new_group(*args, **kwargs | {"backend": "fake"})),
        mock.patch.object(dist, "all_gather_object", _gather_copies),
        mock.patch.object(dist, "batch_isend_irecv", _send_one_by_one),
        mock.patch.object(device, "block_elements", lambda: GPU_BLOCK_ELEMENTS),
        mock.patch.object(F, "scaled_dot_product_attention", _attention_of(counter)),
        mock.patch.object(torch.Tensor, "to", _copying(torch.Tensor.to)),
        mock.patch.object(torch.Tensor, "tolist", _tolist_of(torch.Tensor.tolist, counter)),
        mock.patch.object(BalancedRouter, "routing", _even_routing(BalancedRouter.routing)),
        mock.patch.object(norms, "l2_norm", _norm_of(counter)),
        _grouped_experts(counter),
        _waits_for_counts(counter),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        layout = None
        try:
            layout = init_layout(parallel)
            yield _Alone(**vars(layout))
        finally:
            layout.close() if layout is not None else dist.destroy_process_group()


def _gather_copies(everyone: list[Any], obj: Any, *_: object, **__: object) -> None:
    everyone[:] = [obj] * len(everyone)


def _send_one_by_one(messages: list[Any]) -> list[Any]:
    """Start a batch's messages one by one: batching asks for a device's backend, which tensors without data lack."""
    return [message.op(message.tensor, message.peer, message.group) for message in messages]


def _copying(to: Any) -> Any:
    """Return a `to` that copies integers to the device, as on a GPU. On a CPU host and device are the same."""

    def patched(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        moved = to(tensor, *args, **kwargs)
        to_device = isinstance(args[0] if args else kwargs.get("device"), torch.device)
        return moved.clone() if to_device and not without_data(tensor) else moved

    return patched


def _tolist_of(tolist: Any, counter: StepCounter) -> Any:
    """Return a `tolist` that gives ones for tensors without data, for which the host waits."""

    def patched(tensor: Tensor) -> Any:
        if not without_data(tensor):
            return tolist(tensor)
        counter.wait()
        number: Any = True if tensor.dtype == torch.bool else 1.0
        for size in reversed(tensor.shape):
            number = [number] * size
        return number

    return patched


def _norm_of(counter: StepCounter) -> Any:
    """Return `l2_norm` as one kernel over all tensors, and the host's wait in Megatron's `get_grad_norm_fp32`."""

    def patched(tensors: Sequence[Tensor]) -> float:
        counter.add("elementwise", 0, sum(map(size_of, tensors)))
        counter.wait()
        return 1.0

    return patched


def _even_routing(routing: Any) -> Any:
    """Return a router's `routing` with equally many tokens per expert: token t goes to experts k t to k t + k - 1."""

    def patched(router: BalancedRouter, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        probs, routing_map = routing(router, logits, padding_mask)
        tokens, experts = routing_map.shape
        first = router.topk * torch.arange(tokens)[:, None]
        even = torch.zeros(tokens, experts, dtype=torch.bool).scatter_(
            1, (first + torch.arange(router.topk)) % experts, True
        )
        return probs, even.to(device.device())

    return patched


def _attention_of(counter: StepCounter) -> Any:
    """Return `scaled_dot_product_attention` as a fused kernel per direction. It keeps output and one number per row."""

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
            batch, heads, length, _ = query.shape
            output = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
            rows = query.new_empty(batch, heads, length, dtype=torch.float32)
            ctx.flops = flops(query, key, value, causal)
            ctx.save_for_backward(query, key, value, output, rows)
            counter.add("attention", ctx.flops, sum(map(size_of, (query, key, value, output))))
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
            saved = ctx.saved_tensors
            made = tuple(torch.empty_like(tensor) for tensor in saved[:3])
            counter.add("attention", 2.5 * ctx.flops, sum(map(size_of, (*saved, *made, *gradients))))
            return *made, None

    def flops(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> float:
        """Count both products; a causal mask hides half of the pairs."""
        pairs = query.shape[2] * key.shape[2] * (0.5 if causal else 1.0)
        return 2 * query.shape[0] * query.shape[1] * pairs * (query.shape[3] + value.shape[3])

    def patched(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, **_: Any
    ) -> Tensor:
        return Attention.apply(query, key, value, is_causal)

    return patched


def _grouped_experts(counter: StepCounter) -> Any:
    """Return a patch of Megatron's `SequentialMLP` that computes the experts of a layer as two grouped products.

    The weight gradients are added to `main_grad` inside their product. Experts with biases stay sequential.
    """
    sequential = SequentialMLP.forward

    def forward(
        experts: SequentialMLP, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor
    ) -> tuple[Tensor, None]:
        if experts.config.add_bias_linear or experts.num_local_experts == 1:
            return sequential(experts, hidden, tokens_per_expert, probs)
        first = experts.local_experts[0]
        with contextlib.ExitStack() as stack:
            for name in ("linear_fc1", "linear_fc2"):
                weights = [getattr(expert, name).weight for expert in experts.local_experts]
                stack.enter_context(mock.patch.object(getattr(first, name), "forward", _product(weights, counter)))
            return first(hidden, probs)[0], None

    return mock.patch.object(SequentialMLP, "forward", forward)


def _waits_for_counts(counter: StepCounter) -> Any:
    """Return a patch of Megatron's dispatcher that counts one wait of the host per layer, for the token counts."""
    from megatron.core.transformer.moe import token_dispatcher  # after megagrpo, which prepares it for this machine

    dispatcher_class = token_dispatcher.MoEAlltoAllTokenDispatcher
    synchronize = dispatcher_class._maybe_dtoh_and_synchronize

    def patched(dispatcher: Any, point: str, tokens_per_expert: Tensor | None = None) -> Any:
        moved = synchronize(dispatcher, point, tokens_per_expert)
        if point == dispatcher.cuda_sync_point:
            counter.wait()
        return moved

    return mock.patch.object(dispatcher_class, "_maybe_dtoh_and_synchronize", patched)


def _product(weights: list[Tensor], counter: StepCounter) -> Any:
    return lambda rows: (_Grouped.apply(rows, counter, *weights), None)


class _Grouped(torch.autograd.Function):
    """Rows [T, in], split evenly over the experts, times expert weights [out, in]. `main_grad` gets their gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counter: StepCounter, *weights: Tensor) -> Tensor:
        made = rows.new_empty(rows.shape[0], weights[0].shape[0])
        ctx.counter, ctx.out = counter, size_of(made)
        ctx.save_for_backward(rows, *weights)
        _count(counter, rows, weights, size_of(made))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        rows, *weights = ctx.saved_tensors
        made = torch.empty_like(rows)
        _count(ctx.counter, rows, weights, ctx.out)
        if weights[0].requires_grad:  # not with adapters, whose base weights are frozen
            _count(ctx.counter, rows, weights, ctx.out, GRADIENT_BYTES * 2 / weights[0].element_size())
        return made, None, *[None] * len(weights)


def _count(counter: StepCounter, rows: Tensor, weights: Any, out: int, weight_passes: float = 1) -> None:
    """Count one direction's products: a launch per expert reads or writes the weight bytes `weight_passes` times."""
    flops = 2 * rows.shape[0] * weights[0].numel()
    size = size_of(rows) + out + weight_passes * sum(map(size_of, weights))
    for _ in weights:
        counter.add("experts", flops / len(weights), size / len(weights))
