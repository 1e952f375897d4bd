"""Experts in FP8 blocks of 128 x 128: after every sync a worker holds the bytes and scales that vLLM's own formula gives
for its part of the experts, also where 128 does not divide their width. Responses are those of the dequantized model."""

from __future__ import annotations

import statistics
from hashlib import sha256

import httpx
import pytest
import torch
from ranks import run_ranks
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad

from megagrpo.sync.trainer_side.sync import WeightSync
from tests.e2e import tiny_servers
from tests.e2e.tiny_servers import (
    EXPERTS,
    V3,
    WORKERS_SHARE_MEMORY,
    connect,
    greedy,
    launch,
    model_folder,
    naive_logprobs,
    shards,
    weights,
)
from tests.rank_fakes import OneRank

pytestmark = pytest.mark.skipif(not WORKERS_SHARE_MEMORY, reason="vLLM's FP8 blocks on CPUs need AVX-512")
SIDE, MOST = 128, 448.0  # of a block; the largest value of e4m3
tiny_servers.CONFIGS |= {
    "blocks_v3": ("DeepseekV3Config", V3 | dict(q_lora_rank=64, moe_intermediate_size=256)),
    "odd_v3": ("DeepseekV3Config", V3 | dict(hidden_size=160, q_lora_rank=64, moe_intermediate_size=320)),
    "odd_qwen3": ("Qwen3MoeConfig", EXPERTS | dict(num_experts=32)),
}
# kind, workers, whether whole experts are distributed
CASES = {
    "odd, two workers": ("odd_v3", 2, False),
    "borders of blocks, two workers": ("blocks_v3", 2, False),
    "odd, whole experts": ("odd_v3", 2, True),
    "narrower than a block": ("odd_qwen3", 1, False),
}
LOADED_ONLY = ("odd_v3",)  # the kernels of CPUs do not compute with hidden sizes that 128 does not divide
USUAL = ("narrower than a block",)


def quantized(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes [rows, width] and the scales [row blocks, width blocks] of a bf16 matrix, block by block."""
    rows, width = matrix.shape
    numbers = torch.empty(rows, width, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // SIDE), -(-width // SIDE))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = slice(i * SIDE, (i + 1) * SIDE), slice(j * SIDE, (j + 1) * SIDE)
            scales[i, j] = matrix[block].abs().max().float().clamp(1e-4) / MOST
            numbers[block] = (matrix[block].float() * (1.0 / scales[i, j])).to(torch.float8_e4m3fn)
    return numbers, scales


def dequantized(matrix: Tensor) -> Tensor:
    """A matrix rounded to FP8 blocks, in float32."""
    numbers, scales = quantized(matrix)
    return (
        numbers.float()
        * scales.repeat_interleave(SIDE, 0)[: len(matrix)].repeat_interleave(SIDE, 1)[:, : matrix.shape[1]]
    )


def padded(matrix: Tensor) -> Tensor:
    """The matrix with zeros up to whole blocks."""
    rows, width = matrix.shape
    return pad(matrix, (0, -width % SIDE, 0, -rows % SIDE))


def test_the_formula_of_this_file_is_vllms_and_its_error_is_that_of_e4m3():
    run_ranks(compare_formulas, 1)  # vLLM's starts threads of autograd, which would be in every later fork


def compare_formulas() -> None:
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    torch.compiler.set_stance("force_eager")  # the same formula without minutes of compilation
    torch.manual_seed(0)
    for shape in ((128, 256), (160, 320), (1, 129), (257, 96)):
        matrix = (torch.randn(shape) * torch.logspace(-4, 1, shape[1])).bfloat16()
        matrix[0, 0] = 0
        numbers, scales = per_block_cast_to_fp8(matrix, block_size=[SIDE, SIDE], use_ue8m0=False)
        ours, our_scales = quantized(matrix)
        assert torch.equal(numbers.view(torch.uint8), ours.view(torch.uint8)) and torch.equal(scales, our_scales)
        back = dequantized(matrix)
        of_element = scales.repeat_interleave(SIDE, 0)[: shape[0]].repeat_interleave(SIDE, 1)[:, : shape[1]]
        # three bits of mantissa, and the smallest number is 2^-9
        bound = torch.maximum(matrix.float().abs() / 16, of_element / 1024) * 1.0001
        assert ((back - matrix.float()).abs() <= bound).all()


def described(tensor: Tensor) -> list:
    """What fp8_without_amx.py says of these bytes."""
    return [str(tensor.dtype), list(tensor.shape), sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()]


def experts_of_worker(folder, kind: str, worker: int, workers: int, whole: bool) -> dict[str, list]:
    """What a worker's experts must be: parameter -> bytes or scales, in the layout of vLLM's kernel."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import prepare_fp8_moe_layer_for_cpu

    held = {name: tensor.bfloat16() for name, tensor in weights(folder).items() if ".mlp.experts." in name}
    layers = sorted({name.partition(".experts.")[0] for name in held})
    found = {}
    for layer in layers:
        of_layer = [name for name in held if name.startswith(f"{layer}.experts.") and "gate_proj" in name]
        numbers = list(range(len(of_layer)))
        numbers = numbers[worker * len(numbers) // workers :][: len(numbers) // workers] if whole else numbers
        parts: dict[str, list] = {"w13": [], "w2": []}
        for number in numbers:
            gate, up, down = (held[f"{layer}.experts.{number}.{name}_proj.weight"] for name in ("gate", "up", "down"))
            if not whole:
                gate, up, down = (x.chunk(workers, dim)[worker] for x, dim in ((gate, 0), (up, 0), (down, 1)))
            parts["w13"].append(quantized(torch.cat([padded(gate), padded(up)])))
            parts["w2"].append(quantized(padded(down)))
        packed = prepare_fp8_moe_layer_for_cpu(*(torch.stack([n for n, _ in parts[name]]) for name in parts))
        for name, numbers_of in zip(parts, packed, strict=True):
            base = f"{layer}.experts.routed_experts.{name}_weight"
            found[base] = described(numbers_of)
            found[f"{base}_scale_inv"] = described(torch.stack([scales for _, scales in parts[name]]))
    return found


def dequantized_folder(folder, kind: str):
    """The model with the weights that vLLM computes with, for transformers. The router of Qwen3 is quantized too."""
    target = folder.with_name(f"{folder.name}_rounded")
    target.mkdir(exist_ok=True)
    linear = [name for name, t in weights(folder).items() if t.dim() == 2 and ".layers." in name]
    keep = [name for name in linear if name.endswith("mlp.gate.weight") and "qwen3" not in kind]
    rounded = {
        name: dequantized(tensor.bfloat16()) if name in linear and name not in keep else tensor.bfloat16().float()
        for name, tensor in weights(folder).items()
    }
    save_file(rounded, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    return target


@pytest.mark.full
@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[] if name in USUAL else pytest.mark.full) for name in CASES]
)
def test_every_sync_gives_workers_the_blocks_of_vllms_formula(case):
    kind, workers, whole = CASES[case]
    folders = model_folder(kind, 0), model_folder(kind, 1)
    options = dict(tp=workers, expert_parallel=whole, workers="fp8_without_amx.Workers")
    launcher = launch(folders[0], f"blocks_{case}", dtype="bfloat16", quantization="fp8_per_block", **options)
    try:
        running = connect(launcher, folders[0])
        url = running.engine.urls[0]

        def held() -> list[dict[str, list]]:
            return httpx.post(f"{url}/collective_rpc", json={"method": "parameters"}, timeout=60).json()["results"]

        loaded = held()
        expected = [
            [run_ranks(experts_of_worker, 1, folder, kind, worker, workers, whole)[0] for worker in range(workers)]
            for folder in folders
        ]
        with WeightSync(running.engine, OneRank(), "bfloat16") as sync:
            # the loaders run once; later updates replay their copies
            for number, (source, experts) in enumerate(zip(folders * 2, expected * 2, strict=True)):
                sync.push(shards(source), number + 1)
                for worker, blocks in zip(held(), experts, strict=True):
                    assert {name: worker[name] for name in blocks} == blocks
                assert (held() == loaded) == (source == folders[0])
        assert all(experts_of.items() <= worker.items() for experts_of, worker in zip(expected[0], loaded, strict=True))
        answers = greedy(running.engine) if kind not in LOADED_ONLY else []
    finally:
        launcher.stop()
    if not answers:
        return
    exact, rounded = (
        statistics.median(
            abs(a - b)
            for prompt, (ids, logprobs) in zip(tiny_servers.PROMPTS, answers, strict=True)
            for a, b in zip(logprobs, naive_logprobs(folder, prompt, ids).tolist(), strict=True)
        )
        for folder in (folders[1], dequantized_folder(folders[1], kind))
    )
    assert rounded < exact, (rounded, exact)
