"""Measures how long a checkpoint stops training, in the foreground and in the background, and the cost of its
verification.

    python benchmarks/checkpoint_saves.py FOLDER

The checkpoint is of a random Llama with 57 M weights in float32. FOLDER must not exist; it takes up to 1.8 GB and is
removed at the end. Prints seconds, the best of two.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from megagrpo.config import RunConfig
from megagrpo.families.hf_config import parse_hf_config
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.records.checkpoints.checkpoint import Checkpointer
from megagrpo.records.checkpoints.run_files import newest_checkpoint
from megagrpo.train_types import TrainState
from megagrpo.weights.files.file_checksums import verify_others, verify_tensors

LLAMA = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=9,
    num_key_value_heads=3,
    vocab_size=49152,
    tie_word_embeddings=True,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
)


def timed(action: Callable[..., object], *inputs: object) -> float:
    began = time.perf_counter()
    action(*inputs)
    return time.perf_counter() - began


def verify(path: Path) -> None:
    verify_others(path)
    verify_tensors(path)


def measure(folder: Path) -> dict[str, list[float]]:
    model = folder / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(LLAMA))
    values = dict(
        model=dict(path=str(model), precision="fp32"),
        data=dict(train=dict(source="none")),
        rewards=dict(functions=[dict(function="exact_number")]),
    )
    config = RunConfig.model_validate(values)
    layout = init_layout(config.parallel)
    policy = MegatronPolicy(config, layout, parse_hf_config(LLAMA))
    for chunk in policy.chunks:
        for parameter in chunk.parameters():
            parameter.main_grad = torch.randn(parameter.shape)  # type: ignore[attr-defined]  # as Megatron's buffers do
    policy.update()  # creates the moments
    saver = Checkpointer(folder / "checkpoints", layout, policy, 1, model)
    found: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        found.setdefault(name, []).append(seconds)

    for step in range(1, 4, 2):
        began = time.perf_counter()
        saver.start(TrainState(step=step), background=False)
        saver.finish(wait=True)
        note("foreground: training stops for", time.perf_counter() - began)
        began = time.perf_counter()
        saver.start(TrainState(step=step + 1), background=True)
        note("background: training stops for", time.perf_counter() - began)
        saver.finish(wait=True)
        note("background: complete after", time.perf_counter() - began)
        path = newest_checkpoint(saver.folder)
        note("load and verify", timed(saver.load, path))
        note("verify", timed(verify, path))
    found["GB"] = [sum(file.stat().st_size for file in filter(Path.is_file, path.rglob("*"))) / 1e9]
    layout.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder to create for model and checkpoints")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True)
    try:
        for name, values in measure(folder).items():
            print(f"{name:36} {min(values):6.2f}")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
