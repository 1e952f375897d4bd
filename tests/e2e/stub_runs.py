"""Whole runs of the world's tiny model with a stub server, step by step on each rank: messages, samples, seconds and
memory of every step."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from ranks import run_ranks

from benchmarks.scaling.table import peak_bytes, reset_peak
from benchmarks.stub_engine import Behavior
from tests.e2e import world
from tests.e2e.synced_stub import SyncedStub
from tests.message_log import Message, record

GROUP = 4
# part of a step -> what does it: `draw` generates, and exchanges facts; `batches` exchanges tokens and packs
HOST_PARTS = {"draw": "rollouts", "batches": "learning", "finish": "records.recorders"}


@dataclass
class Step:
    """A step of one rank: its messages, the samples that its replica sampled and trained, seconds, CPU seconds of the
    parts in `HOST_PARTS`, and bytes of resident memory: `peak` during the step, above what was resident before it."""

    messages: list[Message] = field(default_factory=list)
    sampled: set[int] = field(default_factory=set)
    trained: set[int] = field(default_factory=set)
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    peak: int = 0


def steps_of_rank(config_path: Path, overrides: list[str], count: int, gathers: bool) -> list[Step]:
    """Run `count` steps on this rank. With `gathers` each one also gathers Python objects that grow with the tokens."""
    from megagrpo.config import load_config
    from megagrpo.platform.parallel.layout import init_layout
    from megagrpo.trainer.wiring import build

    config = load_config(config_path, overrides)
    layout = init_layout(config.parallel)
    samples = config.rollout.prompts_per_step * config.rollout.num_generations
    share, steps = samples // layout.dp_size, list[Step]()
    with ExitStack() as resources:
        trainer = build(config, config_path.parent, layout, resources)
        policy = trainer.learning.policy
        backward = policy.backward

        def noting(batch: Any, *arguments: Any) -> Any:
            steps[-1].trained |= {i for m in batch.micro_batches for i in m.samples.tolist() if i >= 0}
            return backward(batch, *arguments)

        policy.backward = noting
        for part, owner in HOST_PARTS.items():
            owner = attrgetter(owner)(trainer)
            object.__setattr__(owner, part, partial(timed, steps, part, getattr(owner, part)))
        trainer.syncing.sync()
        with trainer.lifecycle.endings():
            trainer.lifecycle.begin()
            for _ in range(count):
                step = Step(sampled=set(range(layout.dp_rank * share, (layout.dp_rank + 1) * share)))
                steps.append(step)
                before, begun = reset_peak(), time.perf_counter()
                with record(layout) as step.messages:
                    trainer.lifecycle.begin_step()
                    metrics = trainer.step()
                    if gathers:
                        layout.all_gather_objects([0] * int(metrics["num_tokens"]))
                    trainer.rollouts.advance()
                    trainer.lifecycle.end_step(metrics, trainer.syncing.metrics)
                step.seconds, step.peak, step.metrics = time.perf_counter() - begun, peak_bytes() - before, metrics
    layout.close()
    return steps


def timed(steps: list[Step], part: str, work: Callable[..., Any], *arguments: Any) -> Any:
    """Return `work(*arguments)`, and note the CPU seconds of this process in the last step."""
    begun = time.process_time()
    result = work(*arguments)
    steps[-1].cpu_seconds[part] = time.process_time() - begun
    return result


def ordinary_step(
    folder: Path, length: int, *overrides: str, prompts: int = 8, ranks: int = 4, gathers: bool = False
) -> list[Step]:
    """Return the second of three steps on each rank: the first opens connections, and the last would save."""
    return [
        steps[1] for steps in first_steps(folder, length, *overrides, prompts=prompts, ranks=ranks, gathers=gathers)
    ]


def first_steps(
    folder: Path, length: int, *overrides: str, prompts: int = 8, ranks: int = 4, gathers: bool = False, count: int = 2
) -> list[list[Step]]:
    """Return the first `count` steps of each rank, with responses of `length` tokens in groups of `GROUP`, on dp x pp 2
    ranks."""
    behavior = Behavior(slots=64, median=length, sigma=0.0, seconds_per_token=0.0)
    config = world.folder() / "config.yaml"
    with SyncedStub(behavior, range(3, 200)) as stub:
        words = [*shape_of_run(folder, length, prompts, count), f"rollout.urls=[{stub.url}]", *overrides]
        return run_ranks(steps_of_rank, ranks, config, words, count, gathers, timeout=world.SECONDS)


def shape_of_run(folder: Path, length: int, prompts: int, count: int = 1) -> list[str]:
    """Return the overrides of the world's config for such a run, without its servers."""
    return [
        f"model.path={long_model(folder)}",
        f"run.output_dir={folder}/runs{length}x{prompts}",
        f"run.max_steps={count + 1}",
        f"rollout.prompts_per_step={prompts}",
        f"rollout.num_generations={GROUP}",
        f"rollout.max_completion_length={length}",
        "train.max_tokens_per_micro_batch=1024",
        "parallel.pp=2",
    ]


def long_model(folder: Path) -> Path:
    """The world's model with 1,024 positions and a quarter of the width, which costs little to train."""
    model = folder / "long_model"
    if not model.exists():
        shutil.copytree(world.folder() / "model", model)
        run_ranks(_make_long, 1, model)
    return model


def _make_long(model: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_pretrained(
        model, hidden_size=32, intermediate_size=48, head_dim=8, max_position_embeddings=1024
    )
    LlamaForCausalLM(config).save_pretrained(model)
