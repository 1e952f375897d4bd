"""Progress bars on a real pseudo-terminal, whose screen pyte computes, and progress in a pipe."""

import contextlib
import io
import logging
import os
import pty
import re
import sys
import tempfile
import termios
import traceback
import warnings
from pathlib import Path

import pyte
import pytest
from rich.console import Console

from megagrpo.platform.process.terminal import log_to_stderr
from megagrpo.records.console import ConsoleSink
from megagrpo.records.progress_bars import Bars, run_progress

USED = log_to_stderr, ConsoleSink, run_progress  # imported here once for all forks

CONFIG = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
COLUMNS = 120
CODE = """
import logging, sys, time
from megagrpo.config import load_config
from megagrpo.platform.process.terminal import log_to_stderr, show, warn
from megagrpo.records.console import ConsoleSink
from megagrpo.records.progress_bars import run_progress
log_to_stderr()
config = load_config(CONFIG, %s)
sink, progress = ConsoleSink(config), run_progress(config.run)
with progress.task("step 1/3 generate") as task:
    task.expect(64, "responses")
    task.advance(16, tokens=2000)
    time.sleep(0.4)
    sink.message("a line of the run")
    warn("a warning")
    logging.getLogger("megagrpo.rewards").warning("a log record")
    print("a print of a callback")
    show("[bold]no markup[/bold]")
    time.sleep(0.4)
with progress.task("loading") as task, progress.task("waiting for vLLM"):
    task.expect(2_000_000, "B")
    task.advance(1_000_000)
    time.sleep(0.4)
sink.step(1, {"reward": 0.5})
"""
QUIET, LOWER = (CODE % [override] for override in ("run.progress=false", "run.log_level=warning"))
BARS = CODE % []
CONVERSION = """
from megagrpo.records import progress_bars
progress_bars.FIRST_LINE_SECONDS = 0.0
with progress_bars.conversion_progress().task("writing OUT") as task:
    task.expect(3_000_000, "B", done=1_000_000)
    task.advance(1_000_000)
    task.advance(1_000_000)
"""
LINES = ["a line of the run", "a warning", "a log record", "a print of a callback", "[bold]no markup[/bold]"]


def on_a_terminal(code: str, columns: int = COLUMNS, **environment: str) -> bytes:
    """The bytes that `code` writes to a terminal of this width, as standard output and error."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (40, columns))
    pid = forked(code, slave, slave, {"TERM": "xterm-256color"} | environment)
    os.close(slave)
    written = b""
    with contextlib.suppress(OSError):  # raised when the fork has closed the terminal
        while block := os.read(master, 1 << 16):
            written += block
    os.close(master)
    assert os.waitpid(pid, 0)[1] == 0, written.decode()
    return written


def in_a_pipe(code: str, **environment: str) -> tuple[bytes, bytes]:
    """The bytes that `code` writes to standard output and error, which are no terminals."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        assert os.waitpid(forked(code, out.fileno(), err.fileno(), environment), 0)[1] == 0
        out.seek(0), err.seek(0)
        return out.read(), err.read()


def forked(code: str, out: int, err: int, environment: dict[str, str]) -> int:
    """Run `code` in a fork of this process, which has imported what it needs; return its process id."""
    with warnings.catch_warnings():
        # other tests may have imported torch, which keeps two idle threads
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.dup2(out, 1), os.dup2(err, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
        for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "MEGAGRPO_LOG_LEVEL"):
            os.environ.pop(name, None)
        os.environ.update(environment)
        logging.getLogger().handlers.clear()  # pytest's
        exec(code, {"CONFIG": CONFIG})
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def screen(written: bytes, columns: int = COLUMNS) -> list[str]:
    """The lines that remain on the screen."""
    display = pyte.Screen(columns, 40)
    pyte.ByteStream(display).feed(written)
    return [line.rstrip() for line in display.display if line.strip()]


@pytest.fixture(scope="module")
def written():
    return on_a_terminal(BARS)


def test_bars_appear_and_vanish_and_the_lines_remain(written):
    text = written.decode()
    assert "step 1/3 generate" in text and "16/64 responses" in text and re.search(r"[\d,]+ tokens/s", text)
    assert "1 MB of 2 MB" in text and "waiting for vLLM" in text
    assert screen(written) == [*LINES, "step 1/8  reward  0.500"]
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")  # the cursor is visible again


def test_a_line_that_is_printed_over_a_bar_is_whole(written):
    display = pyte.Screen(COLUMNS, 40)
    stream = pyte.ByteStream(display)
    states = []
    for byte in written:
        stream.feed(bytes([byte]))
        if byte == ord("\n"):
            states.append([line.rstrip() for line in display.display if line.strip()])
    over_a_bar = [state for state in states if any("responses" in line for line in state) and "a log record" in state]
    assert over_a_bar
    for state in over_a_bar:
        assert [line for line in state if "responses" not in line] == LINES[: len(state) - 1]


def test_colours_are_left_out_with_no_color_and_bars_on_a_dumb_terminal():
    assert re.search(rb"\x1b\[[\d;]*3\dm", on_a_terminal(BARS))
    assert not re.search(rb"\x1b\[[\d;]*[34]\dm", on_a_terminal(BARS, NO_COLOR="1"))
    dumb = on_a_terminal(BARS, TERM="dumb")
    assert b"responses" not in dumb and b"\x1b[" not in dumb and b"a log record" in dumb


@pytest.mark.parametrize(("code", "hidden"), [(QUIET, []), (LOWER, ["a line of the run", "step 1/8  reward  0.500"])])
def test_a_run_without_progress_or_with_a_higher_log_level_draws_no_bars(code, hidden):
    written = on_a_terminal(code)
    assert b"responses" not in written and b"\x1b[?25l" not in written
    assert screen(written) == [line for line in [*LINES, "step 1/8  reward  0.500"] if line not in hidden]


def test_bars_fit_a_narrow_terminal():
    narrow = on_a_terminal(BARS, columns=50)
    display = pyte.Screen(50, 40)
    pyte.ByteStream(display).feed(narrow)
    assert [line.rstrip() for line in display.display if line.strip()][: len(LINES)] == LINES


@pytest.mark.parametrize("environment", [{}, {"FORCE_COLOR": "1"}])
def test_a_pipe_gets_nothing_but_lines(environment):
    out, err = in_a_pipe(BARS, **environment)
    assert b"generate" not in out + err
    for text in (out, err):
        assert not re.search(rb"[\x00-\x09\x0b-\x1a\x1c-\x1f]", text)
        assert b"\x1b" not in text or environment
    assert err.splitlines() == [b"a warning", b"a log record"]


def test_bars_stay_off_when_standard_error_is_a_file_and_on_when_only_standard_output_is(tmp_path):
    out = Path(tmp_path, "out")
    redirected = f"import os, sys\nos.dup2(os.open({str(out)!r}, os.O_WRONLY | os.O_CREAT), %d)\n"
    to_terminal = on_a_terminal(redirected % 2 + BARS)
    assert b"responses" not in to_terminal and b"a line of the run" in to_terminal and b"\x1b[?25l" not in to_terminal
    assert out.read_text().splitlines() == ["a warning", "a log record"]
    out.unlink()
    to_terminal = on_a_terminal(redirected % 1 + BARS)
    assert b"16/64 responses" in to_terminal and screen(to_terminal) == ["a warning", "a log record"]
    expected = [line for line in LINES if line not in ("a warning", "a log record")]
    assert out.read_text().splitlines() == [*expected, "step 1/8  reward  0.500"]


def test_a_conversion_in_a_pipe_prints_lines_with_the_part_that_was_done_before():
    out, err = in_a_pipe(CONVERSION)
    resumed, under_way, last = err.decode().splitlines()
    assert resumed == "writing OUT: resuming after 1 MB of 3 MB" and not out
    assert re.fullmatch(r"writing OUT:  67% of 3 MB, .*/s, 0 s, \d+ s left", under_way)
    assert re.fullmatch(r"writing OUT: 100% of 3 MB, .*/s, 0 s", last)


class Broken(io.StringIO):
    """A terminal that takes no text."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        raise OSError("no space left on device")


def test_a_terminal_that_fails_ends_the_bars_and_not_the_work():
    bars = Bars(Console(file=Broken(), force_terminal=True))
    for _ in range(2):
        with bars.task("step") as task:
            task.expect(2, "responses")
            task.advance()
        assert not bars.draws
