"""Every command of the project explains itself with --help, in its own process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megagrpo.commands import COMMANDS, FOLDERS, module_of

ROOT = Path(__file__).parents[2]
SCRIPTS = [
    path for folder in ("benchmarks", "checkpoints_tools", "launch") for path in sorted((ROOT / folder).iterdir())
]
PROGRAMS = [
    str(path.relative_to(ROOT))
    for path in SCRIPTS
    if path.suffix == ".sh" or (path.suffix == ".py" and "__main__" in path.read_text())
]
# They import no torch, which takes seconds. test_main.py asks every command of megagrpo in one process.
FAST = [
    "megagrpo plan",
    "checkpoints_tools/show.py",
    "launch/local.sh",
    "launch/setup.sh",
    "benchmarks/learning.py",
    "benchmarks/whole_step.py",
]
# modules of megagrpo/commands
NOT_COMMANDS = {"--init--", "parser"}


def command(name: str) -> list[str]:
    """The command line of a command."""
    if name.startswith("megagrpo"):
        return [sys.executable, "-m", *name.split()]
    return ["bash" if name.endswith(".sh") else sys.executable, str(ROOT / name)]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FAST else pytest.mark.full)
        for name in ("megagrpo", *(f"megagrpo {verb}" for verb in COMMANDS), *PROGRAMS)
    ],
)
def test_help_says_what_a_command_is_for_and_ends_well(name, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command(name), "--help"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert Path(name.split()[-1]).stem in done.stdout and len(done.stdout.split()) > 20 and not list(tmp_path.iterdir())


def test_each_command_is_a_file():
    folders = [ROOT / "megagrpo" / "commands" / folder for folder in ("", *FOLDERS)]
    files = {path.stem.replace("_", "-") for folder in folders for path in folder.glob("*.py")}
    assert files - NOT_COMMANDS == set(COMMANDS)
    assert all((ROOT / (module_of(name).replace(".", "/") + ".py")).is_file() for name in COMMANDS)


def test_every_command_has_a_row_in_the_list_of_commands():
    rows = [line for line in (ROOT / "docs" / "commands.md").read_text().splitlines() if line.startswith("| `")]
    assert [name for name in COMMANDS if not any(f"`{name}`" in row.split("|")[1] for row in rows)] == []


def test_all_programs_are_known():
    assert len(PROGRAMS) >= 12 and set(FAST) < {*(f"megagrpo {verb}" for verb in COMMANDS), *PROGRAMS}
