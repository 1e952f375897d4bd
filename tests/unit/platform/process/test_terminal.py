"""Text of models and users on a terminal: escape sequences never reach it."""

import ast
import io
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from megagrpo.__main__ import main
from megagrpo.config import load_config
from megagrpo.platform.process.terminal import (
    Formatter,
    LineTimes,
    get_logger,
    one_line,
    printable,
    show,
    side_by_side,
    wrapped,
)
from megagrpo.records.console import ConsoleSink
from megagrpo.records.writer import MetricsWriter
from megagrpo.types import Prompt, Rollout, ScoredRollout
from tests.unit.records.completion_rows import completion_rows

ROOT = Path(__file__).parents[4]
HOSTILE = "\x1b]52;c;ZXZpbA==\x07 \x1b[2J \x9b31m \u202egnitirw\u202c \x08\x7f\r\u2028\u2066\ud800 \U000e0041"
STEERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\U000e0000-\U000e007f]"
)
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
        record = logging.LogRecord(
            "rewards", logging.WARNING, __file__, 1, "a reward failed: %s", (HOSTILE,), sys.exc_info()
        )
    text = Formatter("%(message)s").format(record)
    assert "a reward failed" in text and "Traceback" in text and not STEERS.search(text)


def test_a_command_prints_hostile_errors_and_warnings_harmlessly(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text('"mo\\x1bdel": 1\nrun: {name: "\\x1b]0;title\\x07"}\n')
    ended = subprocess.run([sys.executable, "-m", "megagrpo", "plan", str(config)], capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stderr.strip() and not STEERS.search(ended.stderr + ended.stdout)
    loud = (
        "import logging; from megagrpo.platform.process.terminal import log_to_stderr; log_to_stderr(); "
        "logging.getLogger('any').warning('\\x1b[2J')"
    )
    assert subprocess.run([sys.executable, "-c", loud], capture_output=True, text=True).stderr == "\\x1b[2J\n"


def test_a_sink_that_fails_is_named_harmlessly(capsys):
    MetricsWriter.silent()._warn("wandb", RuntimeError(HOSTILE))
    show(HOSTILE)
    printed = capsys.readouterr()
    assert "wandb failed" in printed.err and not STEERS.search(printed.err + printed.out)


PRINTS = {  # that print only our own text, or print text unchanged on purpose
    ("exit_codes.py", "''"),
    ("generate.py", "f'{text}\\n'"),  # to a file or a program
    ("console.py", "''"),
    ("parser.py", "message"),
    ("run_lock.py", "f'process {os.getpid()} on host {socket.gethostname()}'"),
    ("submit.py", "text"),  # a script, in which every value is quoted
    # to the output of a worker, which its owner shows
    ("episode.py", "f'multi_turn: `{type(player).__name__}.close` failed: {text}'"),
    ("terminal.py", "f'{printable(str(text))}\\n'"),
}


def test_every_print_of_the_package_goes_through_one_function():
    found = set()
    for path in (ROOT / "megagrpo").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            is_print = isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "write_output")
            if is_print and path.parts[-2:] != ("sandbox", "child.py"):
                found.add((path.name, ast.unparse(node.args[0])))
    assert found == PRINTS


def ended(code: str, **environment: str) -> subprocess.CompletedProcess:
    """A process that has run `code` after `log_to_stderr`."""
    # other tests may have set them
    own = {name: value for name, value in os.environ.items() if not name.endswith(("_DISABLE", "_BARS"))}
    code = f"import logging, sys; from megagrpo.platform.process.terminal import *\n{code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=own | environment)


LOGS = """
from megagrpo.platform.process import terminal
terminal.log_to_stderr()
for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
    logging.getLogger("megagrpo.room").log(level, "own %s", logging.getLevelName(level))
    logging.getLogger("library").log(level, "library %s", logging.getLevelName(level))
"""


@pytest.mark.parametrize(("level", "own"), [("debug", 4), ("info", 3), ("", 3), ("warning", 2), ("error", 1)])
def test_the_log_level_is_of_this_package_and_libraries_only_warn(level, own):
    printed = ended(LOGS, MEGAGRPO_LOG_LEVEL=level).stderr.split("\n")
    assert [line for line in printed if line.startswith("library")] == ["library WARNING", "library ERROR"]
    assert [line for line in printed if line.startswith("own")] == [
        f"own {name}" for name in ("DEBUG", "INFO", "WARNING", "ERROR")[4 - own :]
    ]


def test_the_configuration_of_a_user_takes_effect_once_and_httpx_stays_quiet():
    code = LOGS + "logging.basicConfig(level=logging.INFO, format='mine: %(message)s')\n"
    code += "logging.getLogger('mine').info('seen')\nlogging.getLogger('megagrpo.room').warning('once')\n"
    code += "logging.getLogger('httpx').info('HTTP Request: POST ...')\n"
    assert ended(code).stderr.split("\n")[-3:] == ["mine: seen", "mine: once", ""]


def test_a_log_level_that_does_not_exist_ends_a_command_with_the_levels_that_do(monkeypatch, capsys):
    monkeypatch.setenv("MEGAGRPO_LOG_LEVEL", "loud")
    assert main(["plan", str(ROOT / "configs/quickstart.yaml")]) == 2
    assert (
        capsys.readouterr().err
        == "MEGAGRPO_LOG_LEVEL: 'loud' is not a log level; use one of debug, info, warning, error\n"
    )


def test_records_with_text_of_models_are_harmless_in_every_handler(caplog):
    get_logger("megagrpo.of_a_test").warning("a reward said %s", HOSTILE)
    assert caplog.messages == [f"a reward said {printable(HOSTILE)}"]


def test_long_lines_are_wrapped_at_words_and_a_long_word_stays_whole():
    path = "/folder" * 20
    assert wrapped("short\n\nlines") == ["short", "", "lines"]
    assert wrapped(f"  key: {'word ' * 30}{path} end", width=60) == [
        "  key: word word word word word word word word word word",
        "    word word word word word word word word word word word",
        "    word word word word word word word word word",
        f"    {path}",
        "    end",
    ]


def test_columns_that_do_not_fit_continue_in_a_block_below():
    lines = side_by_side(["    ", "one ", "two "], [[f"{head:>6}", "     1", "     2"] for head in "abcd"], width=18)
    assert lines == [
        "         a     b",
        "one      1     1",
        "two      2     2",
        "         c     d",
        "one      1     1",
        "two      2     2",
    ]
    assert side_by_side(["x"], [["y" * 30]], width=10) == ["x" + "y" * 30]  # one column per block is the least


@pytest.mark.parametrize("rank", ["0", "1"])
def test_libraries_draw_no_bars_in_a_pipe(rank):
    code = "hide_bars_of_libraries()\nfrom tqdm import tqdm\nlist(tqdm(range(3)))"
    assert ended(code, RANK=rank).stderr == ""
    assert "3/3" in ended(code.replace("hide_bars_of_libraries()", "")).stderr


def test_a_wait_of_an_hour_has_few_lines():
    times = LineTimes(10.0)
    assert [tenth / 10 for tenth in range(36_000) if times.due(tenth / 10)] == [
        10,
        20,
        40,
        80,
        160,
        320,
        640,
        1280,
        2560,
    ]
    assert not LineTimes(10.0).due(9.9) and LineTimes(10.0).due(1000.0)
