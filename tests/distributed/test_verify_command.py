"""`megagrpo verify` from the command line: layouts that hold, mistakes in options, ranks that fail, torchrun."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from test_negative_controls import norms_that_keep_their_part_of_the_gradient
from tiny_policy import SHAPES

from megagrpo.__main__ import main
from megagrpo.proof.verify import layouts as verify

REPOSITORY = Path(__file__).parents[2]
RUN = """
model: {path: %s, precision: fp32}
parallel: {tp: 2, sequence_parallel: true}
data: {train: {source: unused.jsonl}}
rewards: {functions: [{function: exact_number}]}
rollout: {max_prompt_length: 40, max_completion_length: 24}
algorithm: {beta: 0.05}
"""


@pytest.fixture
def run(tmp_path):
    """The YAML of a run whose model folder has only a config.json."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["llama_tied"]))
    (tmp_path / "run.yaml").write_text(RUN % tmp_path)
    return str(tmp_path / "run.yaml")


def test_layouts_that_hold_are_shown_with_what_was_compared(run, capsys):
    assert (
        main(
            [
                "verify",
                run,
                "--layout",
                "tp=3",
                "--layout",
                "pp=2,vpp=2,pipeline_layers=[5,7,7,5]",
                "train.share_prompts=true",
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert "tp=3 on 3 ranks" in printed and "pp=2,vpp=2,pipeline_layers=[5,7,7,5] on 2 ranks" in printed
    assert printed.count("  pass, ") == 2 and "2 of 2 layouts match one process" in printed
    for line in ("loss  ", "log-prob ", "metric  ", "gradient norm  ", "gradient  ", "next weight  "):
        assert printed.count(f"  {line}") == 2
    assert "worst of" in printed and "model.layers." in printed


@pytest.mark.full
def test_without_a_layout_the_configs_own_is_tried_and_json_is_one_object(run, capsys):
    assert main(["verify", run, "--json", "--ranks", "2"]) == 0
    (layout,) = json.loads(capsys.readouterr().out)["layouts"]
    assert layout["layout"] == "tp=2,sequence_parallel" and layout["ranks"] == 2 and layout["passed"]
    assert len([d for d in layout["distances"] if d["kind"] == "gradient"]) == 20


@pytest.mark.full
def test_bf16_is_held_to_what_rounding_does_and_a_fault_is_still_seen(run, capsys, monkeypatch):
    arguments = ["verify", run, "model.precision=bf16", "--full"]
    assert main(arguments) == 0
    assert capsys.readouterr().out.count("model.layers.1.mlp.up_proj.weight") == 2  # the gradient and the weight itself
    norms_that_keep_their_part_of_the_gradient(monkeypatch)
    assert main(arguments) == 1
    assert "gradient model.layers.0.input_layernorm.weight: difference" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--layout", "tp=5"], ["num_attention_heads=12 is not divisible by tp=5", "valid tp: 1, 2, 3, 6"]),
        (["--layout", "tpp=2"], ["parallel.tpp: unknown key; did you mean parallel.tp?"]),
        (["--layout", "sequence_parallel"], ["parallel.sequence_parallel: true needs parallel.tp > 1"]),
        (["--layout", "dp=16"], ["--layout dp=16: needs 16 ranks", "8 are started at most", "megagrpo launch"]),
        (["--layout", "tp=2,dp=2", "--ranks", "2"], ["needs 4 ranks, and there are 2"]),
        (["--ranks", "3"], ["world_size: 3 is not a multiple"]),
        (["--ranks", "0"], ["--ranks: must be a positive number"]),
        (["algorithm.beta=-1"], ["algorithm.beta"]),
        (["model.path=/no/such/model"], ["model.path", "/no/such/model"]),
    ],
)
def test_a_mistake_is_named_before_anything_starts(run, arguments, words, capsys, monkeypatch):
    monkeypatch.setattr(verify, "run_ranks", pytest.fail)
    assert main(["verify", run, *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and all(word in shown.err for word in words), shown.err


def test_options_belong_to_their_command(run, capsys):
    assert (
        main(["train", run, "--layout", "tp=2"]) == 2
        and "megagrpo train: unknown option --layout" in capsys.readouterr().err
    )
    assert (
        main(["verify", run, "--resume"]) == 2 and "megagrpo verify: unknown option --resume" in capsys.readouterr().err
    )


def fails_on_the_second_rank(*arguments):
    if dist.get_rank() == 1:
        raise LookupError("no such thing")
    dist.barrier()


def test_a_rank_that_fails_is_a_layout_that_fails_and_the_others_are_still_tried(run, capsys, monkeypatch):
    stock = verify.take_step
    monkeypatch.setattr(
        verify,
        "take_step",
        lambda config, *rest: fails_on_the_second_rank() if config.parallel.tp == 2 else stock(config, *rest),
    )
    assert main(["verify", run, "--layout", "tp=2", "--layout", "tp=3"]) == 1
    printed = capsys.readouterr().out
    assert "rank 1:" in printed and "LookupError: no such thing" in printed and printed.count("  pass, ") == 1
    assert "FAIL: tp=2" in printed


@pytest.mark.full
def test_a_layout_that_hangs_fails_in_time(run, capsys, monkeypatch):
    stock = verify.take_step
    monkeypatch.setattr(verify, "LAYOUT_SECONDS", 8)
    monkeypatch.setattr(
        verify, "take_step", lambda config, *rest: time.sleep(60) if config.parallel.tp > 1 else stock(config, *rest)
    )
    assert main(["verify", run]) == 1
    assert "ranks [0, 1] did not finish within 8 s" in capsys.readouterr().out


def test_ctrl_c_ends_it(run, capsys, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "run_ranks", interrupted)
    assert main(["verify", run]) == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.full
def test_under_a_launcher_the_ranks_that_are_there_are_used(run):
    launcher = [sys.executable, "-m", "megagrpo", "launch", "2", "verify", run]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    ended = subprocess.run(
        [*launcher, "--layout", "tp=2", "--layout", "pp=2"],
        capture_output=True,
        text=True,
        timeout=250,
        env=environment,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("on 2 ranks") == 2 and "2 of 2 layouts" in ended.stdout


def test_a_world_of_another_size_than_the_layout_is_refused(run, capsys, monkeypatch):
    launcher = dict(RANK=0, WORLD_SIZE=3, LOCAL_RANK=0, LOCAL_WORLD_SIZE=3, MASTER_ADDR="127.0.0.1", MASTER_PORT=1)
    for name, value in launcher.items():
        monkeypatch.setenv(name, str(value))
    assert main(["verify", run]) == 2
    assert "world_size: 3 is not a multiple" in capsys.readouterr().err
    assert main(["verify", run, "--ranks", "2"]) == 2
    assert "--ranks: 2 asked for, and WORLD_SIZE says 3" in capsys.readouterr().err


def without_numbers(text: str) -> list[str]:
    """Lines without numbers and without the name of the worst tensor."""
    return [re.sub(r"-?\d[\d.]*(e[-+]\d+)?|(?<=: )\S+ +", "#", line.strip()) for line in text.strip().split("\n")]


@pytest.mark.full
def test_the_documentation_shows_what_is_printed(capsys, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    examples = re.findall(
        r"^ *\$ megagrpo (verify .*?)```", (REPOSITORY / "docs" / "verify.md").read_text(), re.DOTALL | re.MULTILINE
    )
    (shown,) = examples
    command_line, *lines = shown.strip().split("\n")
    assert main(shlex.split(command_line)) == 0
    printed = " ".join(" ".join(without_numbers(capsys.readouterr().out)).split())  # the page breaks long lines
    assert [line for line in without_numbers("\n".join(lines)) if " ".join(line.split()) not in printed] == [] and len(
        lines
    ) > 8
