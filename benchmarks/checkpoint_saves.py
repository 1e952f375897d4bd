"""How long training stands still for a checkpoint that is waited for and for one written meanwhile, and what verifying one costs.

    python benchmarks/checkpoint_saves.py FOLDER   # a random Llama of 57 M weights in float32: 1.8 GB at most, removed again

Prints seconds, the best of two.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from megagrpo.bridge.checksums import verify_others, verify_tensors
from megagrpo.config import RunConfig
from megagrpo.families.config import parse_hf_config
from megagrpo.parallel.layout import init_layout
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.records.checkpoint import Checkpointer
from megagrpo.types import TrainState

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


def timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


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
            parameter.main_grad = torch.randn(parameter.shape)
    policy.update()  # makes the moments
    saver = Checkpointer(folder / "checkpoints", layout, policy, 1, model)
    found: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        found.setdefault(name, []).append(seconds)

    for step in range(1, 4, 2):
        note("waited for: training stands still", timed(lambda step=step: saver.save(TrainState(step=step))))
        began = time.perf_counter()
        saver.start(TrainState(step=step + 1), background=True)
        note("meanwhile: training stands still", time.perf_counter() - began)
        saver.finish(wait=True)
        note("meanwhile: until it is complete", time.perf_counter() - began)
        path = saver.latest()
        note("load, verified", timed(lambda path=path: saver.load(path)))
        note("of that, to verify", timed(lambda path=path: (verify_others(path), verify_tensors(path))))
    found["GB"] = [sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) / 1e9]
    layout.close()
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    try:
        for name, values in measure(folder).items():
            print(f"{name:36} {min(values):6.2f}")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
