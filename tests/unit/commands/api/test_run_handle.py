"""A run's folder as an object: tables, checkpoints, and errors of what it cannot give."""

import json
import pickle
from pathlib import Path

import pytest
from huggingface_hub import constants

import megagrpo
from megagrpo.commands.api.inputs.errors import CommandFailed, TrainingFailed
from megagrpo.commands.api.run_handle import load_run
from megagrpo.config import ConfigError, RunConfig, save_resolved
from tests.unit.weights.hub.hub_server import TOKEN, hub

MINIMAL = {
    "model": {"path": "m"},
    "data": {"train": {"source": "org/data"}},
    "rewards": {"functions": [{"function": "format"}]},
}


@pytest.fixture
def folder(tmp_path):
    """The folder of a run after two steps and two evaluations, while the third line is being written."""
    save_resolved(RunConfig.model_validate(MINIMAL), tmp_path)
    lines = [
        {"step": 0, "wall_time": 1.0, "eval/reward": 0.1},
        {"step": 1, "wall_time": 2.0, "reward": 0.25, "time/step": 3.5},
        {"step": 2, "wall_time": 3.0, "reward": None},
        {"step": 2, "wall_time": 4.0, "eval/reward": 0.5, "eval/pass@1": 1.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 3, "rew')
    sample = {"step": 1, "prompt": "a", "completion": "b", "reward": 1.5, "rewards": {"x": 1.0, "y": None}}
    (tmp_path / "completions.jsonl").write_text(json.dumps(sample) + "\n")
    for name, complete in (("step_000001", True), ("step_000002", True), ("step_000003", False)):
        checkpoint = tmp_path / "checkpoints" / name
        checkpoint.mkdir(parents=True)
        if complete:
            (checkpoint / "megagrpo.json").write_text("{}")
    return tmp_path


def test_steps_and_evaluations_are_separate_tables(folder):
    run = load_run(folder)
    assert list(run.metrics["step"]) == [1, 2] and run.metrics["reward"].isna().tolist() == [False, True]
    assert list(run.metrics["time/step"].dropna()) == [3.5] and "eval/reward" not in run.metrics
    assert list(run.evaluations["eval/reward"]) == [0.1, 0.5] and list(run.evaluations["eval/pass@1"].dropna()) == [1.0]


def test_completions_have_a_column_per_reward_function(folder):
    row = load_run(str(folder)).completions.iloc[0].to_dict()
    assert row == {"step": 1, "prompt": "a", "completion": "b", "reward": 1.5, "rewards/x": 1.0, "rewards/y": None}


def test_the_newest_complete_checkpoint_and_the_best_one(folder):
    run = load_run(folder)
    assert run.checkpoint == folder / "checkpoints" / "step_000002" and run.best_checkpoint is None
    (folder / "checkpoints" / "best").symlink_to("step_000001")
    assert run.best_checkpoint == folder / "checkpoints" / "step_000001"


def test_a_run_before_its_first_step_is_empty(tmp_path):
    save_resolved(RunConfig.model_validate(MINIMAL), tmp_path)
    run = load_run(tmp_path)
    assert len(run.metrics) == len(run.completions) == 0 and run.checkpoint is None and repr(run) == f"<Run {tmp_path}>"
    assert run.config == RunConfig.model_validate(MINIMAL | {"run": {"output_dir": str(Path.cwd() / "runs")}})


def test_a_run_says_where_it_is_and_how_far(folder):
    assert repr(load_run(folder)) == f"<Run {folder}: 2 steps, reward 0.25 -> 0.25>"


def test_a_folder_without_a_run_is_an_error(tmp_path):
    with pytest.raises(
        ConfigError,
        match=f"folder: {tmp_path} holds no run .no resolved.yaml.; name the folder run.output_dir/run.name",
    ):
        megagrpo.load_run(tmp_path)


def test_without_a_checkpoint_nothing_is_generated_or_exported(tmp_path):
    save_resolved(RunConfig.model_validate(MINIMAL), tmp_path)
    run = load_run(tmp_path)
    for call in (lambda: run.generate("a"), lambda: run.export(tmp_path / "out")):
        with pytest.raises(ConfigError, match=r"has no latest checkpoint; train it to its end, or set run.save_steps"):
            call()
    with pytest.raises(ConfigError, match=r"has no best checkpoint; set evaluation.keep_best before training"):
        run.export(tmp_path / "out", checkpoint="best")


def test_an_export_never_overwrites_a_folder(folder):
    with pytest.raises(ConfigError, match=r"folder: .*/checkpoints exists; name another folder"):
        load_run(folder).export(folder / "checkpoints")


def test_a_wrong_dtype_of_an_export_is_refused_with_the_right_ones(folder, tmp_path):
    with pytest.raises(ConfigError, match="dtype: int8 is not known; choose one of auto, float32, bfloat16, float16"):
        load_run(folder).export(tmp_path / "out", dtype="torch.int8")


def exported(folder, name):
    """A folder as `Run.push` leaves it after an export."""
    out = folder / "exports" / name
    out.mkdir(parents=True)
    (out / "config.json").write_text("{}")
    return out


def test_a_run_is_pushed_from_its_export(folder, monkeypatch):
    exported(folder, "step_000002")
    with hub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        assert load_run(folder).push("me/model", token=TOKEN, private=True) == f"{server.url}/me/model"
        assert list(server.repos["me/model"]["main"]) == ["config.json"] and server.private == {"me/model"}


def test_a_run_is_pushed_in_the_dtype_of_its_export(folder, monkeypatch):
    (exported(folder, "step_000002_float32") / "config.json").write_text('{"dtype": "float32"}')
    exported(folder, "step_000002")
    with hub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        load_run(folder).push("me/model", token=TOKEN, dtype="float32")
        assert server.repos["me/model"]["main"]["config.json"] == b'{"dtype": "float32"}'


def test_a_wrong_repository_or_token_is_an_error_before_and_after_the_export(folder, monkeypatch):
    with pytest.raises(megagrpo.PushError, match="'a/b/c' is no name on the hub; write OWNER/NAME"):
        load_run(folder).push("a/b/c")
    exported(folder, "step_000002_merged")
    with hub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        with pytest.raises(megagrpo.PushError, match="the hub rejected the token"):
            load_run(folder).push("me/model", token="hf_wrong", merge=True)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ("a", {"temprature": 1}, "temprature: unknown option of generate; did you mean `temperature`"),
        ("a", {"temperature": -1}, "temperature: must be 0 .greedy. or more .got -1"),
        ("a", {"top_p": "all"}, "top_p: must be above 0, 1 at most .got 'all'"),
        ("a", {"max_tokens": 0}, "max_tokens: must be above 0"),
        ("a", {"n": 0}, "n: must be a positive number .got 0"),
        ([3], {}, "prompts.0: must be a text or a list of messages"),
        ([[{"text": "a"}]], {}, "prompts.0: must be a text or a list of messages"),
    ],
)
def test_a_wrong_request_is_an_error_before_a_server_starts(folder, prompts, options, message):
    with pytest.raises(ConfigError, match=message):
        load_run(folder).generate(prompts, **options)


def test_no_prompts_have_no_responses(folder):
    assert load_run(folder).generate([]) == []


def test_errors_name_the_exit_code_the_log_and_the_last_lines(tmp_path):
    output = "".join(f"line {i}\n\n" for i in range(100))
    error = TrainingFailed("megagrpo train", 1, output, tmp_path, tmp_path / "train.log")
    assert isinstance(error, CommandFailed) and (error.exit_code, error.folder) == (1, tmp_path)
    head, *last = str(error).splitlines()
    assert (
        head
        == f"training failed with exit code 1; the run is in {tmp_path}, all its output in {tmp_path}/train.log; its "
        f"last lines:"
    )
    assert last == [f"line {i}" for i in range(80, 100)]
    for each in (error, CommandFailed("megagrpo eval", 3, output)):
        assert vars(pickle.loads(pickle.dumps(each))) == vars(each) and str(pickle.loads(pickle.dumps(each))) == str(
            each
        )
