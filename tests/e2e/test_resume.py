"""A run that stops and resumes equals an uninterrupted run. Also: how folders of earlier runs are treated."""

import base64
import json
import os
import shutil

import numpy as np
import pytest
import torch

from megagrpo.proof.replays import compare, differing_tensors
from megagrpo.weights.files.torch_dist import StoredTensors
from tests.e2e import world

# vLLM's sums depend on the batch that it decodes.
ENGINE = ("token_mult_prob_error", "gen_kl_error", "policy_kl_error", "js_divergence_error", "sampling/")


# An epoch is two steps. No response passes, so every prompt rests during the second epoch: steps 3 and 4 draw from the
# third.
CURRICULUM = (
    "data.train.size=8",
    "data.curriculum=[0.1,0.9]",
    "data.curriculum_pass_reward=2",
    "data.curriculum_rest=1",
)


def told(run):
    """metrics.jsonl without metrics that depend on the clock."""
    return [{name: value for name, value in line.items() if _is_the_runs_own(name)} for line in run.lines]


def _is_the_runs_own(name: str) -> bool:
    return not name.startswith(world.MEASURED + ENGINE) and not name.endswith("/seconds")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Four steps without interruption."""
    run = world.train(tmp_path_factory.mktemp("whole"), "run.max_steps=4", *CURRICULUM)
    assert run.code == 0, run.err
    return run


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Two steps, and two more with --resume."""
    output = tmp_path_factory.mktemp("parts")
    assert world.train(output, "run.max_steps=2", *CURRICULUM).code == 0
    run = world.train(output, "run.max_steps=4", "--resume", *CURRICULUM)
    assert run.code == 0, run.err
    return run


def test_a_resumed_run_goes_on_with_the_next_prompts_and_steps(whole, parts):
    assert [line["step"] for line in parts.metrics] == [1, 2, 3, 4]
    assert [row["prompt_id"] for row in parts.completions] == [row["prompt_id"] for row in whole.completions]
    assert "after step 2" in parts.out and "step 1/" not in parts.out
    assert parts.saved == ["step_000002", "step_000004"]


def test_a_resumed_run_remembers_which_prompts_rest(whole, parts):
    for run in (whole, parts):
        state = json.loads((run.newest / "megagrpo.json").read_text())["state"]
        assert state["cursor"] == 24  # 8 drawn, 8 passed over, 8 drawn
        assert [epoch for _, _, epoch in state["pass_rates"]] == [2] * 8


def test_a_resumed_run_samples_the_same_and_tells_the_same(whole, parts):
    assert [row["completion"] for row in parts.completions] == [row["completion"] for row in whole.completions]
    for resumed, uninterrupted in zip(told(parts), told(whole), strict=True):
        # the engine of the resumed run got the weights of step 2 once more
        resumed["weight_version"] -= resumed["step"] > 2
        assert resumed == uninterrupted


def test_a_resumed_run_ends_with_the_same_weights_and_moments_bit_by_bit(whole, parts):
    expected, found = world.plain_tensors(whole.newest), world.plain_tensors(parts.newest)
    assert len(expected) > 30 and found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    first = world.plain_tensors(parts.folder / "checkpoints" / "step_000002")
    assert not any(torch.equal(first[name], tensor) for name, tensor in expected.items() if "exp_avg" in name)
    files = [path.name for path in whole.newest.glob("*.distcp")]
    assert files and all((whole.newest / name).read_bytes() == (parts.newest / name).read_bytes() for name in files)


def test_a_run_on_kept_rollouts_starts_no_server_and_ends_with_the_same_bits(parts, tmp_path):
    run = world.train(tmp_path, "run.max_steps=4", f"rollout.kept.path={parts.folder}", *CURRICULUM, launched=True)
    assert run.code == 0 and not list(run.folder.glob("vllm*")), run.err
    assert [row["completion"] for row in run.completions] == [row["completion"] for row in parts.completions]
    lines, differ = compare(parts.folder, run.folder, 0)
    assert not differ and lines == [
        "steps 1 to 4: all metrics are equal, except times and memory",
        f"step_000004: 0 of {len(StoredTensors(run.newest).keys())} tensors differ",
    ]
    for written in run.newest.glob("*.distcp"):
        assert written.read_bytes() == (parts.newest / written.name).read_bytes()


def test_a_changed_run_on_kept_rollouts_is_the_ablation_and_its_first_difference_is_named(parts, tmp_path):
    of_prompts = tmp_path / "written_elsewhere.jsonl"
    rows = [json.loads(line) for line in (parts.folder / "rollouts" / "replica_0.jsonl").read_text().splitlines()]
    with of_prompts.open("w") as file:
        for row in rows:
            rollouts = [plain_lists(rollout) for rollout in row["rollouts"]]
            file.write(json.dumps({"prompt_id": row["prompt_id"], "rollouts": rollouts}) + "\n")
    kept = [f"rollout.kept={{path: {of_prompts}, by: prompt}}", "rollout.num_generations=3", "run.seed=7"]
    run = world.train(tmp_path, "run.max_steps=1", "data.train.size=8", *kept, launched=True)
    assert run.code == 0, run.err
    texts = {rollout["text"] for row in rows for rollout in row["rollouts"]}
    assert len(run.completions) == 12 and {row["completion"] for row in run.completions} <= texts
    lines, differ = compare(parts.folder, run.folder, 0)
    assert differ and lines[0].startswith("step 1 differs in ")


def command(printed, *words):
    """Exit code, output and errors of `megagrpo` in a process like that of a run."""
    pid = world._fork([*map(str, words)], printed, lambda: None)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    said = (printed / "out").read_text(), (printed / "err").read_text()
    for name in ("out", "err"):
        (printed / name).unlink()
    return code, *said


def test_a_replay_begins_and_ends_at_steps_and_names_a_flipped_bit(parts, tmp_path):
    shutil.copytree(parts.folder, tmp_path / "run", symlinks=True)
    replay = "replay", tmp_path / "run", "--from", 2
    code, out, err = command(tmp_path, *replay, "rollout.kept.to_step=3")
    assert code == 0, out + err
    assert out.endswith(
        "steps 3 to 3: all metrics are equal, except times and memory\n"
        "no checkpoint is in both runs, so weights were not compared\n"
    )
    code, _, err = command(tmp_path, *replay)
    assert code == 2 and f"{tmp_path}/run/replay holds an earlier replay; remove it first" in err
    tensors, changed = StoredTensors(parts.newest), StoredTensors(parts.newest)
    name, whole = tensors.keys()[-1], changed.whole

    def flipped(key):
        values = whole(key).clone()
        if key == name:
            values.view(-1)[0] = torch.nextafter(values.view(-1)[0], torch.tensor(9.0))
        return values

    changed.whole = flipped
    assert [*differing_tensors(tensors, changed)] == [(name, f"1 of {whole(name).numel()} elements, by up to 1 ulp")]
    for words, problem in (
        (("--from", 3), "--from: {run} has no checkpoint after step 3; it has 2, 4"),
        (("--to", 2, "--from", 2), "--to: step 2 is not after step 2; name a later step"),
    ):
        shutil.rmtree(tmp_path / "run" / "replay", ignore_errors=True)
        code, _, err = command(tmp_path, "replay", tmp_path / "run", *words)
        assert code == 2 and problem.format(run=tmp_path / "run") in err, err
    code, _, err = command(tmp_path, "replay", tmp_path)
    assert code == 2 and f"RUN: {tmp_path} is no folder of a run: it has no resolved.yaml" in err


def plain_lists(rollout):
    """A rollout as another program writes it: numbers instead of base64, and no text."""
    ids = np.frombuffer(base64.b64decode(rollout["response_ids"]), np.int32).tolist()
    logprobs = np.frombuffer(base64.b64decode(rollout["rollout_logprobs"]), np.float32).tolist()
    return {"response_ids": ids, "rollout_logprobs": logprobs, "finish_reason": rollout["finish_reason"]}


def test_a_run_that_has_taken_all_its_steps_has_nothing_left_to_resume(parts):
    before = (parts.folder / "metrics.jsonl").read_text()
    run = world.train(parts.folder.parent, "run.max_steps=4", "--resume", *CURRICULUM)
    assert (run.code, run.saved) == (0, parts.saved) and (run.folder / "metrics.jsonl").read_text() == before


def test_without_a_checkpoint_there_is_nothing_to_resume(tmp_path):
    run = world.train(tmp_path, "--resume")
    assert run.code == 2
    assert f"run.resume: {run.folder} holds no complete checkpoint; start it without --resume" in run.err
    assert not run.folder.exists()


def test_a_damaged_checkpoint_is_named_with_the_one_before_it_and_nothing_is_touched(parts, tmp_path):
    shutil.copytree(parts.folder, tmp_path / "run", symlinks=True)
    broken = tmp_path / "run" / "checkpoints" / "step_000004"
    os.truncate(broken / "__0_0.distcp", 1000)
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    run = world.train(tmp_path, "run.max_steps=6", "--resume")
    assert run.code == 2 and "Traceback" not in run.err and len(run.err.splitlines()) == 1, run.err
    assert (
        f"run.resume: {broken}/__0_0.distcp is truncated: " in run.err
        and f"To continue from step_000002 instead, remove the folder {broken}" in run.err
    )
    assert run.saved == parts.saved and (run.folder / "metrics.jsonl").read_text() == before


def test_a_folder_with_an_earlier_run_is_refused_or_moved_aside(parts):
    refused = world.train(parts.folder.parent)
    assert (
        refused.code == 2
        and "holds an earlier run; continue it with --resume" in refused.err
        and "run.overwrite=true" in refused.err
    )
    moved = world.train(parts.folder.parent, "run.max_steps=1", "run.overwrite=true")
    assert moved.code == 0 and [line["step"] for line in moved.lines] == [1] and moved.saved == ["step_000001"]
    aside = parts.folder.with_name("run.1")
    assert f"the earlier run in {parts.folder} was moved to {aside} (run.overwrite)" in moved.out
    assert (aside / "checkpoints" / "step_000004" / "megagrpo.json").exists() and (
        aside / "metrics.jsonl"
    ).read_text().count("\n") == 4
