"""Completion scripts, in the shells themselves: a stand-in for `megagrpo` prints the words that a shell has
completed."""

import os
import pty
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megagrpo.__main__ import main
from megagrpo.commands import COMMANDS
from megagrpo.commands.setup.completion import SHELLS

START = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], "source {}\n"),
    "zsh": (["zsh", "-f", "-i"], "autoload -Uz compinit; compinit -u -D; source {}\n"),
    "fish": (["fish", "--no-config", "-i"], "source {}\n"),
    "tcsh": (["tcsh", "-f", "-i"], "source {}\n"),
}
SIMPLE = {  # what is typed before the tabulator -> the completed words
    "megagrpo tra": "train",
    "megagrpo train --res": "train --resume",
    "megagrpo submit x.yaml --cluster gen": "submit x.yaml --cluster generic",
    "megagrpo inspect no": "inspect notes.txt",
}
TYPED = SIMPLE | {
    "megagrpo train megagrpo:quickstart_tp": "train megagrpo:quickstart_tp3",
    "megagrpo train mine.": "train mine.yaml",
    "megagrpo train my\\ folder/": "train my folder/a.yaml",
    "megagrpo train x.yaml train.learning_r": "train x.yaml train.learning_rate=",
    "megagrpo train x.yaml --resume train.learning_r": "train x.yaml --resume train.learning_rate=",
    "megagrpo train x.yaml rewards.functions.0.wei": "train x.yaml rewards.functions.0.weight=",
    "megagrpo train x.yaml model.precision=bf": "train x.yaml model.precision=bf16",
    "megagrpo train x.yaml model.path=no": "train x.yaml model.path=notes.txt",
    "megagrpo generate x.yaml --set run.resume=t": "generate x.yaml --set run.resume=true",
    "megagrpo report runs/mi": "report runs/mine",
    "megagrpo report runs/mine runs/th": "report runs/mine runs/theirs",
    "megagrpo eval x.yaml --checkpoint la": "eval x.yaml --checkpoint latest",
    "megagrpo export runs/mine/checkpoints/s": "export runs/mine/checkpoints/step_000008",
    "megagrpo submit x.yaml --cluster min": "submit x.yaml --cluster mine.yaml",
    "megagrpo plan x.yaml --gpu h1": "plan x.yaml --gpu h100",
    "megagrpo launch 2 verify x.yaml --ran": "launch 2 verify x.yaml --ranks",
    "megagrpo install mlf": "install mlflow",
    "megagrpo keys rollout.temp": "keys rollout.temperature",
}


def script_of(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.fixture
def folder(tmp_path):
    """A folder with configs, runs and the stand-in."""
    for name in ("bin", "my folder", "runs/mine/checkpoints/step_000008", "runs/theirs"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("runs/mine/resolved.yaml", "runs/theirs/resolved.yaml", "mine.yaml", "my folder/a.yaml", "notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / "bin" / "megagrpo").write_text('#!/bin/sh\necho "completed: [$*]"\n')
    (tmp_path / "bin" / "megagrpo").chmod(0o755)
    return tmp_path


def answers(shell: str, folder: Path, typed: list[str]) -> list[str]:
    """The words that the stand-in has got after each line with a tabulator, typed into an interactive shell."""
    command, source = START[shell]
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    own = {"PATH": path, "TERM": "xterm", "HOME": str(folder), "LC_ALL": "C.UTF-8"}
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.execvpe(command[0], command, own)
    found = []
    try:
        for line in [source.format("./script") + "megagrpo ready", *typed]:
            os.write(terminal, f"{line}\t\n".encode())
            shown, deadline = b"", time.monotonic() + 60
            while not (match := re.search(rb"completed: \[([^]]*)\]\r", shown)):
                assert time.monotonic() < deadline, shown
                shown += os.read(terminal, 65536)
            found.append(match[1].decode())
    finally:
        os.close(terminal)
        os.waitpid(process, 0)
    return found[1:]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_what_is_typed(shell, folder, capsys):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (folder / "script").write_text(script_of(shell, capsys))
    typed = SIMPLE if shell == "tcsh" else TYPED
    assert dict(zip(typed, answers(shell, folder, list(typed)), strict=True)) == typed


def listed(script: str, folder: Path, *words: str) -> list[str]:
    """All completions that the script's program prints for the last word."""
    shell = ["bash", "-c", 'source ./script; sh -c "$_megagrpo_program" megagrpo "$@"', "bash", *words]
    (folder / "script").write_text(script)
    return subprocess.run(shell, cwd=folder, capture_output=True, text=True).stdout.split("\n")[:-1]


def test_the_lists_of_a_word_that_is_still_empty(folder, capsys):
    script = script_of("bash", capsys)
    assert listed(script, folder, "") == [*COMMANDS, "--help", "--version"]
    assert listed(script, folder, "train", "") == ["megagrpo:", "mine.yaml", "bin/", "my folder/", "runs/"]
    assert "rollout." in listed(script, folder, "train", "x.yaml", "") and listed(script, folder, "keys", "ru") == [
        "run"
    ]
    assert listed(script, folder, "report", "")[:2] == ["runs/mine", "runs/theirs"]
    assert listed(script, folder, "eval", "x.yaml", "--checkpoint", "")[:3] == [
        "latest",
        "best",
        "runs/mine/checkpoints/step_000008",
    ]
    assert listed(script, folder, "completion", "") == list(SHELLS)
    assert listed(script, folder, "train", "x.yaml", "run.resume=") == ["run.resume=true", "run.resume=false"]
    assert listed(script, folder, "fly", "") == []


def test_a_script_completes_without_starting_python(folder, capsys):
    """Only the program that prints the completions runs, with nothing but the shell's own commands."""
    (folder / "script").write_text(script_of("bash", capsys))
    shell = [
        "bash",
        "-c",
        'source ./script; PATH=; /bin/sh -c "$_megagrpo_program" megagrpo train x.yaml train.learning_r',
    ]
    ended = subprocess.run(shell, cwd=folder, capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("train.learning_rate=\n", "")


def test_printing_a_script_imports_nothing_slow():
    code = "import sys; from megagrpo.__main__ import main; main(['completion', 'zsh'])\n"
    code += (
        "sys.exit(str({'torch', 'vllm', 'megatron', 'transformers', 'numpy', 'datasets', 'rich'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == "set()\n"
