"""Transformer Engine's FP8 weights after two steps of Megatron's optimizer: recorded where the package is installed,
compared everywhere.

    python tests/distributed/te_weights.py        # writes tests/vectors/te_weights.json; Transformer Engine, and no
    GPU, is needed

See te_manifest.py for the environment. Tensors, buffers and optimizer are the original ones; only the kernels are
replaced (te_kernels.py). The recording also offloads and reloads the weights, swaps them for the reference's, and saves
and loads them.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zlib
from importlib.metadata import version
from pathlib import Path

if __name__ == "__main__":  # for `tests.family_examples`
    sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from checkpoint_now import save_now
from ranks import run_ranks
from te_kernels import replace_kernels
from test_fp8_weights import settings, start, whole

from megagrpo.config import ParallelSection
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.fp8.tensor import dense, is_fp8, parts
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.optimizer.policy_optimizer import parts_of
from megagrpo.policy.reference import Reference
from megagrpo.records.checkpoints.checkpoint import Checkpointer
from megagrpo.records.checkpoints.run_files import newest_checkpoint
from megagrpo.train_types import TrainState
from megagrpo.trainer.gpu.state_offload import Offload

FILE = Path(__file__).parents[1] / "vectors" / "te_weights.json"
CASES = [
    (recipe, shape, ranks)
    for recipe in ("tensorwise", "blockwise")
    for shape, ranks in (("qwen2_untied", 2), ("qwen3_moe", 1))
]


def name_of(case: tuple) -> str:
    """The key of a case in the file."""
    return " ".join(map(str, case))


def sums(policy: MegatronPolicy) -> list[int]:
    """CRC-32s of the dense numbers of all FP8 weights, sorted, because Transformer Engine names experts differently."""
    weights = [p for p in policy.chunks[0].parameters() if is_fp8(p)]
    return sorted(zlib.crc32(dense(p).contiguous().view(torch.uint8).numpy().tobytes()) for p in weights)


def take_step(policy: MegatronPolicy, number: int) -> None:
    """An optimizer step with the same fixed gradients everywhere, without a forward pass."""
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
    """A policy with the same weights everywhere. Gradients are not clipped, because that needs another kernel."""
    recipe, shape, _ = case
    policy, reference = start(settings("dp2", recipe, True), shape, init_layout(ParallelSection()))
    for part in parts_of(policy.optimizer):
        part.config.clip_grad = 0.0
    return policy, reference


def in_steps(case: tuple) -> list[list[int]]:
    """`sums` at the start and after each of two steps."""
    policy, _ = started(case)
    found = [sums(policy)]
    for number in range(2):
        take_step(policy, number)
        found.append(sums(policy))
    return found


# ------------------------------------------------------------------------------------------------- where it is recorded


def recorded(case: tuple, folder: Path) -> tuple[list[list[int]], list[str]]:
    """Like `in_steps` on Transformer Engine's tensors, with every operation on weights that can happen between
    steps."""
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
    offload.offload_all()
    assert not any(part.untyped_storage().nbytes() for p in policy.chunks[0].parameters() for part in parts(p))
    offload.load_all()
    (folder / "config.json").write_text("{}")
    saver = Checkpointer(folder / "saved", policy.layout, policy, 1, folder)
    save_now(saver, TrainState(step=2))
    take_step(policy, 2)
    assert sums(policy) != found[2]
    saver.load(newest_checkpoint(saver.folder))
    check_second_copy(policy)
    assert sums(policy) == found[2] and all(
        torch.equal(one, other) for one, other in zip(before, whole(policy), strict=True)
    )
    return found, sorted({type(p).__name__ for p in policy.chunks[0].parameters() if is_fp8(p)})


def check_second_copy(policy: MegatronPolicy) -> None:
    """The input gradient of a linear uses the transpose of the forward pass's weight."""
    for weight in filter(is_fp8, policy.chunks[0].parameters()):
        if hasattr(weight, "_columnwise_data"):
            assert torch.equal(weight._columnwise_data, weight._rowwise_data.t())
        else:
            assert not weight._transpose_invalid and torch.equal(weight._transpose, weight._data.t())


if __name__ == "__main__":
    packages = ("torch", "megatron-core", "transformer-engine")
    made_by = "tests/distributed/te_weights.py: " + ", ".join(f"{p} {version(p)}" for p in packages)
    steps = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            steps[name_of(case)], types = run_ranks(recorded, case[-1], case, Path(folder), timeout=300)[0]
        print(name_of(case), *types, file=sys.stderr)
    FILE.write_text(json.dumps({"produced_by": made_by, "steps": steps}, separators=(",", ":")) + "\n")
