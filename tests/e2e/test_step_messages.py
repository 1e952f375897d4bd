"""What the ranks of a whole training step send each other: no Python objects, and few bytes for each token and sample.

Four real ranks (dp 2 x pp 2) run steps of the world's tiny model, from generation to weight sync, with a stub server."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks

from benchmarks.stub_engine import Behavior
from tests.e2e import world
from tests.e2e.synced_stub import SyncedStub
from tests.message_log import Message, objects, record

RANKS, REPLICAS, PROMPTS, GROUP = 4, 2, 8, 4
PER_TOKEN, PER_SAMPLE = 12, 64  # bytes
LENGTHS = (16, 128)  # tokens of a response
TEXTS = "bulk_messages.py"  # the texts and columns of samples, which go to the writer alone


@dataclass
class Step:
    """A step of one rank: its messages, and the samples that its replica sampled and trained."""

    messages: list[Message] = field(default_factory=list)
    sampled: set[int] = field(default_factory=set)
    trained: set[int] = field(default_factory=set)
    tokens: float = 0.0  # mean tokens of a sample, prompt included


def steps_of_a_run(config_path: Path, overrides: list[str], count: int, gathers: bool) -> list[Step]:
    """Run `count` steps on this rank. With `gathers` each one also gathers the rollouts' lengths as Python objects."""
    from megagrpo.config import load_config
    from megagrpo.platform.parallel.layout import init_layout
    from megagrpo.trainer.wiring import build

    config = load_config(config_path, overrides)
    layout = init_layout(config.parallel)
    steps = []
    with ExitStack() as resources:
        trainer = build(config, config_path.parent, layout, resources)
        policy, share = trainer.learning.policy, PROMPTS * GROUP // REPLICAS
        backward = policy.backward

        def noting(batch: Any, *arguments: Any) -> Any:
            steps[-1].trained |= {i for m in batch.micro_batches for i in m.samples.tolist() if i >= 0}
            return backward(batch, *arguments)

        policy.backward = noting
        trainer.syncing.sync()
        with trainer.lifecycle.endings():
            trainer.lifecycle.begin()
            for _ in range(count):
                steps.append(Step(sampled=set(range(layout.dp_rank * share, (layout.dp_rank + 1) * share))))
                with record(layout) as messages:
                    trainer.lifecycle.begin_step()
                    metrics = trainer.step()
                    if gathers:
                        layout.all_gather_objects([0] * int(metrics["num_tokens"]))
                    trainer.rollouts.advance()
                    trainer.lifecycle.end_step(metrics, trainer.syncing.metrics)
                steps[-1].messages, steps[-1].tokens = messages, metrics["num_tokens"] / (PROMPTS * GROUP)
    layout.close()
    return steps


def ordinary_step(tmp_path: Path, length: int, gathers: bool = False) -> list[Step]:
    """Return the second of three steps on each rank, with responses of `length` tokens. The run saves after the
    fourth."""
    behavior = Behavior(slots=64, median=length, sigma=0.0, seconds_per_token=0.0)
    with SyncedStub(behavior, range(3, 200)) as stub:
        words = [f"run.output_dir={tmp_path}/{length}", f"rollout.urls=[{stub.url}]", "run.max_steps=4"]
        words += [f"rollout.prompts_per_step={PROMPTS}", f"rollout.num_generations={GROUP}", "parallel.pp=2"]
        words += [f"rollout.max_completion_length={length}", "train.max_tokens_per_micro_batch=1024"]
        config = world.folder() / "config.yaml"
        return [steps[1] for steps in run_ranks(steps_of_a_run, RANKS, config, words, 3, gathers)]


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory) -> dict[int, list[Step]]:
    """An ordinary step of each rank, by the length of a response."""
    return {length: ordinary_step(tmp_path_factory.mktemp("steps"), length) for length in LENGTHS}


def test_an_ordinary_step_sends_no_python_objects(ordinary):
    assert [objects(step.messages) for step in ordinary[LENGTHS[0]]] == [[]] * RANKS


def test_each_rank_moves_at_most_12_bytes_a_token_it_samples_or_trains_and_64_a_sample(ordinary):
    for length, steps in ordinary.items():
        for rank, step in enumerate(steps):
            own = [m for m in step.messages if TEXTS not in m.caller or "parts" not in m.caller]
            moved, tokens = sum(m.sent + m.received for m in own), len(step.sampled | step.trained) * step.tokens
            bound = PER_TOKEN * tokens + PER_SAMPLE * PROMPTS * GROUP
            assert moved <= bound, f"rank {rank}, {length} tokens: {moved} bytes, {bound:.0f} allowed"


def test_an_object_gather_that_is_put_back_is_found_and_grows_with_the_tokens(tmp_path):
    received = []
    for length in LENGTHS:
        steps = ordinary_step(tmp_path, length, gathers=True)
        found = [
            message for message in steps[-1].messages if message.is_object and "test_step_messages" in message.caller
        ]
        assert [message.kind for message in found] == ["all_gather_object"]
        received.append(found[0].received)
    assert received[1] > 3 * received[0]
