"""The fused kernels compiled for Hopper, without a GPU: types, shared memory and registers have the required values."""

import re
import subprocess
from pathlib import Path

import pytest
from ranks import run_ranks

from megagrpo.policy.lm_head.fused_logprobs import FP8_TILES, GRADIENT_TILE, GROUP, TILES
from megagrpo.policy.lm_head.vocab_shard import LOWEST

SHARED_MEMORY = 227 * 1024  # bytes available to one program on compute capability 9.0
NUMBERS = dict(num_tokens="i32", num_columns="i32", hidden_size="i32", width="i32", num_splits="i32") | dict(
    temperature="fp32", cap="fp32"
)
ROWS = ("statistics", "hidden_scale", "weight_scale", "references", "normaliser", "entropy", "at_labels", "at_entropy")
TYPES = NUMBERS | dict.fromkeys(ROWS, "*fp32") | dict(columns_of_labels="*i64", stored="*fp16", gradient="*bf16")


def compiled(kernel: str, types: dict[str, str], constants: dict, warps: int, stages: int, cache: Path) -> dict:
    """Shared memory in bytes, registers and spilled bytes per thread, and the PTX of a kernel compiled for compute
    capability 9.0."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megagrpo.policy.lm_head import fused_logprobs_kernels

    triton.knobs.cache.dir = str(cache)
    function = getattr(fused_logprobs_kernels, kernel)
    names = function.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if signature[n][0] == "*" or n in ("hidden_size", "width")
    }
    source = ASTSource(function, signature, {(names.index(name),): value for name, value in constants.items()}, aligned)
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=warps, num_stages=stages))
    cubin = cache / f"{kernel}.cubin"
    cubin.write_bytes(found.asm["cubin"])
    tool = Path(triton.__path__[0]) / "backends/nvidia/bin/cuobjdump"
    said = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    registers, spilled = re.search(r"REG:(\d+) STACK:(\d+)", said).groups()
    return dict(shared=found.metadata.shared, registers=int(registers), spilled=int(spilled), ptx=found.asm["ptx"])


def statistics_kernel(fp8: str | None, keep: bool, capped: bool, cache: Path) -> dict:
    tiles = TILES if fp8 is None else FP8_TILES
    element = "bf16" if fp8 is None else "fp8e4nv"
    constants = dict(LOWEST=LOWEST, GROUP=GROUP, FP8=fp8, CAPPED=capped, STORE=keep, WIDEN=False)
    constants |= dict(BLOCK_N=tiles.tokens, BLOCK_V=tiles.vocab, BLOCK_H=tiles.hidden)
    constants |= dict(hidden_scale=None, weight_scale=None) if fp8 is None else {}
    constants |= {} if keep else dict(stored=None, references=None)
    blocks = dict(
        hidden=f"tensordesc<{element}[{tiles.tokens},{tiles.hidden}]>",
        weight=f"tensordesc<{element}[{tiles.vocab},{tiles.hidden}]>",
        stored=f"tensordesc<fp16[{tiles.tokens},{tiles.vocab // 2}]>",
    )
    return compiled("head_statistics", TYPES | blocks, constants, tiles.warps, tiles.stages, cache)


@pytest.mark.full
@pytest.mark.parametrize(
    "fp8, keep, capped",
    [
        (None, False, False),
        (None, True, False),
        (None, True, True),
        ("tensorwise", False, False),
        ("tensorwise", True, False),
        ("blockwise", False, False),
        ("blockwise", True, True),
    ],
)
def test_the_head_kernel_fits_on_hopper_uses_its_units_and_spills_nothing(fp8, keep, capped, tmp_path):
    (found,) = run_ranks(statistics_kernel, 1, fp8, keep, capped, tmp_path)
    print({name: value for name, value in found.items() if name != "ptx"})
    assert found["shared"] <= SHARED_MEMORY and found["spilled"] == 0
    assert "wgmma.mma_async" in found["ptx"] and "cp.async.bulk.tensor" in found["ptx"]


@pytest.mark.full
@pytest.mark.parametrize("capped", [False, True])
def test_the_gradient_kernel_compiles_for_hopper(capped, tmp_path):
    constants = dict(BLOCK_N=GRADIENT_TILE, BLOCK_V=TILES.vocab, CAPPED=capped)
    (found,) = run_ranks(compiled, 1, "gradient_of_stored", TYPES, constants, 4, 3, tmp_path)
    print({name: value for name, value in found.items() if name != "ptx"})
    assert found["spilled"] == 0 and "ld.global.v4" in found["ptx"]
