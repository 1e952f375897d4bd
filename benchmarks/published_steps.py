"""The seconds that `megagrpo plan` predicts, compared with GRPO steps published by NeMo-RL.

    python benchmarks/published_steps.py
    python benchmarks/published_steps.py --trace Llama-3.1-8B Llama-3.1-70B

With `--trace` the log-probs and the train step of the named models come from a trace of the last pipeline stage
(`benchmarks/plan_trace.py`).

Whole steps: docs/about/performance-summary.md of NeMo-RL 0.4, 0.5 and 0.6, GRPO on OpenMathInstruct-2, DGX H100, bf16,
Megatron and vLLM. Their settings: the recipes of the same versions (examples/configs/recipes/llm/performance) and
grpo_math_1B.yaml below them. Phases of 0.3: NVIDIA-NeMo/RL issue 959, with grpo_math_8B_megatron.yaml and
grpo_math_70B_megatron.yaml of that version. Assumed: prompts of 150 tokens.

Where NeMo-RL differs from this project, the prediction follows NeMo-RL. Log-probs of policy and reference precede every
update. A refit gathers the whole model on every rank. Where trainer and vLLM share GPUs, gradients and Adam's state go
to pageable host memory and back.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by its path, this file sees only its own folder

from megagrpo.config import RunConfig, load_config
from megagrpo.families.hf_config import HfConfig, nearly_even, parse_hf_config
from megagrpo.planner.costs.gpu_specs import GPUS, Links
from megagrpo.planner.costs.shapes import num_parameters
from megagrpo.planner.costs.workload import Lengths
from megagrpo.planner.times.step_times import StepTimes, step_times

REPOSITORY = Path(__file__).parents[1]
PROMPT = 150
PAGEABLE_GB_PER_S = 6.0  # between a GPU and host memory that is not pinned
H100 = GPUS["h100"]
LLAMA_8B = dict(
    model_type="llama", hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8
)
LLAMA_8B |= dict(intermediate_size=14336, vocab_size=128256, max_position_embeddings=131072, tie_word_embeddings=False)
LLAMA_70B = LLAMA_8B | dict(hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, intermediate_size=28672)
QWEN_32B = dict(
    model_type="qwen3",
    hidden_size=5120,
    num_hidden_layers=64,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
)
QWEN_32B |= dict(intermediate_size=25600, vocab_size=151936, max_position_embeddings=40960, tie_word_embeddings=False)
QWEN_30B = json.loads((REPOSITORY / "configs/models/Qwen/Qwen3-30B-A3B/config.json").read_text())
QWEN_235B = QWEN_30B | dict(hidden_size=4096, num_hidden_layers=94, num_attention_heads=64, moe_intermediate_size=1536)
DEEPSEEK = json.loads((REPOSITORY / "configs/models/deepseek-ai/DeepSeek-V3/config.json").read_text())


@dataclass(frozen=True)
class Job:
    """A recipe: model, prompts and responses of a step, longest sample, updates, whether layers are recomputed."""

    name: str
    model: dict
    prompts: int
    generations: int
    longest: int
    updates: int
    recompute: str


@dataclass(frozen=True)
class Row:
    """A published row: layout of the trainer (tp, cp, pp, ep), its GPUs, tp of generation and its GPUs (0: the
    trainer's GPUs), mean length of a sample. `held_out`: not used for choosing the plan's constants."""

    job: Job
    version: str
    gpus: int
    layout: tuple[int, int, int, int]
    server_tp: int
    server_gpus: int
    mean: int
    seconds: float
    held_out: bool = True
    ahead: int = 1  # maximal number of steps that generation on separate GPUs runs ahead


LLAMA = Job("Llama-3.1-8B", LLAMA_8B, 64, 32, 4096, 4, "full")
DENSE = Job("Qwen3-32B", QWEN_32B, 64, 32, 4096, 4, "none")
SMALL = Job("Qwen3-30B-A3B", QWEN_30B, 64, 32, 4096, 4, "none")
LARGE = Job("Qwen3-235B-A22B", QWEN_235B, 16, 32, 8192, 1, "full")
V3 = Job("DeepSeek-V3", DEEPSEEK, 32, 16, 1536, 1, "full")
ROWS = (
    Row(LLAMA, "0.4", 16, (1, 1, 2, 1), 1, 0, 1060, 97.7, held_out=False),
    Row(DENSE, "0.4", 32, (4, 1, 4, 1), 4, 0, 3206, 393, held_out=False),
    Row(SMALL, "0.4", 32, (2, 1, 1, 8), 4, 0, 3154, 225, held_out=False),
    Row(SMALL, "0.6", 32, (1, 1, 1, 8), 2, 0, 3203, 192, held_out=False),
    Row(LARGE, "0.4", 128, (2, 2, 8, 16), 16, 0, 5671, 506, held_out=False),
    Row(LARGE, "0.6", 128, (2, 2, 8, 16), 16, 0, 5698, 395, held_out=False),
    Row(V3, "0.4", 256, (1, 1, 16, 16), 32, 0, 745, 154, held_out=False),
    Row(V3, "0.6", 256, (1, 1, 16, 16), 32, 0, 701, 134, held_out=False),
    Row(LLAMA, "0.5", 16, (1, 1, 2, 1), 1, 0, 1019, 92.8),
    Row(DENSE, "0.5", 32, (4, 1, 4, 1), 4, 0, 3251, 376),
    Row(SMALL, "0.5", 32, (1, 1, 1, 8), 2, 0, 3196, 198),
    Row(LARGE, "0.5", 128, (2, 2, 8, 16), 16, 0, 5700, 431),
    Row(LARGE, "0.6", 256, (2, 2, 8, 16), 16, 0, 5713, 312),
    Row(V3, "0.5", 256, (1, 1, 16, 16), 32, 0, 744, 134),
    Row(V3, "0.6", 512, (1, 1, 16, 16), 32, 0, 697, 111),
    Row(LLAMA, "0.5, ahead", 8, (1, 1, 1, 1), 1, 8, 1123, 64.8, held_out=False),
    Row(DENSE, "0.5, ahead", 32, (4, 1, 4, 1), 4, 32, 3252, 200, held_out=False),
    Row(SMALL, "0.5, ahead", 16, (1, 1, 2, 8), 2, 16, 3201, 154, held_out=False),
    Row(SMALL, "0.6, ahead", 16, (1, 1, 2, 8), 2, 16, 3201, 152, held_out=False),
    Row(SMALL, "0.6, 8 ahead", 128, (1, 1, 1, 8), 2, 64, 3206, 34.5, ahead=8),
    Row(LARGE, "0.5, ahead", 128, (4, 1, 8, 16), 8, 128, 5707, 203, held_out=False),
    Row(LARGE, "0.6, ahead", 128, (4, 1, 8, 16), 8, 128, 5721, 231, held_out=False),
    Row(V3, "0.5, ahead", 256, (1, 1, 16, 16), 32, 256, 738, 64.9, held_out=False),
    Row(V3, "0.6, ahead", 256, (1, 1, 16, 16), 32, 256, 710, 64.1, held_out=False),
)
OLD_8B, OLD_70B = (
    Job("Llama-3.1-8B", LLAMA_8B, 64, 32, 4096, 4, "none"),
    Job("Llama-3.1-70B", LLAMA_70B, 64, 32, 4096, 4, "none"),
)
PHASES = (  # published seconds of generate, logprobs, train and refit
    (Row(OLD_8B, "0.3", 8, (1, 1, 2, 1), 1, 0, 795 + PROMPT, 112), (58, 18, 28, 5)),
    (Row(OLD_70B, "0.3", 64, (4, 1, 4, 1), 4, 0, 398 + PROMPT, 147), (84, 18, 28, 14)),
)


def setting(row: Row) -> tuple[RunConfig, HfConfig, Lengths]:
    """Config, model and lengths of a row."""
    model, job = parse_hf_config(row.job.model), row.job
    tp, cp, pp, ep = row.layout
    keys = {
        "model.precision": "bf16",
        "model.recompute": job.recompute,
        "model.fusions": "[rope, bias_activation]",
        "parallel.tp": tp,
        "parallel.cp": cp,
        "parallel.pp": pp,
        "parallel.ep": ep,
        "parallel.etp": 1 if model.experts else tp,
        "parallel.sequence_parallel": str(tp > 1).lower(),
        "rollout.servers": (row.server_gpus or row.gpus) // row.server_tp,
        "rollout.tp": row.server_tp,
        "rollout.prompts_per_step": job.prompts,
        "rollout.num_generations": job.generations,
        "rollout.max_prompt_length": 256,
        "rollout.max_completion_length": job.longest - 256,
        "rollout.gpu_memory_utilization": 0.8 if row.server_gpus else 0.6,
        "rollout.max_num_seqs": 256,
        "train.max_tokens_per_micro_batch": job.longest,
        "train.distributed_optimizer": "true",
        "algorithm.beta": 0.01,
        "algorithm.steps_per_generation": job.updates,
        "algorithm.num_iterations": 1,
    }
    if row.server_gpus:
        keys |= {
            "rollout.placement": "dedicated",
            "rollout.max_staleness": row.ahead,
            "algorithm.importance_correction": "token_truncate",
        }
    if model.num_layers % pp:
        keys["parallel.pipeline_layers"] = nearly_even(model.num_layers, pp)
    config = load_config(REPOSITORY / "configs" / "quickstart.yaml", [f"{key}={value}" for key, value in keys.items()])
    return config, model, Lengths(PROMPT, row.mean - PROMPT, job.longest - PROMPT)


def predicted(row: Row) -> StepTimes:
    config, model, lengths = setting(row)
    made = step_times(config, model, row.gpus, H100, lengths)
    # Ours computes no old log-probs for a single optimizer step.
    again = made.seconds["logprobs"] if config.algorithm.updates_per_step == 1 else 0
    return replace(
        made, seconds=made.seconds | {"logprobs": made.seconds["logprobs"] + again, "sync": refit_seconds(row, model)}
    )


def traced(row: Row) -> StepTimes:
    """Like `predicted`, with the seconds of log-probs and train step of a trace. Imports torch."""
    from benchmarks.tracing.roofline import roofline
    from benchmarks.tracing.traced_step import trace_step

    config, model, lengths = setting(row)
    rank = row.gpus - row.gpus // config.parallel.pp  # the first rank of the last stage, which has the LM head
    trace = trace_step(config, model, row.gpus, rank, round(lengths.prompt), round(lengths.response))
    seconds, updates = roofline(config, model, trace, row.gpus, H100, lengths).seconds, row.job.updates
    # per update, which has its own pipeline bubble
    once = seconds["reduce"] + seconds["optimizer"] + seconds.get("bubble", 0.0)
    train = sum(seconds[phase] for phase in ("forward", "head", "backward")) + updates * once
    # of policy and reference; the head's gradients are two of three products
    passes = 2 * (seconds["forward"] + seconds["head"] / 3)
    made = predicted(row)
    return replace(made, seconds=made.seconds | {"logprobs": passes, "train": train})


def refit_seconds(row: Row, model: HfConfig) -> float:
    """Seconds of NeMo-RL's refit: the gather, and the offload in both directions."""
    gathered = Links(H100).seconds(2 * num_parameters(model), row.gpus + row.server_gpus)
    moved = 0 if row.server_gpus else 2 * (12 + 4) * num_parameters(model) / row.gpus / (PAGEABLE_GB_PER_S * 1e9)
    return gathered + moved


def print_traced(names: list[str]) -> None:
    """Print the rows of these models with traced seconds; of rows with the same setting in several versions only the
    first."""
    print("| model | version | GPUs | published s | traced s | | generate | logprobs | train | refit |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    seen = set()
    for row, phases in (*PHASES, *((row, None) for row in ROWS)):
        key = row.job.name, row.job.recompute, row.gpus, row.layout, row.server_gpus
        if row.job.name not in names or key in seen:
            continue
        seen.add(key)
        made = traced(row)
        texts = [f"{made.seconds[name]:.1f}" for name in ("generate", "logprobs", "train", "sync")]
        if phases:
            texts = [f"{text} of {published}" for text, published in zip(texts, phases, strict=True)]
        head = f"| {row.job.name} | {row.version} | {row.gpus + row.server_gpus} | {row.seconds:g} | {made.step:.0f} |"
        print(f"{head} {made.step / row.seconds - 1:+.0%} | {' | '.join(texts)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--trace", nargs="+", metavar="MODEL", help="trace the rows of these models, and print no others"
    )
    if names := parser.parse_args().trace:
        return print_traced(names)
    print("| model | version | GPUs | published s | predicted s | | | generate | logprobs | train | refit |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    errors: dict[bool, list[float]] = {False: [], True: []}
    for row in ROWS:
        made = predicted(row)
        error = made.step / row.seconds - 1
        errors[row.held_out].append(error)
        phases = " | ".join(f"{made.seconds[phase]:.1f}" for phase in ("generate", "logprobs", "train", "sync"))
        head = (
            f"| {row.job.name} | {row.version} | {row.gpus + row.server_gpus} | {row.seconds:g} | {made.step:.0f} | "
            f"{error:+.0%} |"
        )
        print(f"{head} {'held out' * row.held_out} | {phases} |")
    for held_out, found in errors.items():
        near = sum(abs(error) <= 0.3 for error in found)
        print(
            f"\n{'held out' if held_out else 'in view'}: {near} of {len(found)} within 30 %, median "
            f"{median(map(abs, found)):.0%}",
            end="",
        )
    print("\n\n| model, 0.3 | | generate | logprobs | train | refit |\n|---|---|---|---|---|---|")
    for row, published in PHASES:
        made = predicted(row)
        print(f"| {row.job.name}, {row.gpus} GPUs | published | {' | '.join(map(str, published))} |")
        print(
            "| | predicted | "
            f"{' | '.join(f'{made.seconds[name]:.0f}' for name in ('generate', 'logprobs', 'train', 'sync'))} |"
        )


if __name__ == "__main__":
    main()
