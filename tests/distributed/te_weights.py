"""What Transformer Engine's FP8 weights become in two steps of Megatron's optimizer: recorded where it is installed, compared everywhere.

    python tests/distributed/te_weights.py        # writes tests/vectors/te_weights.json; Transformer Engine, and no GPU, is needed

See te_manifest.py for the environment. Everything is theirs, tensors, buffers and optimizer, but the kernels, which need a GPU: those that
round, transpose and look for magnitudes are written here in torch. While it records it also has the weights leave and come back, swapped
for the reference's, saved and loaded.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zlib
from importlib.metadata import version
from pathlib import Path

import torch
from ranks import run_ranks
from test_fp8_weights import settings, start, whole
from torch import Tensor

from megagrpo.checkpoint import Checkpointer
from megagrpo.config import ParallelSection
from megagrpo.parallel import device
from megagrpo.parallel.layout import init_layout
from megagrpo.policy.fp8_weights import dense, is_fp8, parts
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.offload import Offload
from megagrpo.policy.optimizer import parts_of
from megagrpo.policy.reference import Reference
from megagrpo.types import TrainState

FILE = Path(__file__).parents[1] / "vectors" / "te_weights.json"
CASES = [(recipe, shape, ranks) for recipe in ("tensorwise", "blockwise") for shape, ranks in (("qwen2_untied", 2), ("qwen3_moe", 1))]
E4M3, BLOCK = torch.float8_e4m3fn, 128


def name_of(case: tuple) -> str:
    """The key of a case in the file."""
    return " ".join(map(str, case))


def sums(policy: MegatronPolicy) -> list[int]:
    """CRC-32s of the dense numbers of all weights in FP8, sorted: experts of Transformer Engine have other names than ours."""
    weights = [p for p in policy.chunks[0].parameters() if is_fp8(p)]
    return sorted(zlib.crc32(dense(p).contiguous().view(torch.uint8).numpy().tobytes()) for p in weights)


def take_step(policy: MegatronPolicy, number: int) -> None:
    """An optimizer step whose gradients are the same wherever it is taken: none of a forward pass."""
    for chunk in policy.model:
        chunk.zero_grad_buffer()
    for p in policy.chunks[0].parameters():
        p.main_grad.copy_(torch.sin(torch.arange(p.numel(), dtype=torch.float64).view(p.shape) * (0.7 + number)))
    for chunk in policy.model:
        chunk.finish_grad_sync()
    for group in policy.optimizer.param_groups:
        group["lr"] = 1e-2
    assert policy.optimizer.step()[0]


def started(case: tuple) -> tuple[MegatronPolicy, Reference]:
    """A policy on weights that are the same wherever it is made; gradients are not clipped, which would take another kernel."""
    recipe, shape, _ = case
    policy, reference = start(settings("dp2", recipe, True), shape, init_layout(ParallelSection()))
    for part in parts_of(policy.optimizer):
        part.config.clip_grad = 0.0
    return policy, reference


def in_steps(case: tuple) -> list[list[int]]:
    """`sums` at first and after each of two steps."""
    policy, _ = started(case)
    found = [sums(policy)]
    for number in range(2):
        take_step(policy, number)
        found.append(sums(policy))
    return found


# --------------------------------------------------------------------------------------------------------------------- where it is recorded


def recorded(case: tuple, folder: Path) -> tuple[list[list[int]], list[str]]:
    """As `in_steps`, on Transformer Engine's tensors, whose types come with it; and all that may happen to them between steps."""
    replace_kernels()
    policy, reference = started(case)
    found = [sums(policy)]
    for number in range(2):
        take_step(policy, number)
        check_second_copy(policy)
        found.append(sums(policy))
    before = whole(policy)
    with reference.in_place():
        assert sums(policy) == found[0]
    offload = Offload(policy, reference)
    offload.keep_nothing()
    assert not any(part.untyped_storage().nbytes() for p in policy.chunks[0].parameters() for part in parts(p))
    offload.keep_everything()
    (folder / "config.json").write_text("{}")
    saver = Checkpointer(folder / "saved", policy.layout, policy, 1, folder)
    saver.save(TrainState(step=2))
    take_step(policy, 2)
    assert sums(policy) != found[2]
    saver.load(saver.latest())
    check_second_copy(policy)
    assert sums(policy) == found[2] and all(torch.equal(one, other) for one, other in zip(before, whole(policy), strict=True))
    return found, sorted({type(p).__name__ for p in policy.chunks[0].parameters() if is_fp8(p)})


def check_second_copy(policy: MegatronPolicy) -> None:
    """What the gradient of a linear's input takes is the transpose of what the forward pass takes."""
    for weight in filter(is_fp8, policy.chunks[0].parameters()):
        if hasattr(weight, "_columnwise_data"):
            assert torch.equal(weight._columnwise_data, weight._rowwise_data.t())
        else:
            assert not weight._transpose_invalid and torch.equal(weight._transpose, weight._data.t())


def replace_kernels() -> None:
    """Have a process without a GPU build Transformer Engine's layers, and round their weights in torch."""
    import transformer_engine_torch as kernels
    from transformer_engine.pytorch import quantization
    from transformer_engine.pytorch.constants import DType, TE_DType_To_Torch
    from transformer_engine.pytorch.tensor import float8_tensor, utils
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    device.has_transformer_engine, device.has_gpu, torch.cuda.is_available = lambda: True, lambda: False, lambda: True
    device.fp8_problem = lambda recipe: None
    quantization.check_recipe_support = lambda recipe: None
    quantization.FP8GlobalStateManager.is_fp8_available = classmethod(lambda cls: (True, ""))
    utils.is_non_tn_fp8_gemm_supported = float8_tensor.is_non_tn_fp8_gemm_supported = lambda: False  # as on Hopper
    torch.compiler.set_stance("force_eager")

    def quantize(x: Tensor, quantizer, target=None, noop=None):
        if target is None:
            of, tensors = quantizer.create_metadata(x.shape, dtype=x.dtype), quantizer.alloc_tensors(x.shape, device=x.device)
            target = of["cls"].__tensor_unflatten__(tensors, of, x.shape, x.stride())
        if isinstance(quantizer, Float8BlockQuantizer):
            tiles = in_tiles(x)
            scale = scale_of(magnitudes(tiles), quantizer.force_pow_2_scales)
            put_blocks(target, out_of_tiles(rounded(tiles, scale[:, None, :, None]), x.shape), 1 / scale)
        else:
            own = getattr(quantizer, "scale", None)
            scale = scale_of(x.abs().amax().float().view(1), False) if own is None else own.view(1)
            target._data.copy_(rounded(x, scale).view(target._data.shape))
            target._scale_inv.copy_(1 / scale)
            if target._transpose is not None and x.dim() == 2:
                target._transpose.copy_(target._data.t())
                target._transpose_invalid = False
        return target

    def transpose(data: Tensor, kind, out: Tensor | None = None) -> Tensor:
        return data.t().contiguous() if out is None else out.copy_(data.t())

    def partial_magnitudes(master: Tensor, found: Tensor, rows: int, width: int, first: int, block: int) -> None:
        own = magnitudes(in_tiles(in_place(master, rows, width, first)))
        found[:, : own.shape[1]] = own

    def partial_cast(master: Tensor, part: Tensor, scale: Tensor, rows: int, width: int, first: int, block: int, kind) -> None:
        tiles = in_tiles(in_place(master, rows, width, first))
        numbers = out_of_tiles(rounded(tiles, scale[:, None, : tiles.shape[2], None]), (rows, width)).flatten()
        part.copy_(numbers[first : first + master.numel()])

    def scales(operation, overflow, lists: list[list[Tensor]], most: float, power_of_two: bool, epsilon: float) -> None:
        assert operation is utils.multi_tensor_compute_scale_and_scale_inv and (most, epsilon) == (448.0, 0.0)
        for magnitude, scale, inverse in zip(*lists, strict=True):
            scale.copy_(scale_of(magnitude, power_of_two))
            inverse.copy_(1 / scale)

    kernels.quantize, kernels.fp8_transpose = quantize, transpose
    kernels.dequantize = lambda x, kind: (x._data.view(E4M3).float() * x._scale_inv).to(TE_DType_To_Torch[DType.cast(kind)])
    kernels.compute_amax = lambda x, found: found.copy_(x.abs().amax())
    kernels.fp8_block_scaling_compute_partial_amax, kernels.fp8_block_scaling_partial_cast = partial_magnitudes, partial_cast
    utils.multi_tensor_applier = scales


def rounded(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() * scale).clamp(-448, 448).to(E4M3).view(torch.uint8)


def scale_of(magnitude: Tensor, power_of_two: bool) -> Tensor:
    scale = torch.where(magnitude > 0, 448 / magnitude, 1.0)
    return 2 ** scale.log2().floor() if power_of_two else scale


def in_tiles(x: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % BLOCK, 0, -x.shape[0] % BLOCK))
    return padded.view(len(padded) // BLOCK, BLOCK, -1, BLOCK)


def out_of_tiles(tiles: Tensor, shape: tuple[int, int]) -> Tensor:
    return tiles.reshape(tiles.shape[0] * BLOCK, -1)[: shape[0], : shape[1]]


def magnitudes(tiles: Tensor) -> Tensor:
    return tiles.abs().amax((1, 3)).float()


def in_place(master: Tensor, rows: int, width: int, first: int) -> Tensor:
    """A matrix of which only this part is there; the rest is 0."""
    matrix = master.new_zeros(rows * width)
    matrix[first : first + master.numel()] = master.flatten()
    return matrix.view(rows, width)


def put_blocks(target, numbers: Tensor, inverse: Tensor) -> None:
    """Numbers and scales of blocks along the rows, and along the columns where those are kept; scales are padded to fours."""
    for data, scales, own, transposed in (
        (target._rowwise_data, target._rowwise_scale_inv, numbers, inverse),
        (target._columnwise_data, target._columnwise_scale_inv, numbers.t(), inverse.t()),
    ):
        if data is not None:
            data.copy_(own)
            scales.zero_()[:, : transposed.shape[1]] = transposed


if __name__ == "__main__":
    packages = ("torch", "megatron-core", "transformer-engine")
    made_by = "tests/distributed/te_weights.py: " + ", ".join(f"{p} {version(p)}" for p in packages)
    steps = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            steps[name_of(case)], types = run_ranks(recorded, case[-1], case, Path(folder), timeout=300)[0]
        print(name_of(case), *types, file=sys.stderr)
    FILE.write_text(json.dumps({"produced_by": made_by, "steps": steps}, separators=(",", ":")) + "\n")
