"""The memory that `megagrpo plan` predicts, compared with the measured peak of ranks, by phase and layout.

    python benchmarks/plan_memory.py [LAYOUT ...]

On GPUs torch's allocator reports the peak of each rank. On a CPU every rank counts the bytes of all living tensor
storages, starting before it builds the model: each storage that an operation returns, in backward passes too, until it
is freed. Temporary memory inside an operation is not counted there. Weights are random. Micro-batches are full, of
sequences longer than those whose scores CPU attention keeps. The comparison uses the fullest rank. For a checkpoint
(`saving`: the peak of collecting it, `writing`: memory until it is written) and for `offload` (memory offloaded while
vLLM generates) it uses the sum of all ranks, which share the host's memory.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megagrpo.config import RunConfig
from megagrpo.data.packing.sample_packing import pack, packing_rules
from megagrpo.families.hf_config import HfConfig, parse_hf_config
from megagrpo.planner.costs.engine_memory import GIB
from megagrpo.planner.costs.planned_memory import host_memory, trainer_memory
from megagrpo.platform import device
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.platform.parallel.spawn import run_ranks
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.records.checkpoints.checkpoint import Checkpointer
from megagrpo.train_types import LossInputs, LossOutput, TrainSample, TrainState
from megagrpo.trainer.gpu.state_offload import Offload
from megagrpo.weights.bridge import megatron_io

MIB = 2**20
LENGTH = 256
TOKENS = 2048  # per micro-batch
HOST = ("saving", "writing", "offload")  # host memory in addition to the memory in use
DENSE = dict(
    model_type="qwen3", hidden_size=256, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4, head_dim=32
)
DENSE |= dict(intermediate_size=768, vocab_size=8192, max_position_embeddings=4096, tie_word_embeddings=False)
MIXED = DENSE | dict(
    model_type="qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=384, norm_topk_prob=True
)
LLAMA = DENSE | dict(
    model_type="llama", num_hidden_layers=12, hidden_size=384, num_attention_heads=12, intermediate_size=1024
)
LAYOUTS: dict[str, tuple[int, dict, dict[str, dict]]] = {  # ranks, model, sections of the config
    "one": (1, DENSE, {}),
    "bf16": (1, DENSE, {"model": {"precision": "bf16"}}),
    "recompute": (1, DENSE, {"model": {"recompute": "full"}}),
    "tp2": (2, DENSE, {"parallel": {"tp": 2, "sequence_parallel": True}}),
    "pp2": (2, DENSE, {"parallel": {"pp": 2}}),
    "dp2": (2, DENSE, {}),
    "cp2": (2, DENSE, {"parallel": {"cp": 2}}),
    "tp2_pp2": (4, DENSE, {"parallel": {"tp": 2, "pp": 2, "sequence_parallel": True}}),
    "ep2": (2, MIXED, {"parallel": {"ep": 2}}),
    "lora": (1, DENSE, {"lora": {"rank": 16}}),
    "llama": (1, LLAMA, {}),
    "llama_pp2_vpp2": (2, LLAMA, {"parallel": {"pp": 2, "vpp": 2}}),
    "tp2_etp2": (2, MIXED, {"parallel": {"tp": 2, "sequence_parallel": True}}),
}


class Bytes(TorchDispatchMode):
    """Counts the storages that operations return inside, and of registered tensors."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak, self.known = 0, 0, set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                self._add(tensor.untyped_storage())
        return found

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.alive += size
            self.peak = max(self.peak, self.alive)
            weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.alive -= size

    @contextmanager
    def phase(self, peaks: dict[str, float], name: str) -> Iterator[None]:
        """Record the peak inside, in MiB."""
        self.peak = self.alive
        yield
        peaks[name] = self.peak / MIB


class Allocated:
    """The interface of `Bytes` for a GPU: the bytes that torch's allocator reports."""

    def __enter__(self) -> Allocated:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    @property
    def alive(self) -> int:
        return torch.cuda.memory_allocated()

    @contextmanager
    def phase(self, peaks: dict[str, float], name: str) -> Iterator[None]:
        """Record the peak inside, in MiB."""
        torch.cuda.reset_peak_memory_stats()
        yield
        peaks[name] = torch.cuda.max_memory_allocated() / MIB


def config_of(sections: dict[str, dict]) -> RunConfig:
    base: dict[str, dict] = {
        "model": {"path": "random", "precision": "fp32"},
        "algorithm": {"beta": 0},
        "data": {"train": {"source": "none"}},
        "run": {"async_save": True},
        "rewards": {"functions": [{"function": "exact_number"}]},
        "rollout": {"max_prompt_length": 32, "max_completion_length": LENGTH - 32},
        "train": {"max_tokens_per_micro_batch": TOKENS, "distributed_optimizer": True, "share_prompts": False},
    }
    return RunConfig.model_validate(base | {name: base.get(name, {}) | section for name, section in sections.items()})


def measured(raw: dict, config: RunConfig, folder: Path, steps: int = 2) -> dict[str, float]:
    """Phase -> MiB of this rank at its peak. For a checkpoint in `folder`: saving -> additional MiB, writing -> MiB
    until it is written. offload -> MiB that leave the device."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    peaks: dict[str, float] = {}
    with Allocated() if device.has_gpu() else Bytes() as count:
        with count.phase(peaks, "load"):
            layout = init_layout(config.parallel)
            policy = MegatronPolicy(config, layout, parse_hf_config(raw))
            for parameter in (parameter for chunk in policy.chunks for parameter in chunk.parameters()):
                # like loading, one tensor at a time
                parameter.data.copy_(torch.empty_like(parameter).normal_(std=0.02))
            policy.weights_changed()
        batch = pack(samples(config, layout.dp_size), packing_rules(config, False), layout.dp_rank, layout.dp_size)
        for _ in range(steps):  # the first step creates the optimizer's state
            with count.phase(peaks, "logprobs"):
                policy.logprobs(batch)
            with count.phase(peaks, "train"):
                policy.train_step(batch, policy_gradient, batch.num_tokens)
        saver, before = Checkpointer(folder / "checkpoints", layout, policy, 1, folder), count.alive / MIB
        with count.phase(peaks, "saving"), _noting_copies(peaks):
            saver.start(TrainState(step=steps), background=config.run.async_save)
        peaks["saving"] -= before
        saver.finish(wait=True)
        offload = Offload(policy)
        offload.offload_all()
        peaks["offload"] = offload.host_bytes / MIB
    layout.close()
    return peaks


@contextmanager
def _noting_copies(peaks: dict[str, float]) -> Iterator[None]:
    """Record the copies that a rank is to write while all of them exist: a short write ends before `start` does."""

    def copy_and_note(lists: list, copy: bool) -> None:
        copied(lists, copy)
        peaks["writing"] = sum(tensor.nbytes for tensors in lists for _, tensor in tensors) / MIB

    copied = megatron_io._to_host
    with patch.object(megatron_io, "_to_host", copy_and_note):
        yield


def samples(config: RunConfig, dp: int) -> list[TrainSample]:
    """Two full micro-batches for each stage of each replica."""
    count = 2 * config.parallel.pp * dp * (TOKENS // LENGTH)
    mask = torch.arange(LENGTH) >= 32
    return [
        TrainSample(torch.randint(0, 8192, (LENGTH,)), mask, torch.full((LENGTH,), -9.0), 1.0) for _ in range(count)
    ]


def policy_gradient(inputs: LossInputs) -> LossOutput:
    rows = inputs.micro_batch
    return LossOutput(numerator=-(inputs.policy_logprobs * rows.advantages * rows.loss_mask).sum(), metrics={})


def predicted(model: HfConfig, config: RunConfig, ranks: int) -> dict[str, float]:
    """Phase -> MiB in the plan. The trainer's own layers activate in one operation, which keeps what the fused kernel
    keeps."""
    if not device.has_transformer_engine():
        config = config.model_copy(update=dict(model=config.model.model_copy(update=dict(fusions=["bias_activation"]))))
    memory = trainer_memory(config, model, ranks // config.parallel.model_parallel_size, gpu=device.has_gpu())
    phases = {phase: sum(parts.values()) for phase, parts in memory.items()}
    host = host_memory(config, model, ranks) | {"offload": host_memory(config, model, ranks, gpu=True)["offload"]}
    return {phase: size * GIB / MIB for phase, size in (phases | host).items()}


def compare(name: str) -> dict[str, tuple[float, float]]:
    """Phase -> (measured, predicted) MiB of the fullest rank; for a checkpoint, of all ranks together."""
    ranks, raw, sections = LAYOUTS[name]
    config = config_of(sections)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(raw))
        found = run_ranks(measured, ranks, raw, config, Path(folder), timeout=300)
    planned = predicted(parse_hf_config(raw), config, ranks)
    of_ranks = {phase: [peaks[phase] for peaks in found] for phase in found[0]}
    return {phase: (sum(sizes) if phase in HOST else max(sizes), planned[phase]) for phase, sizes in of_ranks.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "layouts", nargs="*", metavar="LAYOUT", help=f"some of {', '.join(LAYOUTS)}; all when none is named"
    )
    wanted = parser.parse_args().layouts or LAYOUTS
    print("| layout | phase | measured MiB | planned MiB | |\n|---|---|---|---|---|")
    for name in wanted:
        for phase, (there, planned) in compare(name).items():
            print(f"| {name} | {phase} | {there:.1f} | {planned:.1f} | {planned / there - 1:+.1%} |", flush=True)


if __name__ == "__main__":
    main()
