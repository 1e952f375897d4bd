"""A run that is killed by SIGKILL in any phase of a step and resumed equals an uninterrupted run bit for bit: weights,
moments, reference, pass rates and rollouts."""

import functools
import hashlib
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

import megagrpo.records.checkpoints.checkpoint
from megagrpo.engine.load_balancing import Generation
from megagrpo.platform.device.adam import FusedAdam
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.rewards.scoring import Scoring
from megagrpo.sync.trainer_side.sync import WeightSync
from megagrpo.trainer.trainer import Trainer
from tests.e2e import world

STEPS, KILLED_IN = 4, 3
OPTIONS = [
    *(
        f"run.max_steps={STEPS}",
        "run.save_steps=1",
        "algorithm.num_iterations=2",
        "algorithm.beta=0.1",
        "algorithm.sync_ref_model=true",
    ),
    *(
        "algorithm.ref_model_sync_steps=1",
        "data.curriculum=[0.1,0.9]",
        "data.curriculum_pass_reward=0.5",
        "data.curriculum_rest=1",
    ),
]
IN_BACKGROUND = "run.async_save=true"


class Killer:
    """Kills this process, a run, in a phase of its step `KILLED_IN`; first records the current processes."""

    def __init__(self, family: Path):
        self.family, self.step = family, 0
        self.wrap(Trainer, "step", lambda trainer, *_: setattr(self, "step", trainer.state.step + 1), always=True)

    def kill(self, *_):
        self.family.write_text(json.dumps(world.family(os.getpid())))
        os.kill(os.getpid(), signal.SIGKILL)

    def soon(self, *_):
        threading.Timer(0.02, self.kill).start()

    def wrap(self, owner, name, before=None, after=None, always=False):
        """Have these called before and after `owner.name` in that step; a kill in the middle waits for the call."""
        original = getattr(owner, name)

        @functools.wraps(original)  # Megatron inspects signatures
        def wrapped(*args, **kwargs):
            if not always and self.step != KILLED_IN:
                return original(*args, **kwargs)
            if before is not None:
                before(*args)
            result = original(*args, **kwargs)
            if after is not None:
                after(*args)
            return result

        setattr(owner, name, wrapped)


def in_generate(killer):
    killer.wrap(Generation, "running", killer.soon)
    killer.wrap(Scoring, "finish", lambda *_: time.sleep(9))


def in_reward(killer):
    killer.wrap(Scoring, "finish", killer.kill)


def in_logprobs(killer):
    killer.wrap(MegatronPolicy, "logprobs", after=killer.kill)


def in_backward(killer):
    killer.wrap(
        MegatronPolicy, "backward", lambda policy, *_: next(policy.chunks[0].parameters()).register_hook(killer.kill)
    )


def in_optimizer(killer):
    killer.wrap(FusedAdam, "step", after=killer.kill)


def in_sync(killer):
    killer.wrap(WeightSync, "_load", killer.soon, lambda *_: time.sleep(9))


def after_sync(killer):
    killer.wrap(WeightSync, "push", after=killer.kill)


def in_save(killer):
    """Kill in the middle of a file's tensors; `step` is the step of the last save that began, including background
    saves."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    passed = iter(range(1000))
    killer.wrap(filesystem_async, "_write_item", lambda *_: next(passed) == 9 and killer.kill())


def in_save_before_its_name(killer):
    killer.wrap(
        megagrpo.records.checkpoints.checkpoint,
        "_to_disk",
        lambda path: path.name.endswith(".partial") and killer.kill(),
    )


def in_save_after_its_name(killer):
    killer.wrap(
        megagrpo.records.checkpoints.checkpoint, "_to_disk", lambda path: path.name == "checkpoints" and killer.kill()
    )


def fingerprint(checkpoint: Path) -> str:
    """A hash of all weights, of all state of the optimizer and of the reference, and of the position in the prompts."""
    state = json.loads((checkpoint / "megagrpo.json").read_text())
    state["state"].pop("weight_version")  # each start pushes the weights once more
    return hashlib.sha256(run_ranks(_hash, 1, checkpoint)[0].encode() + json.dumps(state).encode()).hexdigest()


def _hash(checkpoint: Path) -> str:
    from megatron.core import dist_checkpointing

    digest = hashlib.sha256()
    tensors = dist_checkpointing.load_plain_tensors(str(checkpoint))
    found = sorted((name, value) for name, value in tensors.items() if isinstance(value, torch.Tensor))
    assert sum("exp_avg" in name for name, _ in found) >= 2 and any("reference" in name for name, _ in found), [
        name for name, _ in found
    ]
    for name, value in found:
        digest.update(name.encode() + value.contiguous().numpy().tobytes())
    return digest.hexdigest()


def asked(run):
    """Every rollout of a run, in order."""
    return [(row["step"], row["prompt_id"], row["completion"], row["advantage"]) for row in run.completions]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The run without kills, and the fingerprint of its end."""
    run = world.train(tmp_path_factory.mktemp("unbroken"), *OPTIONS)
    assert run.code == 0, run.err
    return run, fingerprint(run.newest)


def _full(*case):
    return pytest.param(*case, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("phase", "options"),
    [
        _full(in_generate, []),
        _full(in_reward, []),
        _full(in_logprobs, []),
        _full(in_backward, []),
        _full(in_optimizer, []),
        _full(in_sync, []),
        _full(after_sync, []),
        _full(in_save, []),
        _full(in_save_before_its_name, []),
        _full(in_save_after_its_name, []),
        (in_save, [IN_BACKGROUND]),
        _full(in_backward, [IN_BACKGROUND]),
        _full(in_save_before_its_name, [IN_BACKGROUND]),
        _full(in_save_after_its_name, [IN_BACKGROUND]),
    ],
    ids=lambda value: value.__name__ if callable(value) else " ".join(value),
)
def test_a_run_that_is_killed_and_resumed_ends_like_the_unbroken_one(phase, options, unbroken, tmp_path):
    family = tmp_path / "family"
    with world.running(tmp_path, *OPTIONS, *options, prepare=lambda: phase(Killer(family))) as trainer:
        killed = trainer.wait()
        assert killed.code == -signal.SIGKILL and family.exists(), killed.err
        assert len({row["step"] for row in killed.completions}) in (KILLED_IN - 1, KILLED_IN)
        world.wait_for(
            lambda: not any(map(world.alive, json.loads(family.read_text()))), "end of all processes", seconds=15
        )
    run = world.train(tmp_path, *OPTIONS, *options, "--resume")
    assert run.code == 0, run.err
    whole, expected = unbroken
    assert [line["step"] for line in run.metrics] == list(range(1, STEPS + 1)) and asked(run) == asked(whole)
    assert [line["reward"] for line in run.metrics] == [line["reward"] for line in whole.metrics]
    assert run.saved == [f"step_{step:06d}" for step in (STEPS - 1, STEPS)] and fingerprint(run.newest) == expected
    assert not world.weights_in_shared_memory(trainer.pid)
