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
from megagrpo.commands.setup.completion import REGISTRATIONS
from megagrpo.config.io import shipped_names

START = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], "source {}\n"),
    "zsh": (["zsh", "-f", "-i"], "autoload -Uz compinit; compinit -u -D; source {}\n"),
}
TYPED = {  # what is typed before the tabulator -> the completed words
    "megagrpo tra": "train",
    "megagrpo train --res": "train --resume",
    "megagrpo train megagrpo:quickstart_tp": "train megagrpo:quickstart_tp3",
    "megagrpo train mine.": "train mine.yaml",
    "megagrpo train my\\ folder/": "train my folder/a.yaml",
    "megagrpo train x.yaml train.learning_r": "train x.yaml train.learning_rate=",
    "megagrpo train x.yaml --resume rewards.functions.0.wei": "train x.yaml --resume rewards.functions.0.weight=",
    "megagrpo generate x.yaml --set run.nam": "generate x.yaml --set run.name=",
    "megagrpo submit x.yaml --cluster gen": "submit x.yaml --cluster generic",
    "megagrpo plan x.yaml --gpu h1": "plan x.yaml --gpu h100",
    "megagrpo install mlf": "install mlflow",
    "megagrpo inspect no": "inspect notes.txt",
}


def script_of(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.fixture
def folder(tmp_path):
    """A folder with configs and the stand-in."""
    for name in ("bin", "my folder"):
        (tmp_path / name).mkdir()
    for name in ("mine.yaml", "my folder/a.yaml", "notes.txt"):
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


@pytest.mark.parametrize("shell", REGISTRATIONS)
def test_a_shell_completes_what_is_typed(shell, folder, capsys):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (folder / "script").write_text(script_of(shell, capsys))
    assert dict(zip(TYPED, answers(shell, folder, list(TYPED)), strict=True)) == TYPED


def test_a_script_completes_words_without_starting_python(folder, capsys):
    (folder / "script").write_text(script_of("bash", capsys))
    code = 'source ./script; PATH=; for COMP_CWORD in 1 2; do _megagrpo; echo "${COMPREPLY[*]}"; done'
    shell = ["bash", "-c", f"COMP_WORDS=(megagrpo train ''); {code}"]
    ended = subprocess.run(shell, cwd=folder, capture_output=True, text=True)
    assert ended.stderr == "" and ended.stdout.split("\n")[0] == "train"
    assert set(ended.stdout.split("\n")[1].split()) == {f"megagrpo:{name}" for name in shipped_names()}


def test_printing_a_script_imports_nothing_slow():
    code = "import sys; from megagrpo.__main__ import main; main(['completion', 'zsh'])\n"
    code += (
        "sys.exit(str({'torch', 'vllm', 'megatron', 'transformers', 'numpy', 'datasets', 'rich'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == "set()\n"
