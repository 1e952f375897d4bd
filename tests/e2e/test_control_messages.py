"""An ordinary step sends no Python objects between ranks, nor does a checkpoint beyond those of Megatron's own."""

import contextlib
from collections import Counter
from unittest import mock

import pytest
from ranks import run_ranks

from benchmarks.control_messages import STEP
from megagrpo.__main__ import main
from megagrpo.trainer.trainer import Trainer
from tests.e2e import world
from tests.message_log import record

# Megatron's save: its plan and the written pieces to rank 0, checks of the state dict, errors of the writer.
OF_SAVE = ("megatron/core/dist_checkpointing/", "megagrpo/weights/bridge/megatron_io.py")
NEW_COLUMNS = "collector.py", " _attempt"  # in the step in which a response is the first of several weight versions
PARTS_OF_FILES = (" completions", " _write")  # texts and numbers for the files that rank 0 writes
OF_THE_END = (
    "megagrpo/records/checkpoints/checkpoint.py",
    "megagrpo/records/checkpoints/ahead_files.py",
    "megagrpo/weights/bridge/",
)


def counted(words: list[str]) -> tuple[int, list]:
    """Run `main` and return its exit code and the messages of the second step and all that follows."""
    messages, step = [], Trainer.step
    with contextlib.ExitStack() as until_the_end:

        def from_the_second(trainer: Trainer):
            if trainer.state.step == 1:
                messages.append(until_the_end.enter_context(record(trainer.learning.policy.layout)))
            return step(trainer)

        until_the_end.enter_context(mock.patch.object(Trainer, "step", from_the_second))
        code = main(words)
        (of_run,) = messages
        return code, list(of_run)


@pytest.mark.parametrize(
    "options",
    [
        ["rollout.weight_sync_transport=shared_memory", "algorithm.beta=0.1"],
        pytest.param(
            [
                "rollout.weight_sync_transport=p2p",
                "rollout.max_staleness=1",
                "algorithm.importance_correction=token_truncate",
            ],
            marks=pytest.mark.full,
        ),
    ],
    ids=["shared_memory", "p2p and async"],
)
def test_steps_and_checkpoints_of_a_run_send_no_objects(options, tmp_path):
    words = ["train", *world.arguments(tmp_path, "run.max_steps=3", *options)]
    for code, messages in run_ranks(counted, 2, words, timeout=world.SECONDS):
        assert code == 0
        assert sum(message.kind == "isend" for message in messages) > 10, "the log has missed the reductions"
        assert not [m.caller for m in messages if m.kind == "monitored_barrier"], "rank 0 waits for each rank in turn"
        objects = Counter((m.kind, m.caller) for m in messages if m.is_object)
        new = {key for key in objects if all(part in key[1] for part in NEW_COLUMNS)}
        assert sum(objects[key] for key in new) <= 1, "ranks agree on new columns in every step"
        ours = {key: count for key, count in objects.items() if not key[1].startswith(OF_SAVE) and key not in new}
        assert not ours, "a step or a checkpoint sends Python objects"


@pytest.mark.full
def test_the_benchmark_counts_the_small_messages_of_a_step(tmp_path):
    words = ["train", *world.arguments(tmp_path, "run.max_steps=3", "rollout.weight_sync_transport=p2p")]
    for code, messages in run_ranks(counted, 2, words, timeout=world.SECONDS):
        small = [m.caller for m in messages if m.kind == "isend" and not m.caller.endswith(PARTS_OF_FILES)]
        sent = [caller for caller in small if not caller.startswith(OF_THE_END)]
        assert code == 0 and len(sent) == 2 * sum(control.count for control in STEP), Counter(sent)
