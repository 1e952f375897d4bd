"""The set-up script on machines with missing tools, and checks of committed files."""

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
FILES = ["pyproject.toml", "constraints-cpu.txt", "constraints-gpu.txt", "launch/setup.sh"]
TOOLS = ["bash", "cat", "sha256sum", "cut", "dirname", "rm", "tail"]


@pytest.fixture
def machine(tmp_path):
    """A clone's set-up files and a PATH with only a few basic tools; call it to run the script."""
    clone, path = tmp_path / "clone", tmp_path / "bin"
    (clone / "launch").mkdir(parents=True)
    path.mkdir()
    for name in FILES:
        shutil.copy(REPOSITORY / name, clone / name)

    def run(*arguments: str, tools: dict[str, str], **environment: str) -> subprocess.CompletedProcess:
        for tool in TOOLS:
            (path / tool).unlink(missing_ok=True)
            (path / tool).symlink_to(shutil.which(tool))
        for tool, script in tools.items():
            (path / tool).write_text(f"#!{shutil.which('bash')}\n{script}\n")
            (path / tool).chmod(0o755)
        return subprocess.run(
            [shutil.which("bash"), str(clone / "launch" / "setup.sh"), *arguments],
            env={"PATH": str(path), "HOME": str(tmp_path)} | environment,
            capture_output=True,
            text=True,
            timeout=60,
        )

    run.clone = clone
    return run


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ({}, "git is missing; install it"),
        ({"git": ""}, "no C compiler: 'cc' is not on PATH; install one"),
        ({"git": "", "cc": ""}, "cannot install uv: that needs a python3 with pip or venv, and network access."),
        ({"git": "", "cc": "", "python3": "exit 1", "uv": "exit 1"}, "cannot install uv"),
        (
            {"git": "", "cc": "", "uv": '[ "$1" = --version ]'},
            "no Python 3.12 in .python-version, pyenv or PATH. Install one:",
        ),
        ({"git": "", "cc": "", "uv": '[ "$1" = --version ] || echo python', "python": "exit 1"}, "python has no headers (Python.h)"),
    ],
)
def test_what_is_missing_is_said_and_nothing_is_set_up(machine, tools, message):
    ended = machine("cpu", tools=tools)
    assert ended.returncode == 2 and message in ended.stderr
    assert not (machine.clone / ".venv").exists()


def test_the_python_that_pyenv_runs_elsewhere_does_not_count(machine):
    finds = '[ "$1" = --version ] || { [ -z "$PYENV_VERSION" ] && echo python; }'
    ended = machine("cpu", tools={"git": "", "cc": "", "uv": finds, "python": "exit 1"}, PYENV_VERSION="3.11.7")
    assert "python has no headers (Python.h)" in ended.stderr


def test_an_unknown_kind_is_refused(machine):
    ended = machine("tpu", tools={})
    assert ended.returncode == 2 and "unknown kind 'tpu'; use cpu or gpu" in ended.stderr


WORKING = {
    "git": "",
    "cc": "",
    "uv": 'case $1 in --version) ;; python) echo python ;; venv) mkdir -p .venv/bin; printf "#!/bin/sh\\n" >.venv/bin/python; '
    'chmod +x .venv/bin/python ;; pip) echo "$*" >>installed ;; esac',
    "python": "",
    "mkdir": '/bin/mkdir "$@"',
    "chmod": '/bin/chmod "$@"',
}


def test_done_work_is_skipped_until_what_it_depends_on_changes(machine):
    installed = machine.clone / "installed"
    assert machine("cpu", tools=WORKING).returncode == 0
    assert installed.read_text() == "pip install -q --compile-bytecode -c constraints-cpu.txt -e .[cpu,quickstart,data,wandb,dev]\n"
    again = machine("cpu", tools=WORKING)
    assert again.stdout == "setup: .venv is up to date (cpu)\n" and len(installed.read_text().splitlines()) == 1
    with open(machine.clone / "constraints-cpu.txt", "a") as file:
        file.write("# newer\n")
    assert machine("cpu", tools=WORKING).returncode == 0 and len(installed.read_text().splitlines()) == 2


def test_an_install_that_failed_is_not_taken_for_done(machine):
    broken = WORKING | {"uv": WORKING["uv"].replace('echo "$*" >>installed', "exit 1")}
    assert machine("cpu", tools=broken).returncode != 0
    assert "ready" in machine("cpu", tools=WORKING).stdout


def test_a_cpu_environment_is_not_turned_into_a_gpu_one(machine):
    machine("cpu", tools=WORKING)
    ended = machine("gpu", tools=WORKING)
    assert ended.returncode == 2 and ".venv is set up for cpu; remove it first: rm -rf .venv" in ended.stderr


def test_the_kind_follows_the_driver(machine):
    assert "(gpu)" in machine(tools=WORKING | {"nvidia-smi": "echo GPU 0"}).stdout


def tracked_files() -> list[Path]:
    listing = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True)
    return [REPOSITORY / name for name in listing.stdout.splitlines() if (REPOSITORY / name).is_file()]


def test_committed_files_hold_no_registry_address_and_no_lock():
    words = [b"pypi" + b".org", b"python" + b"hosted", b"--index" + b"-url", b"--extra-index" + b"-url", b"find" + b"-links"]
    for path in tracked_files():
        assert path.name != "uv.lock"
        content = path.read_bytes()
        assert not [word for word in words if word in content], path


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_constraints_pin_every_direct_dependency_and_nothing_by_address(kind):
    lines = (REPOSITORY / f"constraints-{kind}.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines)
    assert "apex" not in pinned
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = [kind, "quickstart", "data", "wandb", "dev"]
    wanted = project["dependencies"] + [name for extra in extras for name in project["optional-dependencies"][extra]]
    for requirement in wanted:
        assert requirement.partition("[")[0].split(">")[0].split("=")[0].split(",")[0].strip() in pinned, requirement


def test_ci_calls_the_tests_and_nothing_else():
    assert os.access(REPOSITORY / ".ci" / "run", os.X_OK)
    commands = [line for line in (REPOSITORY / ".ci" / "run").read_text().splitlines() if not line.startswith(("#", "set ", "cd "))]
    assert commands == ["exec make test"]
