"""A reward for working programs: a completion's Python code runs in a sandbox against tests or expected output."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

from megagrpo.process.terminal import get_logger
from megagrpo.rewards.functions.text import text_of
from megagrpo.rewards.sandbox.sandbox import Limits, missing_guarantees, run

log = get_logger(__name__)
_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_PYTHON = ("", "python", "py", "python3")


class CodeExecution:
    """Returns 1.0 when the completion's program passes all tests of column `tests`, or prints column `expected_output`; else 0.0. Returns
    None for a row with neither. With `partial` it returns the share of passed tests.

    The program is the last fenced Python block, or the whole completion without a fence. `tests` is Python (one or more `assert` lines), a
    list of such texts, a list of `{"input", "output"}`, a dict with lists `inputs` and `outputs`, or any of these as JSON.

    Python tests run after the program in the same process, within `seconds` in total. Each input runs the program again, within `seconds`.
    Its output is compared here; white space at line ends and at the end is ignored.

    `sandbox: required` raises ValueError when the kernel lacks a guarantee of the sandbox; `best_effort` logs the missing ones.
    """

    needs_columns = (("tests", "expected_output"),)
    completions_per_call = 1  # so that slow programs do not use up each other's deadline

    def __init__(
        self,
        sandbox: Literal["required", "best_effort"] = "required",
        partial: bool = False,
        seconds: float = 5.0,
        memory_mb: int = 512,
        output_kb: int = 64,
        file_mb: int = 16,
        packages: bool = True,
    ):
        if sandbox not in ("required", "best_effort"):
            raise ValueError(f"code_execution: sandbox {sandbox!r} must be required or best_effort")
        numbers = {"seconds": seconds, "memory_mb": memory_mb, "output_kb": output_kb, "file_mb": file_mb}
        for name, value in numbers.items():
            if value <= 0:
                raise ValueError(f"code_execution: {name} {value} must be above 0")
        self._limits = Limits(seconds, memory_mb, output_kb, file_mb)
        self._partial, self._packages = partial, packages
        if missing := missing_guarantees():
            what = f"code_execution: this kernel lacks guarantees of the sandbox: {', '.join(missing)}"
            if sandbox == "required":
                raise ValueError(
                    f"{what}. Fix: allow seccomp with its listener, and Landlock or user namespaces; or accept it with "
                    "args: {sandbox: best_effort}"
                )
            log.warning(what)

    def __call__(
        self, completions: list[Any], tests: list[Any] | None = None, expected_output: list[Any] | None = None
    ) -> list[float | None]:
        tests = tests or [None] * len(completions)
        expected_output = expected_output or [None] * len(completions)
        return [self._score(text_of(c), t, e) for c, t, e in zip(completions, tests, expected_output, strict=True)]

    def _score(self, text: str, tests: Any, expected: Any) -> float | None:
        asserts, pairs = read_tests(tests)
        if expected is not None:
            pairs.append(("", str(expected)))
        if not asserts and not pairs:
            return None
        program = program_of(text)
        passed = [False] * (len(asserts) + len(pairs))
        if asserts:
            results = run(program, self._limits, asserts, packages=self._packages).passed
            passed[: len(results)] = results
        for i, (stdin, output) in enumerate(pairs, start=len(asserts)):
            passed[i] = self._prints(program, stdin, output)
            if not (passed[i] or self._partial):
                break
        return sum(passed) / len(passed) if self._partial else float(all(passed))

    def _prints(self, program: str, stdin: str, output: str) -> bool:
        ran = run(program, self._limits, stdin=stdin, packages=self._packages)
        return ran.ended == "done" and ran.passed == [True] and _lines(ran.stdout) == _lines(output)


def program_of(text: str) -> str:
    """Return the last fenced Python block; the whole text without any fence; "" when all fences are of other languages."""
    blocks = _FENCE.findall(text)
    if not blocks:
        return text
    return next((code for language, code in reversed(blocks) if language.lower() in _PYTHON), "")


def read_tests(tests: Any) -> tuple[list[str], list[tuple[str, str]]]:
    """Return a row's tests as Python texts and as pairs of input and output. Raises ValueError for another format."""
    if tests is None:
        return [], []
    if isinstance(tests, str):
        if tests.lstrip()[:1] not in ("[", "{"):
            return ([tests] if tests.strip() else []), []
        tests = json.loads(tests)
    if isinstance(tests, dict):
        return [], [(_text(i), _text(o)) for i, o in zip(tests["inputs"], tests["outputs"], strict=True)]
    if all(isinstance(test, str) for test in tests):
        return list(tests), []
    return [], [(_text(test["input"]), _text(test["output"])) for test in tests]


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
