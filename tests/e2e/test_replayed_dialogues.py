"""Conversations of a small mixture of experts with a real vLLM: each turn adds the experts of its own tokens, also where
a tool or a user wrote them, where the scheduler rewrites an end, and after a kill."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from megagrpo.proof.audit.naive import Routing, load_model
from megagrpo.proof.audit.saved import load_step
from megagrpo.records.checkpoints.run_files import checkpoints
from tests.e2e import world
from tests.e2e.test_routing_replay_run import REPLAY, moe_folder, server

MINE = '''
"""Schedulers and a tool of the tests."""


def again(messages, turn, **columns):
    """Ask twice more."""
    return [*messages, {"role": "user", "content": "and then?"}], turn == 3


def rewrites(messages, turn, **columns):
    """Keep the first half of the policy's last message, and let the policy continue it; then ask once more."""
    *before, last = messages
    if turn == 1:
        return [*before, last | {"content": last["content"][: len(last["content"]) // 2] + "so"}], False
    return [*messages, {"role": "user", "content": "and then?"}], turn == 3


class Echo:
    """Each turn gets a result of a tool."""

    def reset(self, **columns):
        return None

    def step(self, messages, turn):
        return [*messages, {"role": "tool", "content": f"turn {turn}"}], turn == 3
'''
LIMITS = ("rollout.max_prompt_length=30", "rollout.max_completion_length=33", "multi_turn.workers=1")


@pytest.fixture(scope="module")
def talkative(tmp_path_factory) -> Path:
    """The model, with many tokens that end a turn, and a file of schedulers."""
    folder = tmp_path_factory.mktemp("talkative")
    shutil.copytree(moe_folder(), folder / "model")
    ends = [*range(10, 74), 257]
    (folder / "model" / "generation_config.json").write_text(f'{{"eos_token_id": {ends}}}')
    (folder / "mine.py").write_text(MINE)
    return folder


def options(talkative: Path, scheduler: str, *more: str) -> list[str]:
    return [
        f"rollout.urls=[{server()}]",
        f"model.path={talkative}/model",
        f"multi_turn.scheduler={talkative}/mine.py:{scheduler}",
        REPLAY,
        "algorithm.beta=0.1",  # no sample is skipped
        *LIMITS,
        *more,
    ]


def check(run: world.Run, step: int) -> None:
    """Compare the routes of every token that the engine read with the routers of transformers on the whole text, and
    audit the step."""
    line, dumped = run.metrics[step - 1], load_step(run.folder, step)
    assert line["routing/agreement_min"] > 0.999 and line["token_mult_prob_error"] == pytest.approx(1, abs=1e-4)
    assert line["multi_turn/mean_turns"] > 1.3 and line["multi_turn/failures"] == 0
    model, of_others = load_model(dumped.updates[0].weights, "float32"), 0
    for sample in dumped.samples:
        last = int(sample.places[-1])  # what follows the last written token was never read
        with torch.no_grad(), Routing(model, None) as routing:
            model(sample.token_ids[None])
        taken = torch.stack(routing.taken, dim=1)[:last].sort(-1).values
        assert torch.equal(sample.routes[:last].long().sort(-1).values, taken)
        of_others += last - sample.prompt_length - (sample.places.numel() - 1)
    assert of_others > 20  # tokens of users, tools and rewritten ends, inside of responses
    code, said = world.audit(run.folder, "--step", step)
    assert code == 0, said


@pytest.mark.full
@pytest.mark.parametrize(
    "scheduler", ["again", *(pytest.param(name, marks=pytest.mark.full) for name in ("rewrites", "Echo"))]
)
def test_every_turn_adds_the_routes_of_its_own_tokens(talkative, scheduler, tmp_path):
    run = world.train(tmp_path, *options(talkative, scheduler, "debug.dump_steps=[2]"))
    assert run.code == 0, run.err
    check(run, 2)


@pytest.mark.full
def test_a_run_that_was_killed_takes_the_same_steps_again(talkative, tmp_path):
    words = options(talkative, "again", "run.max_steps=3", "run.save_steps=1", "debug.dump_steps=[3]")
    whole = world.train(tmp_path / "whole", *words)
    assert whole.code == 0, whole.err
    with world.running(tmp_path / "killed", *words) as run:
        world.wait_for(lambda: checkpoints(tmp_path / "killed" / "run" / "checkpoints"), "first checkpoint")
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
    again = world.train(tmp_path / "killed", *words, "run.resume=true")
    assert again.code == 0, again.err
    for one, other in zip(whole.metrics, again.metrics, strict=True):
        names = ["reward", "grad_norm", "loss", *(name for name in one if name.startswith("routing/"))]
        assert {name: other[name] for name in names} == {name: one[name] for name in names}
    check(again, 3)
