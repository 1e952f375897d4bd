"""Child processes of the API: their output, their exit codes, Ctrl-C, and their end with this process."""

import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megagrpo.api import child
from megagrpo.api.child import PACKAGE_ROOT
from megagrpo.config import ConfigError

PROGRAM = '''
import os, signal, subprocess, sys, time


def main(arguments):
    return globals()[arguments[0]](*arguments[1:])


def prints(code):
    print("one \\u00e9")
    print("two", file=sys.stderr)
    assert sys.stdin.read() == ""
    return int(code)


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
    while len(got) < int(signals):
        time.sleep(0.01)
    print("saved")
    return 130
'''


@pytest.fixture
def program(tmp_path):
    """Environment in which the module `program` can be imported."""
    (tmp_path / "program.py").write_text(PROGRAM)
    return {"PYTHONPATH": os.pathsep.join([PACKAGE_ROOT, str(tmp_path)])}


def wait_for(file: Path, text: str = "") -> None:
    deadline = time.monotonic() + 60
    while not (file.exists() and text in file.read_text()):
        assert time.monotonic() < deadline, f"no {file.name} with {text!r}"
        time.sleep(0.01)


def test_output_appears_and_is_logged_and_standard_input_is_empty(program, capsys):
    log = io.StringIO()
    ended = child.run("program", ["prints", "3"], environment=program, log=log, show_output=True)
    assert (ended.exit_code, ended.out, ended.err, ended.output) == (3, "one é\n", "two\n", "two\n")
    assert capsys.readouterr() == ("one é\n", "two\n") and sorted(log.getvalue().splitlines()) == ["one é", "two"]
    child.run("program", ["prints", "0"], environment=program, show_errors=False)
    assert capsys.readouterr() == ("", "")


def test_output_has_no_colours_and_a_width(program, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a Jupyter kernel does
    monkeypatch.delenv("COLUMNS", raising=False)
    assert child.run("program", ["looks"], environment=program).out == "100 None\n"
    monkeypatch.setenv("COLUMNS", "80")
    assert child.run("program", ["looks"], environment=program).out == "80 None\n"


def test_exit_code_2_is_a_wrong_config(program):
    with pytest.raises(ConfigError, match=r"^two$"):
        child.run("program", ["prints", "2"], environment=program)


def test_a_killed_process_has_the_signal_s_exit_code(program):
    assert child.run("program", ["dies"], environment=program).exit_code == 128 + signal.SIGKILL


def test_a_process_that_the_child_leaves_is_not_waited_for(program):
    began = time.monotonic()
    assert child.run("program", ["leaves_a_process"], environment=program).out == "done\n"
    assert time.monotonic() - began < 30


def test_ctrl_c_reaches_the_child_once_and_is_raised_after_its_end(program, tmp_path, capsys):
    started, ended = tmp_path / "started", tmp_path / "ended"

    def interrupt():
        for count in (1, 2):
            wait_for(started)
            os.kill(os.getpid(), signal.SIGINT)
            wait_for(ended, f"{signal.SIGINT:d}\n" * count)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        child.run("program", ["waits", str(started), str(ended), "2"], environment=program, show_output=True)
    thread.join()
    assert ended.read_text().split() == ["2", "2"] and capsys.readouterr().out == "saved\n"


def test_the_child_is_asked_to_stop_when_this_process_is_killed(program, tmp_path):
    started, ended = tmp_path / "started", tmp_path / "ended"
    code = (
        f"from megagrpo.api import child; child.run('program', ['waits', {str(started)!r}, {str(ended)!r}, '1'], environment={program!r})"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **program}, start_new_session=True)
    wait_for(started)
    parent.kill()
    parent.wait()
    wait_for(ended, f"{signal.SIGTERM:d}\n")
