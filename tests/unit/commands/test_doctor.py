"""megagrpo doctor: text, JSON and exit codes."""

import json
import subprocess
import sys

import pytest

from megagrpo.__main__ import main
from megagrpo.cluster.doctor.machine import Finding
from megagrpo.commands.setup.doctor import exit_code, lines

OK, WARN, FAIL, SKIPPED = (
    Finding("disk", "1 GiB", state, "" if state == "ok" else "free some") for state in ("ok", "warn", "fail", "skipped")
)


def test_exit_codes_tell_failures_from_warnings():
    codes = [
        exit_code(found, strict) for found in ([OK, SKIPPED], [OK, WARN], [WARN, FAIL]) for strict in (False, True)
    ]
    assert codes == [0, 0, 0, 1, 2, 2]


def test_each_line_has_state_subject_finding_and_fix():
    assert lines([OK, WARN, SKIPPED]) == [
        "ok       disk  1 GiB",
        "warn     disk  1 GiB; fix: free some",
        "skipped  disk  1 GiB; free some",
        "1 ok, 1 warn, 0 fail, 1 skipped",
    ]


def test_the_command_checks_this_machine_for_a_run(capsys):
    code = main(["doctor", "configs/quickstart.yaml", "world_size=1", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert said["needs"]["source"] == "quickstart" and said["needs"]["ram"] >= 1
    assert code == (2 if any(one["state"] == "fail" for one in said["findings"]) else 0)


@pytest.mark.parametrize("word", ["gpu_memory_gb=80", "train.no_such_key=1"])
def test_keys_that_nothing_reads_are_errors(word, capsys):
    assert main(["doctor", "configs/quickstart.yaml", word]) == 2
    assert word.partition("=")[0] in capsys.readouterr().err


def test_the_command_imports_no_torch():
    code = "import sys; from megagrpo.__main__ import main; main(['doctor']); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
