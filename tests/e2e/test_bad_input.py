"""User mistakes: exit code 2, one readable message that names the key, and no process left running."""

import contextlib
import io
import json
import os
import shutil
import socket

import pytest
from ranks import run_ranks
from safetensors.torch import load_file, save_file

from megagrpo.__main__ import main
from tests.e2e import world


def refused(run, *words):
    """Assert that the run ended with exit code 2 before training, and that its message contains `words`."""
    assert run.code == 2, run.out + run.err
    for word in words:
        assert word in run.err, run.err
    assert "Traceback" not in run.err and not run.lines


CASES = {
    "unknown key": (["train.learning_rat=1"], ["train.learning_rat: unknown key; did you mean train.learning_rate?"]),
    "wrong type": (["run.max_steps=many"], ["run.max_steps", "integer", "'many'"]),
    "two at once": (
        ["run.max_steps=0", "rollout.num_generations=1"],
        ["run.max_steps", "rollout.num_generations", "2 problem(s)"],
    ),
    "missing model": (["model.path=/no/such/model"], ["model.path", "/no/such/model"]),
    "missing tokenizer": (["model.tokenizer=/no/such/tokenizer"], ["model.tokenizer", "/no/such/tokenizer"]),
    "missing data": (["data.train.source=/no/such.jsonl"], ["data.train", "/no/such.jsonl"]),
    "missing column": (["data.prompt_column=questoin"], ["data.prompt_column", "`questoin`", "prompt, answer"]),
    "missing renamed column": (
        ["data.columns.solution=anwser"],
        ["data.columns.solution", "`anwser`", "did you mean", "answer"],
    ),
    "unknown reward": (["rewards.functions.0.function=exact_numbr"], ["exact_numbr", "exact_number"]),
    "reward in no module": (
        ["rewards.functions.0.function=no_such_module:f"],
        ["rewards.functions[0]", "cannot be loaded", "'no_such_module'"],
    ),
    "reward argument": (
        ["rewards.functions=[{function: exact_number, args: {speed: 2}}]"],
        ["args.speed", "no such argument"],
    ),
    "two of three tasks": (
        [
            "tasks=[{name: one}, {name: two, rewards: {functions: [{function: code_execution}]}}, {name: three, sampling: {temprature: 1}}]"
        ],
        [
            "tasks.two.rewards.functions: reward `two/code_execution` needs column `tests`",
            "tasks.three.sampling has `temprature`",
        ],
    ),
    "prompts too long": (["rollout.max_prompt_length=3"], ["data.train", "rollout.max_prompt_length 3"]),
    "no server": (["rollout.urls=[http://127.0.0.1:9]"], ["rollout.urls", "http://127.0.0.1:9", "does not respond"]),
    "no scheme": (
        ["rollout.urls=[localhost]"],
        ["rollout.urls.0", "localhost does not start with http://", "write it as http://HOST:PORT"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_in_the_config_is_named(case, tmp_path):
    overrides, words = CASES[case]
    refused(world.train(tmp_path, *overrides), *words)


OF_RANKS = {
    "data.prompt_column=questoin": "`questoin`",  # read by leaders of replicas
    "model.tokenizer=/no/such/tokenizer": "/no/such/tokenizer",
    "rewards.functions.0.function=no_such_module:f": "'no_such_module'",
    "rollout.urls=[http://127.0.0.1:9]": "does not respond",  # asked by rank 0
    "run.callbacks=[no_such_module:C]": "'no_such_module'",
    "model.path=/no/such/model": "/no/such/model",  # read by every rank
}


def trained(words):
    """Exit code and errors of a rank."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        return main(["train", *words]), said.getvalue()


@pytest.mark.parametrize("launched", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("override", OF_RANKS)
def test_a_mistake_is_printed_once_by_all_ranks_together(override, launched, tmp_path):
    text = OF_RANKS[override]
    if launched:
        run = world.finish(world.start(tmp_path, "parallel.tp=2", override, NPROC="2"), tmp_path)
    else:
        codes, said = zip(*run_ranks(trained, 2, world.arguments(tmp_path, "parallel.tp=2", override)), strict=True)
        run = world.Run(*set(codes), "", "".join(said), tmp_path / "run")
    refused(run, text)
    told = [line for line in run.err.splitlines() if text in line]
    assert len(told) == 1 and "rank " not in told[0], run.err


def test_a_tensor_parallel_size_that_does_not_fit_names_those_that_do(tmp_path):
    refused(
        world.finish(world.start(tmp_path, "parallel.tp=3"), tmp_path),
        "num_attention_heads=4",
        "tp=3",
        "valid tp: 1, 2",
    )


def test_an_empty_data_set_is_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    refused(world.train(tmp_path, f"data.train.source={tmp_path}/empty.jsonl"), "data.train", "empty.jsonl")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wants_proof", ["needs column `proof`", "the data set has answer"]),
        ("no_such_function", ["no_such_function", "low_bytes"]),
    ],
)
def test_a_reward_function_of_ones_own_that_does_not_fit(name, words, tmp_path):
    refused(world.train(tmp_path, f"rewards.functions.0.function={world.folder()}/rewards.py:{name}"), *words)


def test_a_model_folder_without_weights_is_refused(tmp_path):
    shutil.copytree(world.folder() / "model", tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    refused(world.train(tmp_path, f"model.path={tmp_path}/model"), "model.path", "model.safetensors")


def cut(file):
    os.truncate(file, file.stat().st_size - 100)


def with_nan(file):
    tensors = load_file(file)
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut, ["model.safetensors is truncated inside model.norm.weight", "download or copy the file again"]),
        (with_nan, ["model.norm.weight in ", "model.safetensors holds nan at [3]", "use another checkpoint"]),
    ],
    ids=["truncated", "nan"],
)
def test_damaged_weights_are_named_before_a_run_replaces_another(damage, words, tmp_path):
    shutil.copytree(world.folder() / "model", tmp_path / "model")
    damage(tmp_path / "model" / "model.safetensors")
    refused(world.train(tmp_path, f"model.path={tmp_path}/model"), *words)


def test_a_model_of_an_unknown_architecture_is_refused(tmp_path):
    shutil.copytree(world.folder() / "model", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(
        json.dumps(config | {"model_type": "gpt9", "architectures": ["Gpt9ForCausalLM"]})
    )
    refused(world.train(tmp_path, f"model.path={tmp_path}/model"), "model: architecture gpt9", "docs/models.md")


def test_a_port_that_is_taken_is_refused(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused(world.train(tmp_path, f"rollout.port={port}", launched=True), f"rollout.port: {port}", "name another")


def test_what_this_machine_cannot_compute_is_refused_before_a_server_starts(tmp_path):
    said = "train.fused_logprobs: true is not possible: there is no GPU; set it to false"
    refused(world.train(tmp_path, "train.fused_logprobs=true", launched=True), said)
    assert not [*tmp_path.rglob("vllm_*.log")] and not [*tmp_path.rglob("resolved.yaml")]


@pytest.mark.full
def test_a_server_that_cannot_start_shows_the_end_of_its_log(tmp_path):
    run = world.train(tmp_path, "rollout.extra_args=[--load-format, nowhere]", launched=True)
    assert run.code == 1 and "Traceback" not in run.err
    assert (
        "vLLM server" in run.err
        and "ended with exit code" in run.err
        and "nowhere" in run.err
        and "vllm_0.log" in run.err
    )


def test_a_reward_that_raises_for_every_response_ends_the_run_after_the_step_with_its_traceback(tmp_path):
    own = f"{world.folder()}/rewards.py"
    functions = json.dumps([{"function": f"{own}:{name}"} for name in ("low_bytes", "raises")])
    run = world.train(tmp_path, f"rewards.functions={functions}")
    assert run.code == 1 and len(run.metrics) == 1 and run.saved == ["step_000001"]
    assert run.metrics[0]["rewards/raises/exceptions"] == 16
    end = run.err[run.err.index("rank 0 stops: rewards.functions: raises failed for every response of step 1;") :]
    assert (
        "Traceback (most recent call last)" in end and f'File "{own}"' in end and "RuntimeError: no reward today" in end
    )
    assert "megagrpo/trainer/trainer.py" not in end


@pytest.mark.full
def test_a_reward_that_fails_costs_its_reward_alone(tmp_path):
    own = f"{world.folder()}/rewards.py"
    functions = json.dumps(
        [{"function": f"{own}:{name}", "independent": True} for name in ("low_bytes", "raises_on_odd_lengths", "hangs")]
    )
    run = world.train(tmp_path, f"rewards.functions={functions}", "rewards.timeout=0.05", "rollout.prompts_per_step=2")
    assert run.code == 0, run.err
    for line in run.metrics:
        texts = [row["completion"] for row in run.completions if row["step"] == line["step"]]
        assert (
            line["rewards/raises_on_odd_lengths/exceptions"] == sum(len(text) % 2 for text in texts)
            and line["grad_norm"] > 0
        )
        assert line["rewards/hangs/timeouts"] == 8
        assert line["rewards/raises_on_odd_lengths/mean"] == line["rewards/hangs/mean"] == 0
        assert line["reward"] == pytest.approx(line["rewards/low_bytes/mean"])
    assert "no reward today" in run.err and "rewards/hangs/timeouts 8" in run.out
