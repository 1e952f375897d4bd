import gc
import subprocess
import sys
from pathlib import Path

import pytest

from megagrpo.__main__ import _imports, main, parse
from megagrpo.config import ConfigError

QUICKSTART = str(Path(__file__).parents[3] / "configs" / "quickstart.yaml")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "megagrpo", *arguments], capture_output=True, text=True, env=environment or None)


def test_a_wrong_config_ends_with_code_2_and_no_traceback():
    ended = run("train", QUICKSTART, "parallel.tp=two", "train.learning_rat=1")
    assert ended.returncode == 2 and ended.stdout == ""
    assert "2 problem(s)" in ended.stderr and "did you mean train.learning_rate?" in ended.stderr and "Traceback" not in ended.stderr


def test_only_the_first_rank_prints_the_problems(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    assert main(["train", "gone.yaml"]) == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "arguments", [[], ["plan"], ["fly", QUICKSTART], ["plan", QUICKSTART, "world_size=none"], ["train", QUICKSTART, "--fast"]]
)
def test_a_wrong_command_line_ends_with_code_2(arguments, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err


def test_resume_is_short_for_the_config_key_wherever_it_stands():
    for arguments in (["--resume", "train", QUICKSTART], ["train", QUICKSTART, "run.max_steps=3", "--resume", "run.seed=1"]):
        assert parse(arguments).config.run.resume
    assert not parse(["train", QUICKSTART]).config.run.resume


def test_world_size_belongs_to_plan_alone():
    command = parse(["plan", QUICKSTART, "world_size=6", "run.seed=9", "gpu_memory_gb=80"])
    assert command.sizes == {"world_size": 6, "gpu_memory_gb": 80.0} and command.config.run.seed == 9
    with pytest.raises(ConfigError, match="world_size: unknown key"):
        parse(["train", QUICKSTART, "world_size=6"])


def test_help_names_the_commands_and_with_a_command_every_key(capsys):
    for arguments, keys in (["--help"], False), (["train", "--help"], True):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        printed = capsys.readouterr().out
        assert "megagrpo train CONFIG" in printed and ("train.adam_beta1" in printed) == keys


def test_what_a_command_imports_is_no_garbage_to_be_looked_for():
    try:
        with pytest.raises(ImportError), _imports():
            assert not gc.isenabled()
            import megagrpo.no_such_module  # noqa: F401
        assert gc.isenabled() and gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()
