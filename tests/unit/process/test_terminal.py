"""Text of models and users on a terminal: escape sequences never reach it."""

import ast
import io
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from megagrpo.config import load_config
from megagrpo.process.terminal import Formatter, one_line, printable, show
from megagrpo.records.completions import completion_rows
from megagrpo.records.console import ConsoleSink
from megagrpo.records.writer import MetricsWriter
from megagrpo.types import Prompt, Rollout, ScoredRollout

ROOT = Path(__file__).parents[3]
HOSTILE = "\x1b]52;c;ZXZpbA==\x07 \x1b[2J \x9b31m \u202egnitirw\u202c \x08\x7f\r\u2028\u2066\ud800 \U000e0041"
STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\U000e0000-\U000e007f]")
COLOURS = re.compile(r"\x1b\[[\d;]*m")  # rich's own codes


def scored(prompt, text, reward):
    rollout = Rollout(Prompt(0, (1,), prompt), (1,), (0.0,), "stop", 0, text)
    return ScoredRollout(rollout, {"mine": reward}, reward)


def test_every_character_that_steers_a_terminal_is_shown_as_an_escape():
    assert STEERS.search(HOSTILE) and not STEERS.search(printable(HOSTILE))
    assert printable("\x1b[31m\x9b\u202e\ud800") == r"\x1b[31m\x9b\u202e\ud800"
    kept = "Größe 数 😀 é\t👩‍🔬\nnext"
    assert printable(kept) == kept and printable("a\r\nb") == "a\nb" and one_line("a\n\tb\r\n") == "a⏎ b⏎"
    printable(HOSTILE).encode()  # a lone surrogate would raise here
    for code in range(0x110000):
        character = chr(code)
        assert (printable(character) != character) == bool(STEERS.match(character)), hex(code)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_console_shows_hostile_prompts_completions_and_messages_harmlessly(is_terminal):
    written = io.StringIO()
    sink = ConsoleSink(load_config(ROOT / "configs/quickstart.yaml", ["run.log_completions_steps=1"]))
    sink._console = Console(file=written, force_terminal=is_terminal, width=100)
    chat = [{"role": "user", "content": HOSTILE}]
    for prompt in (HOSTILE, chat):
        both = [scored(prompt, "good" + HOSTILE, 1.0), scored(prompt, "bad\n" + HOSTILE, 0.0)]
        sink.completions(1, completion_rows(1, both, [1.0, -1.0]))
    sink.message(f"vLLM server ended; the end of its log:\n{HOSTILE}")
    text = COLOURS.sub("", written.getvalue())
    assert "good" in text and r"\x1b]52;c;" in text and "bad⏎" in text
    assert not STEERS.search(text)


def test_log_records_are_harmless_with_their_tracebacks():
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        record = logging.LogRecord("rewards", logging.WARNING, __file__, 1, "a reward failed: %s", (HOSTILE,), sys.exc_info())
    text = Formatter("%(message)s").format(record)
    assert "a reward failed" in text and "Traceback" in text and not STEERS.search(text)


def test_a_command_prints_hostile_errors_and_warnings_harmlessly(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text('"mo\\x1bdel": 1\nrun: {name: "\\x1b]0;title\\x07"}\n')
    ended = subprocess.run([sys.executable, "-m", "megagrpo", "plan", str(config)], capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stderr.strip() and not STEERS.search(ended.stderr + ended.stdout)
    loud = (
        "import logging; from megagrpo.process.terminal import log_to_stderr; log_to_stderr(); logging.getLogger('any').warning('\\x1b[2J')"
    )
    assert subprocess.run([sys.executable, "-c", loud], capture_output=True, text=True).stderr == "\\x1b[2J\n"


def test_a_sink_that_fails_is_named_harmlessly(capsys):
    MetricsWriter.silent()._warn("wandb", RuntimeError(HOSTILE))
    show(HOSTILE)
    printed = capsys.readouterr()
    assert "wandb failed" in printed.err and not STEERS.search(printed.err + printed.out)


PRINTS = {  # that print only our own text
    ("chat.py", "'> '"),
    ("chat.py", "response"),  # to a file or a program
    ("completion.py", "shtab.complete(top, options.shell)"),
    ("parser.py", "versions()"),
    ("progress.py", "'\\r' + line.ljust(79) if self._terminal else line"),
    ("run_lock.py", "f'process {os.getpid()} on host {socket.gethostname()}'"),
    ("scratch.py", "owner"),
    ("submit.py", "text"),  # a script, in which every value is quoted
    ("supervisor.py", "f'the engine has ended and the API server has not exited within {ENGINE_SECONDS:g} s; killing it'"),
    ("terminal.py", "printable(str(text))"),
}


def test_every_print_of_the_package_goes_through_one_function():
    found = set()
    for path in (ROOT / "megagrpo").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and path.parts[-2:] != ("sandbox", "child.py"):
                found.add((path.name, ast.unparse(node.args[0])))
    assert found == PRINTS
