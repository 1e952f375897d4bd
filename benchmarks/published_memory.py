"""Memory and seconds that `megagrpo plan` predicts for a training rank, compared with published numbers of
Megatron-SWIFT.

    python benchmarks/published_memory.py

Published: first lines of scripts in examples/megatron of ms-swift (Aug 2026), which give all settings; those with
seconds also in its Quick-start.md, which names the GPUs, A800. They are supervised: a micro-batch is one packed
sequence of 8,192 tokens, and a timed step has
16. The memory is `torch.cuda.max_memory_reserved` of the fullest rank, rounded by its authors: what PyTorch took from
the GPU, so more than the tensors at their peak, which the plan counts.

Megatron's loss keeps all logits of a micro-batch at once, this project's trainer only a chunk's. The comparison adds 10
bytes for each logit: bf16 logits, and float32 probabilities and gradient.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path

from megagrpo.config import RunConfig, load_config
from megagrpo.families.hf_config import parse_hf_config
from megagrpo.planner.costs.engine_memory import GIB
from megagrpo.planner.costs.gpu_specs import GPUS
from megagrpo.planner.costs.planned_memory import stage_memory
from megagrpo.planner.costs.workload import Lengths
from megagrpo.planner.times.step_times import step_times

REPOSITORY = Path(__file__).parents[1]
TOKENS, SEQUENCES = 8192, 16
LOGIT_BYTES = 2 + 4 + 4
QWEN2_14B = dict(
    model_type="qwen2", hidden_size=5120, num_hidden_layers=48, num_attention_heads=40, num_key_value_heads=8
)
QWEN2_14B |= dict(intermediate_size=13824, vocab_size=152064, max_position_embeddings=131072, tie_word_embeddings=False)
QWEN3_14B = dict(
    model_type="qwen3",
    hidden_size=5120,
    num_hidden_layers=40,
    num_attention_heads=40,
    num_key_value_heads=8,
    head_dim=128,
)
QWEN3_14B |= dict(intermediate_size=17408, vocab_size=151936, max_position_embeddings=40960, tie_word_embeddings=False)
QWEN_30B = json.loads((REPOSITORY / "configs/models/Qwen/Qwen3-30B-A3B/config.json").read_text())
DEEPSEEK = json.loads((REPOSITORY / "configs/models/deepseek-ai/DeepSeek-V3/config.json").read_text())
MOONLIGHT = DEEPSEEK | dict(
    hidden_size=2048, num_hidden_layers=27, num_attention_heads=16, num_key_value_heads=16, intermediate_size=11264
)
MOONLIGHT |= dict(
    n_routed_experts=64, num_experts_per_tok=6, moe_intermediate_size=1408, n_shared_experts=2, first_k_dense_replace=1
)
MOONLIGHT |= dict(n_group=1, topk_group=1, q_lora_rank=None, vocab_size=163840, num_nextn_predict_layers=0)


@dataclass(frozen=True)
class Row:
    """A published run: script, model, GPUs, (tp, pp, ep), layers of the stages, recomputation, type of the moments,
    GiB, and seconds of a step on A800; 0 where the kind of GPU is not published."""

    script: str
    name: str
    model: dict
    gpus: int
    layout: tuple[int, int, int]
    layers: tuple[int, ...]
    recompute: str
    moments: str
    gib: float
    seconds: float = 0


ROWS = (
    Row("base_to_chat.sh", "Qwen2.5-14B", QWEN2_14B, 8, (4, 1, 1), (48,), "selective", "fp32", 65, 9.04),
    Row("fp8/benchmark.sh, bf16", "Qwen3-14B", QWEN3_14B, 8, (4, 1, 1), (40,), "selective", "bf16", 52),
    Row("moe/qwen3_moe.sh", "Qwen3-30B-A3B", QWEN_30B, 16, (1, 2, 8), (24, 24), "full", "fp32", 60, 9.6),
    Row("mcore_bridge/full/moe.sh", "Qwen3-30B-A3B", QWEN_30B, 8, (4, 2, 4), (25, 23), "full", "fp32", 76),
    Row("moe/deepseek_v3.sh", "Moonlight-16B-A3B", MOONLIGHT, 8, (1, 2, 4), (14, 13), "full", "fp32", 60),
)


def config_of(row: Row) -> RunConfig:
    model, (tp, pp, ep) = parse_hf_config(row.model), row.layout
    keys = {
        "model.precision": "bf16",
        "model.recompute": row.recompute,
        "model.fusions": "[rope, bias_activation]",  # Megatron's defaults
        "parallel.tp": tp,
        "parallel.pp": pp,
        "parallel.ep": ep,
        "parallel.sequence_parallel": str(tp > 1).lower(),
        "algorithm.beta": 0,
        "rollout.prompts_per_step": SEQUENCES // 2,
        "rollout.num_generations": 2,
        "rollout.max_completion_length": TOKENS - 64,
        "train.max_tokens_per_micro_batch": TOKENS,
        "train.optimizer_state_dtype": row.moments,
        "train.distributed_optimizer": "true",
    }
    keys |= {"parallel.etp": 1} if model.experts else {}
    keys |= {"parallel.pipeline_layers": list(row.layers)} if pp > 1 else {}
    return load_config(REPOSITORY / "configs" / "quickstart.yaml", [f"{key}={value}" for key, value in keys.items()])


def predicted(row: Row) -> float:
    """GiB of the fullest rank in the train phase."""
    config, model, (tp, pp, _) = config_of(row), parse_hf_config(row.model), row.layout
    logits = TOKENS * model.padded_vocab(tp) / tp * LOGIT_BYTES / GIB
    stages = [phases["train"] for phases in stage_memory(config, model, row.gpus // (tp * pp))]
    return max(
        sum(parts.values()) - parts["logits"] + (logits if stage == pp - 1 else 0) for stage, parts in enumerate(stages)
    )


def predicted_seconds(row: Row) -> float:
    """Seconds of a training step; an A800 is an A100 with two thirds of its NVLink."""
    gpu = replace(GPUS["a100"], nvlink_gb_per_s=200)
    return step_times(
        config_of(row), parse_hf_config(row.model), row.gpus, gpu, Lengths(1, TOKENS - 1, TOKENS - 1)
    ).seconds["train"]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("| script | model | GPUs | tp, pp, ep | published GiB | planned GiB | | published s | planned s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in ROWS:
        planned = predicted(row)
        layout = ", ".join(map(str, row.layout))
        seconds = f"{row.seconds:g} | {predicted_seconds(row):.1f}" if row.seconds else " | "
        memory = f"{row.gib:g} | {planned:.1f} | {planned / row.gib - 1:+.0%}"
        print(f"| {row.script} | {row.name} | {row.gpus} | {layout} | {memory} | {seconds} |")


if __name__ == "__main__":
    main()
