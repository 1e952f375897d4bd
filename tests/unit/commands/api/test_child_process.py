"""Child processes of the API: their output, their exit codes, Ctrl-C, and their end with this process."""

import importlib
import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from megagrpo.commands.api import child_process
from megagrpo.commands.api.child_process import PACKAGE_ROOT
from megagrpo.commands.api.inputs.errors import CommandFailed
from megagrpo.config import ConfigError

PROGRAM = '''
import os, signal, subprocess, sys, time


def prints(code):
    print("one \\u00e9")
    print("two", file=sys.stderr)
    assert sys.stdin.read() == ""
    return code


def adds(*numbers):
    return [sum(numbers)]


def refuses(text):
    from megagrpo.config import ConfigError

    raise ConfigError(str(text))


def looks():
    print(os.environ.get("COLUMNS"), os.environ.get("FORCE_COLOR"))
    return 0


def dies():
    os.kill(os.getpid(), signal.SIGKILL)


def leaves_a_process():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print("done")
    return 0


def waits(started, ended, signals):
    """Writes the numbers of all signals to `ended`, and exits after so many."""
    got = []

    def note(number, frame):
        got.append(number)
        open(ended, "a").write(f"{number}\\n")

    signal.signal(signal.SIGINT, note)
    signal.signal(signal.SIGTERM, note)
    open(started, "w").close()
    while len(got) < signals:
        time.sleep(0.01)
    print("saved")
    return 130
'''


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A module that child processes import too."""
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([PACKAGE_ROOT, str(tmp_path)]))
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("program")
    sys.modules.pop("program")


@pytest.fixture
def heeds_ctrl_c():
    """SIGINT raises KeyboardInterrupt, also where a shell started the tests in the background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def wait_for(file: Path, text: str = "") -> None:
    deadline = time.monotonic() + 60
    while not (file.exists() and text in file.read_text()):
        assert time.monotonic() < deadline, f"no {file.name} with {text!r}"
        time.sleep(0.01)


def failed(function, *arguments, **options) -> CommandFailed:
    """The error of a call."""
    with pytest.raises(CommandFailed) as error:
        child_process.call("a command", function, *arguments, **options)
    return error.value


def test_errors_appear_and_standard_input_is_empty(program, capsys):
    error = failed(program.prints, 3)
    assert (error.exit_code, error.output) == (3, "two\n") and capsys.readouterr() == ("", "two\n")
    assert str(error) == "a command failed with exit code 3; its last lines:\ntwo"


def test_a_function_s_result_comes_back(program):
    assert child_process.call("adds", program.adds, 1, 2) == [3]


def test_a_character_whose_bytes_come_apart_is_shown_whole():
    pieces, shown = iter([bytes([byte]) for byte in "é€".encode()]), io.StringIO()
    log = SimpleNamespace(read=lambda size: next(pieces, b""))
    child_process._follow(SimpleNamespace(poll=lambda: 0), log, shown)
    assert shown.getvalue() == "é€"


def test_a_log_gets_all_output_and_is_shown_from_its_end_on(program, tmp_path, capsys, monkeypatch):
    log = tmp_path / "log"
    log.write_text("before\n")
    monkeypatch.setenv("COLUMNS", "70")
    error = failed(program.prints, 3, log=log)
    assert sorted(error.output.splitlines()) == ["one é", "two"] and capsys.readouterr() == (error.output, "")
    assert log.read_text() == "before\n" + error.output
    child_process.call("looks", program.looks, log=log, quiet=True)
    assert log.read_text().endswith("\n70 None\n") and capsys.readouterr() == ("", "")


def test_output_has_no_colours_and_a_width(program, tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a Jupyter kernel does
    monkeypatch.delenv("COLUMNS", raising=False)
    child_process.call("looks", program.looks, log=tmp_path / "log")
    assert (tmp_path / "log").read_text() == "100 None\n"


def test_exit_code_2_is_a_wrong_config(program, tmp_path):
    for function, options, message in (
        (program.prints, {}, r"^two$"),
        (program.prints, {"log": tmp_path / "log", "quiet": True}, "two"),
        (program.refuses, {}, r"^2$"),
    ):
        with pytest.raises(ConfigError, match=message):
            child_process.call("a command", function, 2, **options)


def test_a_killed_process_has_the_signal_s_exit_code(program):
    assert failed(program.dies).exit_code == 128 + signal.SIGKILL


def test_a_process_that_the_child_leaves_is_not_waited_for(program, tmp_path):
    began = time.monotonic()
    for options in ({}, {"log": tmp_path / "log", "quiet": True}):
        assert child_process.call("leaves", program.leaves_a_process, **options) is None
    assert time.monotonic() - began < 30 and (tmp_path / "log").read_text() == "done\n"


@pytest.mark.parametrize("logged", [True, False])
def test_ctrl_c_reaches_the_child_once_and_is_raised_after_its_end(logged, program, tmp_path, capsys, heeds_ctrl_c):
    started, ended, log = tmp_path / "started", tmp_path / "ended", tmp_path / "log"

    def interrupt():
        for count in (1, 2):
            wait_for(started)
            os.kill(os.getpid(), signal.SIGINT)
            wait_for(ended, f"{signal.SIGINT:d}\n" * count)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        child_process.call("waits", program.waits, str(started), str(ended), 2, log=log if logged else None)
    thread.join()
    assert ended.read_text().split() == ["2", "2"] and (not logged or capsys.readouterr().out == "saved\n")


def test_the_child_is_asked_to_stop_and_can_still_write_when_this_process_is_killed(program, tmp_path):
    started, ended, log = tmp_path / "started", tmp_path / "ended", tmp_path / "log"
    code = (
        "from pathlib import Path; import program; from megagrpo.commands.api.child_process import call; "
        f"call('waits', program.waits, {str(started)!r}, {str(ended)!r}, 1, log=Path({str(log)!r}))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    wait_for(started)
    parent.kill()
    parent.communicate()
    wait_for(ended, f"{signal.SIGTERM:d}\n")
    wait_for(log, "saved")
