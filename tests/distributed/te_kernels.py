"""Transformer Engine without a GPU: replaces its kernels by plain torch code and keeps the rest of the package.

With it, Transformer Engine's layers, recipes, quantizers and tensors run without a GPU where the package is installed,
as does Megatron's code for them. Attention takes Transformer Engine's arguments, but not its backends. Nothing here
tests the kernels themselves.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megagrpo.platform import device

E4M3, SIDE = torch.float8_e4m3fn, 128
MOST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def replace_kernels() -> None:
    """Have this process build and run Transformer Engine's layers on its CPU, which they treat as a Hopper GPU."""
    from megatron.core.optimizer import clip_grads
    from transformer_engine.pytorch import quantization
    from transformer_engine.pytorch.cpp_extensions import gemm

    _pretend()
    device.has_transformer_engine, device.has_gpu = lambda: True, lambda: False
    device.fp8_problem = lambda recipe: None
    quantization.check_recipe_support = lambda recipe: None
    quantization.FP8GlobalStateManager.is_fp8_available = classmethod(lambda cls: (True, ""))
    gemm.get_cublas_workspace_size_bytes = lambda: 1
    for name, module in list(sys.modules.items()):
        if name.startswith("transformer_engine") and hasattr(module, "is_non_tn_fp8_gemm_supported"):
            module.is_non_tn_fp8_gemm_supported = lambda *args: False  # as on Hopper
    put_kernels()
    clip_grads.multi_tensor_applier = _clip


def put_kernels(*more: Callable) -> None:
    """Put these functions, and those of `more`, in place of Transformer Engine's kernels of the same names, wherever
    they are imported."""
    import transformer_engine_torch as kernels
    from transformer_engine.pytorch import DotProductAttention
    from transformer_engine.pytorch.tensor import float8_tensor, utils

    ours = {kernel.__name__: kernel for kernel in (*KERNELS, *more)} | {"get_num_cublas_streams": lambda: 1}
    theirs = {id(getattr(kernels, name)): kernel for name, kernel in ours.items()}
    for name, module in list(sys.modules.items()):
        if name.startswith(("transformer_engine", "megatron.core.optimizer")):
            for key, value in list(vars(module).items()):
                if id(value) in theirs:
                    setattr(module, key, theirs[id(value)])
    for name in ("inner_tensor_specs", "storage_metadata"):  # only one of the two can return them in Python
        setattr(float8_tensor.Float8Quantizer, name, getattr(float8_tensor.Float8CurrentScalingQuantizer, name))
    DotProductAttention.forward = attention
    utils.multi_tensor_applier = scales_and_inverses


def _pretend() -> None:
    """Fake CUDA's capability queries."""
    cuda = torch.cuda
    cuda.is_available = lambda: True
    cuda.is_current_stream_capturing = lambda: False
    cuda.get_device_capability = lambda *args: (9, 0)
    cuda.get_device_properties = lambda *args: SimpleNamespace(
        multi_processor_count=4, major=9, minor=0, name="CPU", total_memory=2**33
    )
    cuda.device = lambda *args: contextlib.nullcontext()
    torch.Tensor.is_cuda = property(lambda self: True)
    torch.compiler.set_stance("force_eager")


def _clip(operation: Callable, overflow: Tensor, lists: list[list[Tensor]], *args: Any) -> Any:
    """Scale all gradients at once for Megatron; norms are computed without kernels."""
    if len(lists) == 1:
        return operation(2**16, overflow, lists, *args)
    for source, target in zip(*lists, strict=True):
        target.copy_(source * args[0])


# ---------------------------------------------------------------------------------------------------------- FP8 numbers


def quantize(x: Tensor, quantizer, target=None, noop=None):
    """Quantize x in the format of the quantizer's tensors; into `target`, if any."""
    target = create_empty_quantized_tensor(quantizer, x.shape, x.dtype, x.device) if target is None else target
    kind = torch_dtype(quantizer.dtype)
    matrix = x.detach().reshape(-1, x.shape[-1]) if x.dim() else x
    if hasattr(quantizer, "block_scaling_dim"):
        square = quantizer.block_scaling_dim == 2
        _put(
            target._rowwise_data,
            target._rowwise_scale_inv,
            matrix,
            (SIDE if square else 1, SIDE),
            kind,
            quantizer,
            square,
            False,
        )
        _put(
            target._columnwise_data,
            target._columnwise_scale_inv,
            matrix,
            (SIDE, SIDE if square else 1),
            kind,
            quantizer,
            square,
            True,
        )
        return target
    amax = matrix.abs().amax().float().view(1) if matrix.numel() else matrix.new_zeros(1, dtype=torch.float32)
    if hasattr(quantizer, "scale"):  # delayed, or left over from another quantizer's scale
        scale = quantizer.scale.view(1)
        if quantizer.amax.numel():
            quantizer.amax.copy_(torch.maximum(quantizer.amax.view(1), amax))
    else:
        if getattr(quantizer, "with_amax_reduction", False):
            torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=quantizer.amax_reduction_group)
        scale = scale_of(amax, kind, quantizer.force_pow_2_scales)
    numbers = rounded(matrix, scale, kind)
    target._scale_inv.copy_(1 / scale)
    if target._data is not None:
        target._data.copy_(numbers.view(target._data.shape))
    if target._transpose is not None and matrix.dim() == 2:
        target._transpose.copy_(numbers.t().reshape(target._transpose.shape))
        target._transpose_invalid = False
    return target


def create_empty_quantized_tensor(
    quantizer, shape: list[int], dtype: torch.dtype, where: torch.device, pinned: bool = False
):
    """An uninitialized tensor of the quantizer's kind."""
    of, tensors = quantizer.create_metadata(shape, dtype=dtype), quantizer.alloc_tensors(shape, device=where)
    return of["cls"].__tensor_unflatten__(tensors, of, shape, torch.empty(shape, device="meta").stride())


def _put(
    data: Tensor | None, inverse: Tensor, x: Tensor, tile: tuple[int, int], kind, quantizer, square: bool, columns: bool
) -> None:
    """Write the numbers and scales of tiles of x; columnwise data is transposed. Scales follow cuBLAS: scales of square
    tiles in the order of the data, others transposed and padded to multiples of 4."""
    if data is None or not x.numel():
        return
    tiles = in_tiles(x, tile)
    scale = scale_of(magnitudes(tiles), kind, quantizer.force_pow_2_scales)
    numbers = out_of_tiles(rounded(tiles, scale[:, None, :, None], kind), x.shape)
    data.copy_((numbers.t() if columns else numbers).reshape(data.shape))
    own = 1 / (scale if columns != square else scale.t())
    inverse.zero_()[: own.shape[0], : own.shape[1]] = own


def operand(x: Any, usage: str) -> Tensor:
    """A product's operand x as float32 [rows, width]: a quantized tensor gives its rowwise or columnwise numbers."""
    if isinstance(x, Tensor) and not hasattr(x, "_quantizer"):
        return x.float().reshape(-1, x.shape[-1])
    kind, columns = torch_dtype(x._fp8_dtype), usage == "columnwise"
    if hasattr(x, "_data"):
        columns = x._data is None or (columns and x._transpose is not None)
        data = x._transpose if columns else x._data
        values = data.reshape(-1, data.shape[-1]) if not columns else data.reshape(data.shape[0], -1).t()
        return values.contiguous().view(kind).float() * x._scale_inv
    data, inverse = (
        (x._columnwise_data, x._columnwise_scale_inv) if columns else (x._rowwise_data, x._rowwise_scale_inv)
    )
    values = (
        (data.reshape(data.shape[0], -1).t() if columns else data.reshape(-1, data.shape[-1]))
        .contiguous()
        .view(kind)
        .float()
    )
    square = x._is_2D_scaled
    own = inverse if columns != square else inverse.t()
    down, across = SIDE if square or columns else 1, SIDE if square or not columns else 1
    return values * own.repeat_interleave(down, 0)[: values.shape[0]].repeat_interleave(across, 1)[:, : values.shape[1]]


def split_quantize(x: Tensor, sizes: list[int], quantizers: list, **options: Any) -> list:
    """Quantize each part of the rows with its own quantizer."""
    return [quantize(part, quantizer) for part, quantizer in zip(x.split(sizes), quantizers, strict=True)]


def bgrad_quantize(x: Tensor, quantizer) -> tuple[Tensor, Any]:
    """The gradient of a bias, and x quantized."""
    return x.reshape(-1, x.shape[-1]).float().sum(0).to(x.dtype), quantize(x, quantizer)


def dequantize(x: Any, kind: Any) -> Tensor:
    """The numbers of a tensor with one scale, in another dtype."""
    return operand(x, "rowwise").view(x.shape).to(torch_dtype(kind))


def fp8_transpose(data: Tensor, kind: Any, out: Tensor | None = None) -> Tensor:
    """[width, rows] of bytes [rows, width]."""
    turned = data.reshape(-1, data.shape[-1]).t().contiguous()
    return turned if out is None else out.copy_(turned)


def compute_amax(x: Tensor, found: Tensor) -> None:
    """The largest magnitude of x."""
    found.copy_(x.abs().amax())


def fp8_block_scaling_compute_partial_amax(
    master: Tensor, found: Tensor, rows: int, width: int, first: int, block: int
) -> None:
    """The largest magnitudes of the blocks of this rank's shard of a weight."""
    own = magnitudes(in_tiles(in_place(master, rows, width, first), (block, block)))
    found[:, : own.shape[1]] = own


def fp8_block_scaling_partial_cast(
    master: Tensor, part: Tensor, scale: Tensor, rows: int, width: int, first: int, block: int, kind: Any
) -> None:
    """This rank's shard of a weight, rounded by the scales of all ranks."""
    tiles = in_tiles(in_place(master, rows, width, first), (block, block))
    numbers = out_of_tiles(
        rounded(tiles, scale[:, None, : tiles.shape[2], None], torch_dtype(kind)), (rows, width)
    ).flatten()
    part.copy_(numbers[first : first + master.numel()])


def scales_and_inverses(
    operation: Callable, overflow: Tensor, lists: list[list[Tensor]], most: float, power_of_two: bool, epsilon: float
) -> None:
    """Scales, and 1 / scales, of weights by the magnitudes of all ranks."""
    assert operation.__name__ == "multi_tensor_compute_scale_and_scale_inv" and (most, epsilon) == (448.0, 0.0)
    for magnitude, scale, inverse in zip(*lists, strict=True):
        scale.copy_(scale_of(magnitude, E4M3, power_of_two))
        inverse.copy_(1 / scale)


def torch_dtype(kind: Any) -> torch.dtype:
    from transformer_engine.pytorch.constants import DType, TE_DType_To_Torch

    return kind if isinstance(kind, torch.dtype) else TE_DType_To_Torch[DType.cast(kind)]


def rounded(x: Tensor, scale: Tensor, kind: torch.dtype) -> Tensor:
    return (x.float() * scale).clamp(-MOST[kind], MOST[kind]).to(kind).view(torch.uint8)


def scale_of(magnitude: Tensor, kind: torch.dtype, power_of_two: bool) -> Tensor:
    scale = torch.where(magnitude > 0, MOST[kind] / magnitude, 1.0)
    return torch.ldexp(torch.ones_like(scale), torch.frexp(scale).exponent - 1) if power_of_two else scale


def in_tiles(x: Tensor, tile: tuple[int, int]) -> Tensor:
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % tile[1], 0, -x.shape[0] % tile[0]))
    return padded.view(len(padded) // tile[0], tile[0], -1, tile[1])


def out_of_tiles(tiles: Tensor, shape: tuple[int, int]) -> Tensor:
    return tiles.reshape(tiles.shape[0] * tiles.shape[1], -1)[: shape[0], : shape[1]]


def magnitudes(tiles: Tensor) -> Tensor:
    return tiles.abs().amax((1, 3)).float()


def in_place(master: Tensor, rows: int, width: int, first: int) -> Tensor:
    """A matrix with only this shard; all other elements are 0."""
    matrix = master.new_zeros(rows * width)
    matrix[first : first + master.numel()] = master.flatten()
    return matrix.view(rows, width)


# ------------------------------------------------------------------------------------------------------------ in layers


def generic_gemm(
    a,
    a_turned: bool,
    b,
    b_turned: bool,
    out,
    quantizer,
    kind,
    bias,
    bias_kind,
    gelu,
    gelu_in,
    grad,
    *rest: Any,
    **others: Any,
):
    """The product b a of cuBLAS' matrices, transposed as requested; with a bias, or its gradient. Returns (product,
    bias's gradient, None, None)."""
    accumulate = rest[2]
    assert not gelu and quantizer is None and others.get("comm_overlap") is None
    left, right = (
        operand(b, "columnwise" if b_turned else "rowwise"),
        operand(a, "rowwise" if a_turned else "columnwise"),
    )
    product = (left.t() if b_turned else left) @ (right.t() if a_turned else right)
    gradient = left.sum(0).to(bias.dtype) if bias is not None and grad else None
    product = product + bias.float() if bias is not None and not grad else product
    if not b_turned:
        product = product.view(*b.shape[:-1], product.shape[-1])
    if out is None:
        return product.to(torch_dtype(kind)), gradient, None, None
    out.copy_(out + product.view(out.shape) if accumulate else product.view(out.shape))
    return out, gradient, None, None


def te_general_grouped_gemm(
    a, a_turned, b, b_turned, out, kind, sizes, bias, bias_kind, single, gelu_in, grad, *rest: Any
):
    """`generic_gemm` of each pair, stacked vertically in a single output. Products with empty operands are 0; also
    returns the gradients of biases."""
    accumulate, outputs = rest[2], out[0].split(sizes) if single else out
    for i, (left, right, target) in enumerate(zip(a, b, outputs, strict=True)):
        own = bias[i] if bias and bias[i] is not None and bias[i].numel() else None
        if not sizes[i]:
            target.mul_(1 if accumulate else 0).nan_to_num_()
            if grad and own is not None:
                own.zero_()
            continue
        _, gradient, *_ = generic_gemm(
            left, a_turned, right, b_turned, target, None, None, own, None, False, None, grad, 0, 0, accumulate
        )
        if gradient is not None:
            own.copy_(gradient)
    return bias


def rmsnorm_fwd(x: Tensor, weight: Tensor, eps: float, out, quantizer, kind, margin: int, centred: bool):
    """(x normed, None, 1 / its root mean square [rows])."""
    inverse = torch.rsqrt(x.float().square().mean(-1) + eps)
    normed = (x.float() * inverse[:, None] * (weight.float() + centred)).to(torch_dtype(kind))
    return (normed if quantizer is None else quantize(normed, quantizer, out)), None, inverse


def rmsnorm_bwd(
    grad: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, margin: int, centred: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weight."""
    normed, scaled = x.float() * inverse[:, None], grad.float() * (weight.float() + centred)
    of_x = inverse[:, None] * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    return of_x.to(x.dtype), (grad.float() * normed).sum(0).to(weight.dtype)


def fused_rope_forward(
    x: Tensor, angles: Tensor, starts, form, neighbours: bool, cu_seqlens: Tensor, size: int, rank: int, sign: int = 1
):
    """Rotate x [tokens, heads, width] of packed sequences by angles [positions, 1, 1, width]. A context-parallel rank
    has one chunk from the front of each sequence and one from its end."""
    assert starts is None and x.dim() == 3
    positions = []
    for first, last in zip((cu_seqlens // size)[:-1].tolist(), (cu_seqlens // size)[1:].tolist(), strict=True):
        half = (last - first) // 2
        front, back = rank * half, (2 * size - 1 - rank) * half
        positions += (
            list(range(last - first)) if size == 1 else [*range(front, front + half), *range(back, back + half)]
        )
    angle = angles.view(len(angles), -1)[torch.tensor(positions, device=angles.device)][:, None]
    width = angle.shape[-1]
    turned, rest = x[..., :width].float(), x[..., width:]
    if neighbours:
        other = torch.stack([-turned[..., 1::2], turned[..., ::2]], -1).flatten(-2)
    else:
        other = torch.cat([-turned[..., width // 2 :], turned[..., : width // 2]], -1)
    return torch.cat([(turned * angle.cos() + sign * other * angle.sin()).to(x.dtype), rest], -1)


def fused_rope_backward(*args: Any) -> Tensor:
    """The gradient of x: the inverse rotation."""
    return fused_rope_forward(*args, sign=-1)


def attention(
    self,
    query,
    key,
    value,
    mask=None,
    qkv_format=None,
    cu_seqlens_q=None,
    cu_seqlens_q_padded=None,
    cu_seqlens_kv=None,
    attn_mask_type=None,
    **others,
):
    """Causal attention inside each packed sequence, with Transformer Engine's arguments; padding gives 0. [tokens,
    heads x width]. The mask ends at the last query and, with `bottom_right`, at the last key."""
    bottom_right = attn_mask_type.endswith("_bottom_right")
    mask = attn_mask_type.removesuffix("_bottom_right")
    assert ((qkv_format or self.qkv_format), mask, query.dim()) == ("thd", "padding_causal", 3)
    known = {"cu_seqlens_kv_padded", "max_seqlen_q", "max_seqlen_kv", "num_splits"}
    assert not [name for name, given in others.items() if given is not None and name not in known], others
    places, sizes = (
        (cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded).tolist(),
        cu_seqlens_q.diff().tolist(),
    )
    keys, seen_sizes = (cu_seqlens_kv.tolist(), cu_seqlens_kv.diff().tolist()) if bottom_right else (places, sizes)
    assert max(sizes) <= others["max_seqlen_q"] and max(seen_sizes) <= others["max_seqlen_kv"]
    groups, left, found = query.shape[1] // key.shape[1], self.window_size[0] if self.window_size else -1, []
    ends = [*places[1:-1], len(query)]
    for first, size, start, count, end in zip(places, sizes, keys, seen_sizes, ends, strict=False):
        q, k, v = (
            query[first : first + size].float(),
            *(each[start : start + count].float().repeat_interleave(groups, 1) for each in (key, value)),
        )
        index = torch.arange(count, device=query.device)
        back = index[count - size :, None] - index
        seen = (back >= 0) & ((back <= left) | (left < 0))
        scores = (torch.einsum("qhd,khd->hqk", q, k) * self.softmax_scale).masked_fill(~seen, -torch.inf)
        if self.softmax_type == "learnable":
            scores = torch.cat([scores, self.softmax_offset.float().view(-1, 1, 1).expand(-1, size, 1)], -1)
        given = torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :count], v).to(query.dtype)
        found.append(torch.nn.functional.pad(given, (0, 0, 0, 0, 0, end - first - size)))
    return torch.cat(found).flatten(1)


def fused_multi_row_padding(x: Tensor, out: Tensor, sizes: list[int], padded: list[int]) -> None:
    """Pad each part of the rows with zeros."""
    out.copy_(
        torch.cat(
            [
                torch.nn.functional.pad(part, (0, 0, 0, more - len(part)))
                for part, more in zip(x.split(sizes), padded, strict=True)
            ]
        )
    )


def fused_multi_row_unpadding(x: Tensor, out: Tensor, padded: list[int], sizes: list[int]) -> None:
    """Remove the padding."""
    out.copy_(torch.cat([part[:size] for part, size in zip(x.split(padded), sizes, strict=True)]))


KERNELS = (
    *(quantize, create_empty_quantized_tensor, split_quantize, bgrad_quantize, dequantize, fp8_transpose, compute_amax),
    *(generic_gemm, te_general_grouped_gemm, rmsnorm_fwd, rmsnorm_bwd, fused_rope_forward, fused_rope_backward),
    *(
        fused_multi_row_padding,
        fused_multi_row_unpadding,
        fp8_block_scaling_compute_partial_amax,
        fp8_block_scaling_partial_cast,
    ),
)
