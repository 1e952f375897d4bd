"""A whole run on a pseudo-terminal: bars for its phases, the lines that remain, and log records of the user's code."""

import contextlib
import os
import pty
import sys
import termios

import pyte

from tests.e2e import world

ROWS, COLUMNS = 60, 120
CALLBACK = """
import logging

logging.basicConfig(level=logging.INFO, format="mine: %(message)s")


class Mine:
    def on_step_end(self, config, state, control, **kwargs):
        logging.getLogger("mine").info("after step %d", state.step)
"""


def test_a_run_on_a_terminal_draws_a_bar_for_each_phase_and_leaves_its_lines(tmp_path):
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (ROWS, COLUMNS))

    def to_the_terminal():
        os.dup2(slave, 1), os.dup2(slave, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
        os.environ["TERM"] = "xterm-256color"

    (tmp_path / "mine.py").write_text(CALLBACK)
    written = b""
    with world.running(tmp_path, f"run.callbacks=[{tmp_path}/mine.py:Mine]", prepare=to_the_terminal) as run:
        os.close(slave)
        with contextlib.suppress(OSError):  # raised when the run has closed the terminal
            while block := os.read(master, 1 << 16):
                written += block
        ended = run.wait()
    os.close(master)
    text = written.decode()
    assert ended.code == 0, text
    for phase in ("loading model", "step 1/2 generate", "step 1/2 train", "step 2/2 sync"):
        assert phase in text
    assert "/16 responses" in text and "micro-batches" in text and " MB of " in text
    display = pyte.Screen(COLUMNS, ROWS)
    pyte.ByteStream(display).feed(written)
    lines = [line.rstrip() for line in display.display if line.strip()]
    assert [line[:10] for line in lines if line.startswith("step ")] == ["step 1/2  ", "step 2/2  "] and lines[
        -1
    ] == "finished 2 steps"
    # and no requests of httpx
    assert [line for line in lines if line.startswith("mine: ")] == ["mine: after step 1", "mine: after step 2"]
    assert not any("responses" in line or "━" in line for line in lines)
    assert max(len(line) for line in lines if str(tmp_path) not in line) <= 100
