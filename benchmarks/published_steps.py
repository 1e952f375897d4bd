"""The seconds that `megagrpo plan` predicts beside those of GRPO steps that NeMo-RL has published.

    python benchmarks/published_steps.py

Published: NeMo-RL's performance-summary.md, versions 0.4 and 0.6: GRPO on OpenMathInstruct-2, on-policy, DGX H100, bf16,
Megatron, vLLM on the same GPUs; of each row the whole step. Not published there, and assumed: prompts of 150 tokens, packed micro-batches
as long as the longest sample, all layers recomputed but for the 8B model, vLLM in 60 % of the GPU, log-probs of policy and reference before
training.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path

from megagrpo.config import load_config
from megagrpo.plan.gpus import GPUS
from megagrpo.plan.times import Lengths, StepTimes, step_times
from megagrpo.policy.hf_config import nearly_even, parse_hf_config

REPOSITORY = Path(__file__).parents[1]
PROMPT = 150
LLAMA_8B = dict(model_type="llama", hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8)
LLAMA_8B |= dict(intermediate_size=14336, vocab_size=128256, max_position_embeddings=131072, tie_word_embeddings=False)
QWEN_32B = dict(model_type="qwen3", hidden_size=5120, num_hidden_layers=64, num_attention_heads=64, num_key_value_heads=8, head_dim=128)
QWEN_32B |= dict(intermediate_size=25600, vocab_size=151936, max_position_embeddings=40960, tie_word_embeddings=False)
QWEN_30B = json.loads((REPOSITORY / "configs/models/Qwen/Qwen3-30B-A3B/config.json").read_text())
QWEN_235B = QWEN_30B | dict(hidden_size=4096, num_hidden_layers=94, num_attention_heads=64, moe_intermediate_size=1536)
DEEPSEEK = json.loads((REPOSITORY / "configs/models/deepseek-ai/DeepSeek-V3/config.json").read_text())


@dataclass(frozen=True)
class Row:
    """A published row: layout of the trainer (tp, cp, pp, ep), tp of generation, samples a step, mean and longest sample, updates."""

    name: str
    model: dict
    gpus: int
    layout: tuple[int, int, int, int]
    server_tp: int
    samples: int
    mean: int
    longest: int
    updates: int
    seconds: float


ROWS = (
    Row("Llama-3.1-8B, 0.4", LLAMA_8B, 16, (1, 1, 2, 1), 1, 2048, 1060, 4096, 4, 97.7),
    Row("Qwen3-32B, 0.4", QWEN_32B, 32, (4, 1, 4, 1), 4, 2048, 3206, 4096, 4, 393),
    Row("Qwen3-30B-A3B, 0.4", QWEN_30B, 32, (2, 1, 1, 8), 4, 2048, 3154, 4096, 4, 225),
    Row("Qwen3-30B-A3B, 0.6", QWEN_30B, 32, (1, 1, 1, 8), 2, 2048, 3203, 4096, 4, 192),
    Row("Qwen3-235B-A22B, 0.4", QWEN_235B, 128, (2, 2, 8, 16), 16, 512, 5671, 8192, 1, 506),
    Row("Qwen3-235B-A22B, 0.6", QWEN_235B, 128, (2, 2, 8, 16), 16, 512, 5698, 8192, 1, 395),
    Row("DeepSeek-V3, 0.4", DEEPSEEK, 256, (1, 1, 16, 16), 32, 512, 745, 1536, 1, 154),
    Row("DeepSeek-V3, 0.6", DEEPSEEK, 256, (1, 1, 16, 16), 32, 512, 701, 1536, 1, 134),
)


def predicted(row: Row) -> StepTimes:
    model = parse_hf_config(row.model)
    tp, cp, pp, ep = row.layout
    keys = {
        "model.precision": "bf16",
        "model.recompute": "none" if row.model is LLAMA_8B else "full",
        "parallel.tp": tp,
        "parallel.cp": cp,
        "parallel.pp": pp,
        "parallel.ep": ep,
        "parallel.etp": 1 if model.experts else tp,
        "parallel.sequence_parallel": str(tp > 1).lower(),
        "rollout.servers": row.gpus // row.server_tp,
        "rollout.tp": row.server_tp,
        "rollout.prompts_per_step": row.samples // 32,
        "rollout.num_generations": 32,
        "rollout.max_prompt_length": 256,
        "rollout.max_completion_length": row.longest - 256,
        "rollout.gpu_memory_utilization": 0.6,
        "rollout.max_num_seqs": 256,
        "train.max_tokens_per_micro_batch": row.longest,
        "train.distributed_optimizer": "true",
        "algorithm.beta": 0.01,
        "algorithm.steps_per_generation": row.updates,
    }
    if model.num_layers % pp:
        keys["parallel.pipeline_layers"] = nearly_even(model.num_layers, pp)
    overrides = [f"{key}={value}" for key, value in keys.items()]
    config = load_config(REPOSITORY / "configs" / "quickstart.yaml", [*overrides, "algorithm.num_iterations=1"])
    lengths = Lengths(PROMPT, row.mean - PROMPT, row.longest - 256)
    made = step_times(config, model, row.gpus, GPUS["h100"], lengths)
    # Of one optimizer step there are no old log-probs with us; NeMo-RL computes them always.
    again = made.seconds["logprobs"] if config.algorithm.updates_per_step == 1 else 0
    return replace(made, seconds=made.seconds | {"logprobs": made.seconds["logprobs"] + again})


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("| model, version | GPUs | published s | predicted s | | generate | logprobs | train | sync |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in ROWS:
        made = predicted(row)
        phases = " | ".join(f"{made.seconds[phase]:.1f}" for phase in ("generate", "logprobs", "train", "sync"))
        print(f"| {row.name} | {row.gpus} | {row.seconds:g} | {made.step:.0f} | {made.step / row.seconds - 1:+.0%} | {phases} |")


if __name__ == "__main__":
    main()
