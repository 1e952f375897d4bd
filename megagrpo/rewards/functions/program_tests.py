"""Reads a row's tests, in the shapes of public data sets, as what the sandbox runs. docs/rewards.md lists them."""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megagrpo.rewards.functions.python_tests import PythonTests, read_python_tests

# Columns that a row may have beside `tests` and `expected_output`.
TEST_COLUMNS = ("entry_point", "fn_name", "metadata", "starter_code", "test_setup_code", "test_imports", "language")
_INPUTS, _OUTPUTS = ("input", "inputs", "stdin"), ("output", "outputs", "expected_output", "stdout")
_OF_STREAMS = ("stdin", "stdin_stdout", "stdio", "standard_input")
_OF_CALLS = ("functional", "function_call", "function", "call_based")
_PYTHON = ("python", "python3", "py", "py3", "pypy", "pypy3", "cpython")
_OTHER_LANGUAGES = (
    "bash c c# c++ cpp cs csharp go golang haskell java javascript js julia kotlin lua ocaml perl php python2 r ruby "
    "rust scala shell sql swift typescript ts"
).split()
_METHOD = re.compile(r"^[ \t]*def[ \t]+([A-Za-z]\w*)", re.MULTILINE)


@dataclass
class RowTests:
    """What checks a program: input and output pairs, calls of `function` with `expected` values, or Python."""

    pairs: list[tuple[str, str]] = field(default_factory=list)
    function: str = ""
    calls: list[tuple[list[Any], dict[str, Any]]] = field(default_factory=list)
    expected: list[Any] = field(default_factory=list)
    python: PythonTests = field(default_factory=PythonTests)

    @property
    def names(self) -> frozenset[str]:
        """The names that the tests take from the program; empty for pairs only."""
        names = {self.function.replace("()", "").rpartition(".")[2]} if self.function else set[str]()
        return self.python.names | names

    @property
    def count(self) -> int:
        """The number of tests."""
        return len(self.pairs) + len(self.calls) + self.python.count

    def matches(self, results: list[Any]) -> list[bool]:
        """Return whether each call returned the expected value. `results`: [value] per call, None after an exception.

        APPS wraps each expected value in a list, and some data sets use JSON: the reading that most calls match counts.
        """
        readings = [self.expected]
        if all(isinstance(value, list) and len(value) == 1 for value in self.expected):
            readings.append([value[0] for value in self.expected])
        if all(isinstance(value, str) for value in self.expected):
            readings.append([_literal(value) for value in self.expected])
        rows = [zip(results, expected, strict=False) for expected in readings]
        return max(([r is not None and equal(r[0], e) for r, e in row] for row in rows), key=sum)


def equal(value: Any, expected: Any) -> bool:
    """Compare a returned and the expected value, as JSON reads both: tuples are lists, floats match to 6 digits."""
    if isinstance(expected, list):
        return isinstance(value, list) and len(value) == len(expected) and all(map(equal, value, expected))
    if isinstance(expected, dict):
        same_keys = isinstance(value, dict) and value.keys() == expected.keys()
        return same_keys and all(equal(value[key], expected[key]) for key in expected)
    if isinstance(value, float) or isinstance(expected, float):
        if not (isinstance(value, (int, float)) and isinstance(expected, (int, float))):
            return False
        return math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-9) or (value != value and expected != expected)
    return bool(value == expected)


def read_tests(tests: Any = None, expected_output: Any = None, packages: bool = True, **facts: Any) -> RowTests:
    """Read a row's tests. `facts` has `TEST_COLUMNS`. Raises ValueError, with column and value, for unknown tests."""
    _check_language(facts.get("language"), _OTHER_LANGUAGES)
    reader = _RowReader(facts, packages)
    reader.read(tests)
    if expected_output is not None:
        reader.tests.pairs.append(("", _text(expected_output, "expected_output")))
    if not reader.tests.count:
        is_missing = "neither `tests` nor `expected_output` has a value"
        raise ValueError(is_missing if tests is None else f"`tests` is empty: {tests!r:.100}")
    if reader.tests.calls and all(value is None for value in reader.tests.expected):
        raise ValueError("`tests` checks nothing: each expected value is None")
    return reader.tests


class _RowReader:
    def __init__(self, facts: Mapping[str, Any], packages: bool):
        self._facts, self._packages = facts, packages
        self.tests = RowTests()

    def read(self, tests: Any) -> None:
        """Read tests of any shape into `self.tests`."""
        tests = _decoded(tests)
        if _is_empty(tests):
            return
        if isinstance(tests, str):
            self._read_python([tests])
        elif isinstance(tests, dict):
            self._read_dict(tests)
        elif isinstance(tests, list) and all(isinstance(test, str) for test in tests):
            decoded = [_decoded(test) for test in tests]
            if any(isinstance(test, str) for test in decoded):
                self._read_python(tests)
            else:
                self.read(decoded)
        elif isinstance(tests, list) and all(isinstance(test, dict) for test in tests):
            for test in tests:
                self._read_dict(test, is_case=True)
        else:
            raise ValueError(f"`tests` has no known shape: {tests!r:.100}")

    def _read_python(self, texts: list[str]) -> None:
        columns = [c for c in ("test_imports", "test_setup_code") if not _is_empty(self._facts.get(c))]
        setup = "\n".join(_text(_code(self._facts[c]), c) for c in columns)
        unfenced = [_unfenced(text) for text in texts]
        self.tests.python = read_python_tests(unfenced, setup, self._function({}), self._is_installed)

    def _is_installed(self, module: str) -> bool:
        return module in sys.stdlib_module_names or (self._packages and importlib.util.find_spec(module) is not None)

    def _read_dict(self, tests: dict[str, Any], is_case: bool = False) -> None:
        """Read a case (an entry of a list), a dict of lists of inputs and outputs, or a dict around other tests."""
        _check_language(tests.get("language"))
        if "test_cases" in tests:
            cases = _decoded(tests["test_cases"])
            if isinstance(cases, list) and all(isinstance(case, dict) for case in cases):
                cases = [{**case, "fn_name": case.get("fn_name") or tests.get("fn_name")} for case in cases]
            self.read(cases)
            return
        if not _is_empty(tests.get("assert_case")):
            self.read(tests["assert_case"])
            return
        inputs, outputs = (
            next((tests[key] for key in keys if tests.get(key) is not None), None) for keys in (_INPUTS, _OUTPUTS)
        )
        if outputs is None and not any(key in tests for key in _OUTPUTS):
            raise ValueError(f"`tests` has no known shape: a dict with the keys {', '.join(map(str, tests))}")
        if isinstance(inputs, list) and isinstance(outputs, list) and not (is_case and self._function(tests)):
            if len(inputs) != len(outputs):
                raise ValueError(f"`tests` has {len(inputs)} inputs and {len(outputs)} outputs")
            self._add_cases(tests, inputs, outputs)
        else:
            self._add_cases(tests, [inputs], [outputs])

    def _function(self, test: Mapping[str, Any]) -> str:
        """Return the function that a case calls; "" when the row names none."""
        for source in (test, _metadata(test.get("metadata")), self._facts, _metadata(self._facts.get("metadata"))):
            for key in ("fn_name", "func_name", "function_name", "entry_point"):
                if isinstance(source.get(key), str) and source[key].strip():
                    return str(source[key]).strip()
        return ""

    def _add_cases(self, tests: Mapping[str, Any], inputs: list[Any], outputs: list[Any]) -> None:
        kind = tests.get("testtype") or tests.get("type") or ""
        if kind and kind not in (*_OF_STREAMS, *_OF_CALLS):
            known = ", ".join((*_OF_STREAMS[:2], *_OF_CALLS[:2]))
            raise ValueError(f"`tests` has cases of the type {kind!r}; known are {known}")
        function = self._function(tests)
        if kind in _OF_STREAMS or not (function or kind):
            self.tests.pairs += [(_text(i, "tests"), _text(o, "tests")) for i, o in zip(inputs, outputs, strict=True)]
            return
        if not function:
            methods = [m for m in _METHOD.findall(str(self._facts.get("starter_code") or "")) if not m.startswith("__")]
            if not methods:
                columns = "`fn_name`, `entry_point`, `metadata` or `starter_code`"
                raise ValueError(f"`tests` calls a function, and the row names none in {columns}")
            function = methods[0]
        if not re.fullmatch(r"[A-Za-z_]\w*(?:\(\))?(?:\.[A-Za-z_]\w*)*", function):
            raise ValueError(f"`tests` names no function: {function!r:.100}")
        if self.tests.function not in ("", function):
            raise ValueError(f"`tests` calls two functions, `{self.tests.function}` and `{function}`")
        self.tests.function = function
        for case_input, value in zip(inputs, outputs, strict=True):
            self.tests.calls.append(_arguments(case_input))
            are_texts = isinstance(case_input, str) and isinstance(value, str)
            self.tests.expected.append(_literal(value) if are_texts else _json(value))


def _arguments(case_input: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return positional and keyword arguments. A text has one JSON value per line (LiveCodeBench), or `a = 1, b = 2`
    (LeetCode)."""
    if isinstance(case_input, list):
        return _json(case_input), {}
    if isinstance(case_input, dict):
        return [], _json(case_input)
    if not isinstance(case_input, str):
        return [_json(case_input)], {}
    try:
        return [json.loads(line) for line in case_input.split("\n") if line.strip()], {}
    except ValueError:
        pass
    try:
        call = ast.parse(f"f({case_input.strip()}\n)", mode="eval").body
        assert isinstance(call, ast.Call), "the text is the call of a function"
        keywords = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg}
        return _json([ast.literal_eval(a) for a in call.args]), _json(keywords)
    except (SyntaxError, ValueError, AssertionError, RecursionError, MemoryError):
        raise ValueError(f"`tests` has an input that cannot be read as arguments: {case_input!r:.100}") from None


def _literal(text: str) -> Any:
    """Return the value of a text that is JSON or a Python literal; else the text itself."""
    for read in (json.loads, ast.literal_eval):
        try:
            return _json(read(text.strip()))
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            pass
    return text


def _json(value: Any) -> Any:
    """Return a value as JSON gives it back: with lists for tuples and texts as keys."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError):
        raise ValueError(f"`tests` has a value that is not JSON: {value!r:.100}") from None


def _decoded(value: Any) -> Any:
    """Return what JSON or a Python literal in a text stands for; other texts unchanged. Arrays become lists."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{", '"'):
        return list(value) if isinstance(value, tuple) else value
    for read in (json.loads, ast.literal_eval):
        try:
            parsed = read(value.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(parsed, str):
            return _decoded(parsed)
        return list(parsed) if isinstance(parsed, tuple) else parsed
    return value


def _code(value: Any) -> Any:
    """Return code or its lines, also from JSON text; a list may be a Python literal, as csv exports write it."""
    if isinstance(decoded := _decoded(value), list):
        return decoded
    try:
        text = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value
    return text if isinstance(text, str | None) else value


def _metadata(value: Any) -> Mapping[str, Any]:
    decoded = _decoded(value)
    return decoded if isinstance(decoded, dict) else {}


def _check_language(language: Any, others: Sequence[str] = ()) -> None:
    """Raise ValueError if the language is not Python; with `others`, only if it is in them: the column may be prose."""
    name = str(language or "").strip().lower()
    if name and name not in _PYTHON and (name in others or not others):
        raise ValueError(f"`language` is {language!r}, and only Python programs run")


def _is_empty(value: Any) -> bool:
    value = value.strip() if isinstance(value, str) else value
    return value is None or (isinstance(value, (str, list, tuple, dict)) and not value)


def _text(value: Any, column: str) -> str:
    """Return the text of an input, an output or a piece of code. A list has its lines."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, (list, tuple)):
        if not all(isinstance(line, str) for line in value):
            missing = "the row names none in `fn_name` or `entry_point`"
            raise ValueError(f"`{column}` has arguments for a function, and {missing}: {value!r:.100}")
        return "\n".join(value)
    if isinstance(value, dict):
        raise ValueError(f"`{column}` has a dict for a text: {value!r:.100}")
    return "" if value is None else str(value)


def _unfenced(text: str) -> str:
    """Remove a fence around tests."""
    lines = text.strip().split("\n")
    is_fenced = len(lines) > 2 and lines[0].startswith("```") and lines[-1].strip() == "```"
    return "\n".join(lines[1:-1]) if is_fenced else text
