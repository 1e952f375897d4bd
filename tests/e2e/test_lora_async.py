"""vLLM generates ahead of training with adapters alone: responses in flight keep their adapter, or continue with the
new one."""

import json
import os
import signal
import threading

import pytest
import torch

from megagrpo.engine.client import VllmEngine
from megagrpo.records.checkpoints.run_files import checkpoints
from megagrpo.types import Prompt, SamplingParams
from tests.e2e import world
from tests.e2e.test_lora_vllm import LORA, sync
from tests.e2e.tiny_servers import launch, naive_logprobs

KEYS = ("lora.rank=4", "lora.alpha=64", "lora.sync=adapter")
AHEAD = ("rollout.max_staleness=1", "algorithm.importance_correction=token_truncate")
STILL = ("train.learning_rate=1e-30",)  # weights stay constant
GROUPS, GROUP = 4, 4  # groups per step, responses per group


@pytest.fixture(scope="module")
def server():
    """A server that has room for the adapters of two versions."""
    launcher = launch(world.folder() / "model", "lora_async", lora_rank=LORA.rank, adapters=2)
    launcher.wait()
    return launcher


@pytest.fixture(scope="module")
def moved(tmp_path_factory, server):
    """A run that moves its adapter, so that it no longer adds 0."""
    moved = world.train(tmp_path_factory.mktemp("moved"), "run.max_steps=2", *KEYS, on(server))
    assert moved.code == 0, moved.err
    return f"lora.adapter_path={moved.newest / 'adapter'}"


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory, server, moved):
    """Every response of a synchronous run of ten steps."""
    run = world.train(tmp_path_factory.mktemp("still"), "run.max_steps=10", *STILL, *KEYS, moved, on(server))
    assert run.code == 0, run.err
    return texts(run)


def on(server):
    return f"rollout.urls={server.urls}"


def texts(run):
    return [(row["step"], row["prompt_id"], row["completion"], row["reward"]) for row in run.completions]


@pytest.mark.full
@pytest.mark.parametrize("placement", ["external", pytest.param("dedicated", marks=pytest.mark.full)])
def test_a_policy_that_stands_still_gets_the_responses_of_a_synchronous_run(
    placement, tmp_path, server, moved, synchronous
):
    where = on(server) if placement == "external" else "rollout.urls=[]"
    words = (*STILL, *KEYS, moved, *AHEAD, "rollout.in_flight=wait", "run.max_steps=4")
    run = world.train(tmp_path, *words, where, f"rollout.placement={placement}", launched=True)
    assert run.code == 0, run.err
    assert texts(run) == synchronous[: 4 * GROUPS * GROUP]
    assert [line["staleness/max"] for line in run.metrics] == [0.0, 1.0, 1.0, 1.0]
    assert {row["step"] - row["weight_version"] for row in run.completions} == {0, 1}


@pytest.mark.full
@pytest.mark.parametrize("in_flight", ["wait", "resume"])
def test_each_token_is_sampled_with_the_adapter_of_its_version(in_flight, server, tmp_path):
    engine = VllmEngine(server.urls, lambda ids: "", max_num_seqs=2, logs=server.logs, adapters=2, in_flight=in_flight)
    engine.weight_version = 100  # other names than those of the other tests
    sync(engine, "a", tmp_path / "101")
    prompts = [Prompt(i, tuple((7 * i + 3 * k) % 250 for k in range(4 + i % 9)), "") for i in range(24)]
    groups, begun = [], threading.Event()

    def generate():
        for group in engine.groups(prompts, 1, SamplingParams(1.0, 90), seed=0):
            groups.append(group)
            begun.set()

    generation = threading.Thread(target=generate)
    generation.start()
    begun.wait(60)
    sync(engine, "b", tmp_path / "102")  # while responses are in flight
    engine.leave_old_adapters()
    generation.join()
    parts: set[tuple[int, ...]] = set()
    for _, (rollout,) in groups:
        ends = [start for start, _ in rollout.later_versions] + [len(rollout.response_ids)]
        versions = [rollout.weight_version, *(version for _, version in rollout.later_versions)]
        start = 0
        for version, end in zip(versions, ends, strict=True):
            expected = naive_logprobs(tmp_path / str(version), rollout.prompt, rollout.response_ids.tolist())
            found = torch.from_numpy(rollout.rollout_logprobs.copy())
            torch.testing.assert_close(found[start:end], expected[start:end], atol=1e-3, rtol=0)
            start = end
        parts.add(tuple(versions))
    assert parts >= {(101,), (102,)} and ((101, 102) in parts) == (in_flight == "resume")


@pytest.mark.full
@pytest.mark.parametrize("in_flight", ["wait", "resume"])
def test_responses_under_way_live_through_a_sync(tmp_path, in_flight, server):
    # generation outlasts the training of a step
    one_by_one = ("rollout.max_completion_length=40", "rollout.max_num_seqs=1", f"rollout.in_flight={in_flight}")
    run = world.train(tmp_path, *AHEAD, *KEYS, *one_by_one, *STILL, "run.max_steps=3", on(server))
    assert run.code == 0, run.err
    assert bool([row for row in run.completions if "later_versions" in row]) == (in_flight == "resume")
    assert all(line["staleness/max"] <= 1 and line["token_mult_prob_error"] < 1.001 for line in run.metrics)


@pytest.mark.full
def test_a_run_that_is_killed_and_resumed_trains_on_every_prompt_once(tmp_path, server, moved, synchronous):
    words = (*STILL, *KEYS, moved, *AHEAD, "rollout.in_flight=wait", "run.save_steps=1", on(server))
    with world.running(tmp_path, "run.max_steps=1000", *words) as trainer:
        world.wait_for(lambda: world.steps_done(tmp_path) >= 3, "third step")
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.wait()
    saved = int(checkpoints(tmp_path / "run" / "checkpoints")[-1].name.removeprefix("step_"))
    run = world.train(tmp_path, f"run.max_steps={saved + 3}", *words, "--resume")
    assert run.code == 0 and f"after step {saved}" in run.out, run.err
    assert texts(run) == synchronous[: (saved + 3) * GROUPS * GROUP]
    state = json.loads((run.newest / "megagrpo.json").read_text())["state"]
    assert state["weight_version"] == run.metrics[-1]["weight_version"]


@pytest.mark.full
def test_a_server_that_is_killed_while_it_generates_ahead_costs_no_response(tmp_path, moved, synchronous):
    more = (*STILL, *KEYS, moved, *AHEAD, "rollout.in_flight=wait", "run.max_steps=8", "rollout.placement=dedicated")
    with world.running(tmp_path, *more, launched=True) as trainer:
        world.wait_for(lambda: world.steps_done(tmp_path) >= 2, "second step")
        for pid in world.family(trainer.pid):
            if "vllm_main.py" in (words := open(f"/proc/{pid}/cmdline").read()) and "supervisor.py" not in words:
                os.kill(pid, signal.SIGKILL)
        run = trainer.wait(seconds=240)
    assert run.code == 0 and "restarting it, 1 of 3 times" in run.out, run.err
    assert texts(run) == synchronous[: 8 * GROUPS * GROUP]
