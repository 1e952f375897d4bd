"""`megagrpo eval` and `megagrpo generate`, on running servers and with servers of their own, leave nothing behind."""

import json
import os
import shutil
import signal
import string
import subprocess
import sys
from statistics import fmean

import pytest
import torch
from safetensors.torch import load_file, save_file

from megagrpo.config import load_config
from megagrpo.engine.servers.serving import find_weights
from megagrpo.families.hf_config import load_hf_config
from megagrpo.weights.bridge.hf_files import carry, files_of
from megagrpo.weights.files.file_checksums import CHECKSUMS
from tests.e2e import world
from tests.e2e.test_evaluation import evaluations, sets


def evaluate(tmp_path, *words, output="eval.json"):
    code, out, err = world.command("eval", *words, "--output", tmp_path / output)
    return code, out, err, json.loads((tmp_path / output).read_text()) if code == 0 else None


def test_sets_are_evaluated_on_a_server_that_runs_already(tmp_path):
    code, out, err, written = evaluate(tmp_path, *world.arguments(tmp_path, sets()))
    assert code == 0, err
    heads, easy, hard = out.splitlines()
    assert heads.split() == ["set", "reward", "length", "cut", "pass@1", "pass@2", "pass@4", "maj@4"]
    assert easy.split()[0] == "easy" and hard.split()[0] == "hard" and hard.split()[-3:] == ["-", "-", "-"]
    responses = written["responses"]["easy"]
    assert (
        len(responses) == 3 * 4
        and max(r["num_tokens"] for r in responses) <= 5
        and len(written["responses"]["hard"]) == 4
    )
    passed = [r["rewards"]["low_bytes"] >= 0.5 for r in responses]
    assert written["metrics"]["easy/pass@1"] == pytest.approx(fmean(passed))
    assert written["metrics"]["easy/pass@4"] == pytest.approx(fmean(any(passed[i : i + 4]) for i in range(0, 12, 4)))
    assert written["metrics"]["easy/reward"] == pytest.approx(fmean(r["reward"] for r in responses))
    assert written["checkpoint"] is None and not (tmp_path / "run").exists()


@pytest.mark.full
def test_a_checkpoint_of_a_run_scores_what_the_run_said_of_it(tmp_path):
    model = tmp_path / "model"  # in bfloat16; the run trains in float32
    shutil.copytree(world.folder() / "model", model)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    options = [sets(), f"model.path={model}", "train.learning_rate=3e-3"]
    run = world.train(tmp_path, *options)
    assert run.code == 0, run.err
    after = evaluations(run)[-1]
    words = world.arguments(tmp_path, *options, launched=True)
    code, _, err, written = evaluate(tmp_path, *words, "--checkpoint", "latest")
    assert code == 0, err
    assert f"exporting {run.newest.resolve()}" in err
    assert written["metrics"]["hard/reward"] == pytest.approx(after["eval/hard/reward"], abs=1e-6)
    before = evaluations(run)[0]
    assert abs(before["eval/hard/reward"] - after["eval/hard/reward"]) > 1e-3


def from_bfloat16(checkpoint):
    """A copy of a run's checkpoint as if the run had started from a model in bfloat16, whose files an export would
    repeat."""
    copy = checkpoint.with_name("of_bfloat16")
    shutil.copytree(checkpoint, copy, dirs_exist_ok=True)
    (copy / CHECKSUMS).unlink()
    files = files_of(copy / "hf").in_dtype(torch.bfloat16)
    carry(checkpoint / "hf", files, copy / "hf")
    return copy


@pytest.mark.parametrize(
    ("overrides", "dtype", "line"),
    [
        (["model.precision=fp32"], "float32", None),
        (["model.precision=auto"], "float32", None),  # on any machine: the run has trained in float32
        (
            ["rollout.quantization=fp8_per_channel", "algorithm.importance_correction=token_truncate"],
            "bfloat16",
            "trained in float32, served in bfloat16 (rollout.quantization)",
        ),
        (["model.precision=bf16"], "bfloat16", "trained in float32, served in bfloat16 (model.precision)"),
    ],
)
def test_a_checkpoint_is_served_in_the_precision_of_its_run(overrides, dtype, line, tmp_path, monkeypatch):
    monkeypatch.setenv("MEGAGRPO_CPU", "amd_bf16")  # `auto` means bfloat16 here
    said, checkpoint = [], from_bfloat16(world.plain().newest)
    found = find_weights(load_config(world.folder() / "config.yaml", overrides), str(checkpoint), tmp_path, said.append)
    assert (found.dtype, found.adapter) == (dtype, None)
    assert [text for text in said if "served in" in text] == ([f"{checkpoint}: {line}"] if line else [])
    stored, served = world.plain_tensors(checkpoint), load_file(found.folder / "model.safetensors")
    final = stored["decoder.final_norm.weight"]
    assert final.dtype == torch.float32 and torch.equal(served["model.norm.weight"], final.to(getattr(torch, dtype)))
    assert not torch.equal(final, final.bfloat16().float()) and load_hf_config(found.folder).dtype == dtype


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "evaluation.sets: there is nothing to evaluate; name sets, or held-out prompts in data.eval"),
        (
            ["SETS", "--checkpoint", "nowhere"],
            "already have their weights; leave out --checkpoint and --adapter, or the urls",
        ),
        (["SETS", "rollout.urls=[]", "--checkpoint", "nowhere"], "--checkpoint: nowhere does not exist"),
        (
            ["SETS", "rollout.urls=[]", "--checkpoint", "best"],
            "run has no best checkpoint; set evaluation.keep_best before",
        ),
        (["SETS", "rollout.urls=[]", "--checkpoint", "latest"], "run has no latest checkpoint; train it to its end"),
        (
            ["SETS", "rollout.urls=[]", "--adapter", "nowhere"],
            "--adapter: nowhere holds no adapter_config.json of PEFT with a rank `r`",
        ),
        (["SETS", "rollout.urls=['http://127.0.0.1:9']"], "rollout.urls: http://127.0.0.1:9 does not respond"),
        (["SETS", "--output", "/proc/none/eval.json"], "--output: /proc/none/eval.json cannot be written"),
        (["SETS", "--layout", "tp=2"], "megagrpo eval: unknown option --layout"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(words, message, tmp_path):
    words = [sets() if word == "SETS" else word for word in words]
    code, _, err = world.command("eval", *world.arguments(tmp_path, *words))
    assert code == 2 and message in err, err


# ------------------------------------------------------------------------------------------------------------- generate


def generate(*words, stdin="", urls=True):
    servers = ["--set", f"rollout.urls=[{world.server()}]"] if urls else []
    return world.command("generate", world.folder() / "config.yaml", *words, *servers, stdin=stdin)


def test_a_prompt_is_answered_greedily_the_same_from_the_command_line_and_from_standard_input():
    greedy = ["--temperature", "0", "--max-tokens", "6"]
    code, out, err = generate("What is 1 + 2?", *greedy)
    assert code == 0 and len(out) > 1, err
    assert generate("-", *greedy, stdin="What is 1 + 2?\n")[:2] == (0, out)
    assert generate("What is 1 + 2?", "--temperature", "2", "--max-tokens", "6")[1] != out
    one_choice = generate("What is 1 + 2?", "--top-k", "1", "--max-tokens", "6")[1]
    assert one_choice == out == generate("What is 1 + 2?", "--top-p", "0.0001", "--max-tokens", "6")[1]
    assert generate("What is 1 + 2?", "--min-p", "1", "--max-tokens", "6")[1] == out
    cut = [
        "--set",
        f"rollout.stop={json.dumps([*string.printable])}",
        "--set",
        "rollout.include_stop_str_in_output=false",
    ]
    stop = next((i for i, character in enumerate(out[:-1]) if character in string.printable), len(out) - 1)
    assert generate("What is 1 + 2?", *greedy, *cut)[1] == out[:stop] + "\n"
    assert generate("What is 1 + 2?", *greedy, "--set", "data.chat_template_kwargs={opening: <think>}")[1] != out
    code, _, err = generate("What is 1 + 2?", "--set", "data.chat_template_kwargs={openin: <think>}")
    assert (
        code == 2
        and "data.chat_template_kwargs: the chat template does not use `openin`; did you mean `opening`?" in err
    )
    hot = ["What is 1 + 2?", "--temperature", "2", "--max-tokens", "6", "--seed"]
    one, again, other = (generate(*hot, seed)[1] for seed in ("1", "1", "2"))
    assert one == again != other
    # the system message precedes the question
    assert "prompts.0: has" in generate("What is 1 + 2?", "--system", "x" * 60)[2]


@pytest.mark.full
def test_a_signal_ends_the_command_and_its_server():
    # a model without a config is enough; the command starts its own server
    command = [sys.executable, "-m", "megagrpo", "generate", str(world.folder() / "model"), "hello"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process = subprocess.Popen(command, env=environment, text=True, start_new_session=True, **pipes)
    world.wait_for(lambda: len(world.family(process.pid)) > 2, "start of the server", seconds=60)
    family = world.family(process.pid)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    world.wait_for(lambda: not any(map(world.alive, family)), "end of all processes", seconds=5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["hello", "--temperature", "-1"], "--temperature: must be 0 (greedy) or more (got -1.0)"),
        (["hello", "--top-p", "0"], "--top-p: must be above 0, 1 at most (got 0.0)"),
        (["hello", "--min-p", "2"], "--min-p: must be from 0 to 1 (got 2.0)"),
        (["hello", "--top-k", "-1"], "--top-k: must be 0 (all tokens) or more (got -1)"),
        (["hello", "--max-tokens", "0"], "--max-tokens: must be above 0 (got 0)"),
        (["hello", "--seed", "-3"], "--seed: must be 0 or more (got -3)"),
        (["x" * 70], "prompts.0: has"),
        (["hello", "--fast"], "megagrpo generate: unknown option --fast"),
    ],
)
def test_a_wrong_question_is_refused(words, message):
    code, out, err = generate(*words)
    assert code == 2 and message in err and out == "", err


def test_a_model_alone_takes_no_keys_of_a_config():
    for words, message in (
        (["nowhere", "hello"], "model.path: nowhere does not exist"),
        (["nowhere", "hello", "--set", "run.seed=1"], "--set: replaces values of a config"),
        (["nowhere", "hello", "--checkpoint", "best"], "--checkpoint: needs the config of its run"),
        ([], "megagrpo generate: the following arguments are required: CONFIG_OR_MODEL"),
    ):
        code, _, err = world.command("generate", *words)
        assert code == 2 and message in err, err
    assert world.command("generate", "--help")[1].startswith("usage: megagrpo generate")


@pytest.mark.full
def test_an_adapter_answers_as_the_weights_it_is_merged_into(tmp_path):
    pytest.importorskip("peft")
    world.run_ranks(_make_adapter, 1, world.folder() / "model", tmp_path)
    greedy = ["--temperature", "0", "--max-tokens", "8"]
    with_adapter = world.command(
        "generate", world.folder() / "model", "1 + 1?", *greedy, "--adapter", tmp_path / "adapter"
    )
    merged = world.command("generate", tmp_path / "merged", "1 + 1?", *greedy)
    plain = world.command("generate", world.folder() / "model", "1 + 1?", *greedy)
    assert with_adapter[0] == merged[0] == plain[0] == 0, with_adapter[2]
    assert with_adapter[1] == merged[1] != plain[1]


def _make_adapter(model, folder):
    import peft
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=4, lora_alpha=16, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    adapted.save_pretrained(folder / "adapter")
    adapted.merge_and_unload().save_pretrained(folder / "merged")
    AutoTokenizer.from_pretrained(model).save_pretrained(folder / "merged")
