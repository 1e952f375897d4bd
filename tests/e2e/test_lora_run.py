"""Runs that train adapters: rewards rise, a resumed run equals an uninterrupted one, and a run can start from the saved
adapters."""

import json
import os
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file

from megagrpo.records.checkpoints.run_files import checkpoints
from tests.e2e import world

LORA = tuple(
    (
        "lora.rank=8 lora.alpha=64 train.learning_rate=5e-3 train.max_grad_norm=0.3 algorithm.beta=0.001 "
        "rollout.num_generations=8"
    ).split()
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Eight steps, stopped and resumed after three."""
    output = tmp_path_factory.mktemp("lora")
    assert world.train(output, *LORA, "run.max_steps=3").code == 0
    run = world.train(output, *LORA, "run.max_steps=8", "--resume")
    assert run.code == 0, run.err
    return run


def test_rewards_rise_with_adapters_alone(run):
    rewards = [line["reward"] for line in run.metrics]
    assert len(rewards) == 8 and rewards[-1] > rewards[0] + 0.3
    assert run.metrics[0]["kl"] == pytest.approx(0, abs=1e-7) and run.metrics[-1]["kl"] > 1e-3
    assert all(line["token_mult_prob_error"] < 1.001 for line in run.metrics)


@pytest.mark.full
def test_a_resumed_run_ends_with_the_adapters_of_one_that_never_stopped(run, tmp_path):
    whole = world.train(tmp_path, *LORA, "run.max_steps=8")
    expected, found = (load_file(r.newest / "adapter" / "adapter_model.safetensors") for r in (whole, run))
    assert len(found) == 2 * 7 * 2 and all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert [row["completion"] for row in run.completions] == [row["completion"] for row in whole.completions]


@pytest.mark.full
def test_a_run_that_saves_beside_training_and_is_killed_ends_with_the_same_adapters_and_moments(run, tmp_path):
    words = (*LORA, "run.max_steps=8", "run.save_steps=1", "run.async_save=true", "train.offload=true")  # no effect
    with world.running(tmp_path, *words) as trainer:
        world.wait_for(lambda: world.steps_done(tmp_path) >= 4, "fourth step")
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.wait()
    assert 0 < len(checkpoints(tmp_path / "run" / "checkpoints")) < 8
    resumed = world.train(tmp_path, *words, "--resume")
    assert resumed.code == 0 and [row["completion"] for row in resumed.completions] == [
        row["completion"] for row in run.completions
    ]
    expected, found = world.plain_tensors(run.newest), world.plain_tensors(resumed.newest)
    assert expected.keys() == found.keys() and all(expected[name].equal(tensor) for name, tensor in found.items())
    for path in checkpoints(resumed.folder / "checkpoints"):
        assert (
            load_file(path / "adapter" / "adapter_model.safetensors").keys()
            and (path / "adapter" / "adapter_config.json").exists()
        )


def test_a_run_continues_from_an_adapter_which_is_its_reference(run, tmp_path):
    adapter = run.newest / "adapter"
    more = world.train(tmp_path, *LORA, "run.max_steps=1", f"lora.adapter_path={adapter}")
    assert more.code == 0, more.err
    assert (
        more.metrics[0]["kl"] == pytest.approx(0, abs=1e-7)
        and more.metrics[0]["reward"] > run.metrics[0]["reward"] + 0.1
    )
    refused = world.train(tmp_path / "other", *LORA, "lora.rank=4", f"lora.adapter_path={adapter}")
    assert refused.code == 2 and "lora.rank: 4, but the adapter in" in refused.err


@pytest.mark.full
@pytest.mark.parametrize(("storage", "alone"), [("fp8", False), ("nf4", False), ("nf4", True)])
def test_vllm_samples_from_the_rounded_weights_that_the_trainer_computes_with(storage, alone, run, tmp_path):
    more = [f"model.base_storage={storage}", f"lora.sync={'adapter' if alone else 'merged'}"]
    stored = world.train(tmp_path, *LORA, "run.max_steps=2", *more, launched=alone)
    assert stored.code == 0, stored.err
    assert all(line["token_mult_prob_error"] < 1.001 and line["train/skipped_steps"] == 0 for line in stored.metrics)
    assert [row["completion"] for row in stored.completions] != [row["completion"] for row in run.completions][
        : len(stored.completions)
    ]
    if alone:  # the base is sent once
        assert stored.metrics[0]["weight_sync/gigabytes"] == stored.metrics[1]["weight_sync/gigabytes"] > 0


@pytest.mark.full
def test_a_server_that_is_killed_gets_the_rounded_weights_again_below_the_adapters(tmp_path):
    words = (*LORA, "run.max_steps=6", "model.base_storage=nf4", "lora.sync=adapter")
    with world.running(tmp_path, *words, launched=True) as trainer:
        world.wait_for(lambda: world.steps_done(tmp_path) >= 2, "second step")
        for pid in world.family(trainer.pid):
            if "vllm_main.py" in (line := open(f"/proc/{pid}/cmdline").read()) and "supervisor.py" not in line:
                os.kill(pid, signal.SIGKILL)
        run = trainer.wait(seconds=240)
    assert run.code == 0 and "restarting it, 1 of 3 times" in run.out, run.err
    assert all(line["token_mult_prob_error"] < 1.001 for line in run.metrics)


def judged(tmp_path, judge):
    """Options of a run whose servers judge: the policy by a rubric, and `judge` in pairs."""
    model = shutil.copytree(world.folder() / "model", tmp_path / "model")
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 4096}
    (model / "config.json").write_text(json.dumps(config))
    common = "explain: false, max_tokens: 400, temperature: 1.0, max_chars: 100, verdict_retries: 9"
    rubric = f"{{function: rubric, timeout: 100, args: {{judge: policy, criteria: [{{title: short}}], {common}}}}}"
    pairwise = f"{{function: pairwise, timeout: 100, args: {{judge: {judge}, opponents: 2, {common}}}}}"
    return f"model.path={model}", f"rewards.functions=[{rubric}, {pairwise}]"


@pytest.mark.full
def test_the_policy_judges_ahead_of_training_in_evaluations_and_for_every_replica(tmp_path):
    words = ["run.max_steps=3", "rollout.max_staleness=1", "rollout.placement=dedicated", "rollout.prompts_per_step=2"]
    words += ["algorithm.importance_correction=token_truncate", "evaluation.steps=1", "train.learning_rate=1e-30"]
    words.append(f"data.eval={{source: {world.folder()}/eval.jsonl}}")
    process = world.start(tmp_path, *judged(tmp_path, "policy"), *words, launched=True, NPROC="2")
    run = world.finish(process, tmp_path)
    assert run.code == 0 and len(run.metrics) == 3, run.err
    for line in run.metrics:
        assert line["token_mult_prob_error"] == pytest.approx(1, abs=1e-3)
        for name in ("rubric", "pairwise"):
            assert line[f"rewards/{name}/exceptions"] == line[f"rewards/{name}/timeouts"] == 0, run.err
            assert line[f"rewards/{name}/judge_completion_tokens"] > 0
    evaluated = [line for line in run.lines if "eval/reward" in line]
    assert len(evaluated) == 4 and all(0 <= line["eval/rewards/rubric/mean"] <= 1 for line in evaluated), evaluated


def test_the_servers_of_a_run_judge_its_responses_with_the_policy_and_with_the_reference(tmp_path):
    words = (*judged(tmp_path, "reference"), *LORA, "lora.sync=adapter", "run.max_steps=1", "debug.dump_steps=[1]")
    run = world.train(tmp_path, *words, "rollout.prompts_per_step=1", "rollout.num_generations=4", launched=True)
    assert run.code == 0, run.err
    (line,) = run.metrics
    for name in ("rubric", "pairwise"):
        assert line[f"rewards/{name}/exceptions"] == line[f"rewards/{name}/timeouts"] == 0, run.err
        assert line[f"rewards/{name}/judge_completion_tokens"] >= len('{"better": "tie"}')
    assert line["rewards/pairwise/mean"] == 0.5 and line["rewards/rubric/mean"] == line["rewards/rubric/criteria/short"]
    verdicts = [json.loads(row["extra"]["rubric/verdicts"]) for row in run.completions]
    assert [row["rewards"]["rubric"] for row in run.completions] == [float(v[0]["criteria_met"]) for v in verdicts]
    code, said = world.audit(run.folder, "--step", 1)
    assert code == 0 and "weighted sum of what is dumped: rubric, pairwise" in said
