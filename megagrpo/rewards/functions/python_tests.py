"""Reads tests that are Python: finds their checks, and cuts a text into steps that the sandbox runs one after another.

A check is an `assert`, a call whose name begins with `assert`, a `with pytest.raises(...)`, or an `if` or `try` that
can raise. A test is a top-level statement with checks, a test function of pytest, a test method of `unittest.TestCase`,
or an assert of `check(candidate)`.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType

from megagrpo.rewards.functions.program_text import outline
from megagrpo.rewards.functions.python_checks import (
    Function,
    before_failures,
    blocks,
    called_name,
    is_check,
    main_names,
    parameter_names,
    program_imports,
    required,
)

_SELECTING = ("skip", "skipif", "xfail", "usefixtures", "asyncio")  # marks that need pytest itself
_ENTRY = re.compile(r"[A-Za-z_]\w*(?:\(\))?(?:\.[A-Za-z_]\w*(?:\(\))?)*")
_RUN_CASE = """
def __case__(case, name):
    import unittest
    result = unittest.TestResult()
    unittest.TestSuite([case(name)]).run(result)
    if not result.wasSuccessful() or result.skipped or result.testsRun != 1:
        raise AssertionError(name)
"""
_RUN_PYTEST = """
def __rows__(*marked):
    rows = [{}]
    for mark in [m for function in marked for m in getattr(function, "pytestmark", [])]:
        if mark.name == "parametrize":
            names, values = (*mark.args, *(mark.kwargs[k] for k in ("argnames", "argvalues") if k in mark.kwargs))[:2]
            names = [n.strip() for n in names.split(",") if n.strip()] if isinstance(names, str) else list(names)
            one = len(names) == 1
            values = [v.values if type(v).__name__ == "ParameterSet" else (v,) if one else v for v in values]
            rows = [{**row, **dict(zip(names, value))} for row in rows for value in values]
    return rows

def __value__(value):
    return next(value) if hasattr(value, "__next__") else value
"""


@dataclass
class PythonTests:
    """The steps of a row's Python tests, as `sandbox.Checks` describes them, the number of tests in them, and the names
    that they take from the program."""

    steps: list[tuple[str, str | CodeType]] = field(default_factory=list)
    count: int = 0
    names: frozenset[str] = frozenset()


def read_python_tests(
    texts: Sequence[str], setup: str, entry_point: str, installed: Callable[[str], bool]
) -> PythonTests:
    """Read a row's test texts, in one namespace, after `setup`. `installed` tells whether a module can be imported.

    Raises ValueError, with the reason, when the texts check nothing or need something that the sandbox lacks.
    """
    tests, names = PythonTests([("setup", setup)] if setup.strip() else []), set[str]()
    set_up = outline(setup)
    if set_up is None:
        raise ValueError("`test_setup_code` or `test_imports` is not valid Python")
    program_imports(ast.parse(setup), installed)
    bound, used, calls_program, has_check = set(set_up.defines), set[str](), False, False
    for text in texts:
        reader = _Reader(text.lstrip("\ufeff").replace("\r\n", "\n").replace("\r", "\n"), entry_point, installed)
        tests.steps += reader.steps()
        tests.count += reader.count
        names |= reader.imported
        bound |= reader.outline.defines
        used |= reader.outline.unbound
        calls_program |= reader.calls_entry
        has_check |= reader.checks
    tests.names = frozenset(names | (used - bound) | ({re.split(r"\W", entry_point)[0]} if calls_program else set()))
    shown = " ".join(" ".join(texts).split())
    if not (tests.count and has_check):
        raise ValueError(f"`tests` checks nothing: {shown!r:.100}")
    if not tests.names:
        raise ValueError(f"`tests` calls nothing of the program: {shown!r:.100}")
    return tests


class _Reader:
    """One text of tests. Its syntax tree is changed until `steps` compiles it."""

    def __init__(self, text: str, entry_point: str, installed: Callable[[str], bool]):
        self._entry = entry_point
        outlined = outline(text)
        if outlined is None:
            raise ValueError(
                f"`tests` is neither JSON nor valid Python{_reason(text)}: {' '.join(text.split())!r:.100}"
            )
        self.outline = outlined
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._tree = ast.parse(text)
        self.count, self.calls_entry, self.checks = 0, False, False
        self.imported = program_imports(self._tree, installed)
        self._functions = {s.name: s for s in self._tree.body if isinstance(s, Function)}
        self._classes = {s.name: s for s in self._tree.body if isinstance(s, ast.ClassDef)}
        self._fixtures = {
            n: d for n, f in self._functions.items() for d in f.decorator_list if called_name(d) == "fixture"
        }

    def steps(self) -> list[tuple[str, str | CodeType]]:
        """Cut the text into steps, and append the calls of its test functions and test cases. Raises ValueError for a
        text that Python cannot compile."""
        self._inline_main_guard()
        body = self._tree.body
        marked = {id(s): [s] for s in body}  # a statement, after the call that counts it if it is a check
        with_checks = {id(s) for s in body if self._mark_checks(marked[id(s)])}
        checking = self._checking(with_checks)
        run = [s for s in body if not isinstance(s, (Function, ast.ClassDef))]
        called = {
            called_name(n) for s in run for n in ast.walk(s) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
        }
        cases = {name for name in self._classes if self._is_case(name)}
        kinds = [(s, self._kind(s, id(s) in with_checks, checking - cases)) for s in body]
        calls = [
            *self._entry_calls(checking, called),
            *self._function_calls(checking, called),
            *self._class_calls(cases),
        ]
        self.count += sum(kind != "setup" for kind, _ in calls) + sum(kind == "check" for _, kind in kinds)
        self.checks = bool(with_checks)
        harness = [("setup", _RUN_CASE)] * bool(cases) + [("setup", _RUN_PYTEST)] * any(
            "__rows__" in c or "__value__" in c for _, c in calls
        )
        steps = [(kind, [n for s in part for n in marked[id(s)]]) for kind, part in self._cut(kinds)]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "assertion is always true"
                codes = [(kind, compile(ast.Module(nodes, []), "<tests>", "exec")) for kind, nodes in steps if nodes]
        except SyntaxError as error:
            raise ValueError(f"`tests` is not valid Python ({error.msg}, line {error.lineno})") from None
        return [*codes, *harness, *calls]

    # ------------------------------------------------------------------------------------------------------- statements

    def _inline_main_guard(self) -> None:
        """Make code under `if __name__ == "__main__"` run, and replace `unittest.main()` and `pytest.main()`."""
        runners = main_names(self._tree)
        bodies = [self._tree.body]
        for statement in self._tree.body:
            if isinstance(statement, ast.If) and isinstance(statement.test, ast.Compare):
                if isinstance(statement.test.left, ast.Name) and statement.test.left.id == "__name__":
                    statement.test = ast.copy_location(ast.Constant(True), statement.test)
                    bodies.append(statement.body)
        for body in bodies:
            for i, statement in enumerate(body):
                calls = [n for n in ast.walk(statement) if isinstance(n, ast.Call) and called_name(n)]
                if isinstance(statement, ast.Expr) and any(ast.unparse(n.func) in runners for n in calls):
                    body[i] = ast.copy_location(ast.Pass(), statement)

    def _mark_checks(self, body: list[ast.stmt], before_failure: Sequence[ast.stmt] = ()) -> bool:
        """Insert a call that counts before each check in `body`, at any depth. Returns whether there is one."""
        marked, has_check = list[ast.stmt](), False
        for statement in body:
            before = list(before_failures(statement))
            for block in blocks(statement):
                has_check |= self._mark_checks(block, before)
            if statement in before_failure or is_check(statement, self._functions):
                has_check = True
                marked.append(_statement("__checked__()"))
            marked.append(statement)
        body[:] = marked
        return has_check

    def _checking(self, with_checks: set[int]) -> set[str]:
        """Return the functions and classes that have a check, or use one that has."""
        owners = self._functions | self._classes
        uses = {name: {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} for name, node in owners.items()}
        checking = {name for name, node in owners.items() if id(node) in with_checks}
        while more := {name for name in owners if name not in checking and uses[name] & checking}:
            checking |= more
        return checking

    def _kind(self, statement: ast.stmt, has_check: bool, checking: set[str]) -> str:
        if isinstance(statement, (Function, ast.ClassDef, ast.Import, ast.ImportFrom)):
            return "setup"
        if has_check:
            return "check"
        nodes = list(ast.walk(statement)) if checking else []
        uses = any(isinstance(n, ast.Name) and n.id in checking for n in nodes)
        return "check" if uses and any(isinstance(n, ast.Call) for n in nodes) else "setup"

    def _cut(self, kinds: list[tuple[ast.stmt, str]]) -> Iterator[tuple[str, list[ast.stmt]]]:
        """Yield the statements of each step: one step per check, and one for the statements between two checks.
        Statements that share a line stay together."""
        part, kind, last = list[ast.stmt](), "setup", 0
        for statement, its_kind in kinds:
            first = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", []))])
            if first <= last:
                self.count -= kind == its_kind == "check"  # one step, so one test
                kind = "check" if "check" in (kind, its_kind) else "setup"
            elif "check" in (kind, its_kind):
                yield kind, part
                part, kind = [], its_kind
            part.append(statement)
            last = statement.end_lineno or first
        yield kind, part

    # ------------------------------------------------------------------------------------------------------------ calls

    def _entry_calls(self, checking: set[str], called: set[str]) -> Iterator[tuple[str, str]]:
        """Yield the call of HumanEval's `check(candidate)`. Asserts directly in its body count one by one."""
        check = self._functions.get("check")
        if check is None or "check" in called or "check" not in checking or len(required(check)) != 1:
            return
        entry, asserts = self._entry_value("check", required(check)[0]), 0
        if not any(isinstance(n, ast.Return) for n in check.body):
            body = list[ast.stmt]()
            for statement in check.body:
                if isinstance(statement, ast.Assert) and is_check(statement, self._functions):
                    test = _statement("with __test__(): pass")
                    test.body = [body.pop(), statement]  # type: ignore[attr-defined]  # with the call that counts it
                    statement = test
                    asserts += 1
                body.append(statement)
            check.body = body
        self.count += asserts
        others = [s for s in check.body if not isinstance(s, ast.Assert)]
        only_asserts = asserts and not any(is_check(s, self._functions) for s in others)
        yield ("setup" if only_asserts else "check"), f"check({entry})"

    def _function_calls(self, checking: set[str], called: set[str]) -> Iterator[tuple[str, str]]:
        if "setup_module" in self._functions and not required(self._functions["setup_module"]):
            yield "setup", "setup_module()"
        for name, function in self._functions.items():
            if name in self._fixtures:
                if "autouse" in ast.unparse(self._fixtures[name]):
                    raise ValueError(f"`tests`: the fixture `{name}` has `autouse`, which is not supported")
                continue
            if name.startswith("test") and name not in called:
                yield self._test_kind(function, checking), self._call(name, name, function, [])

    def _test_kind(self, function: Function, checking: set[str]) -> str:
        """Return "check" for a test that must run a check, "test" for one that only must not raise."""
        nodes = list(ast.walk(function))
        uses = any(isinstance(n, ast.Name) and n.id in checking for n in nodes)
        has_check = any(isinstance(n, ast.stmt) and is_check(n, self._functions) for n in nodes)
        return "check" if uses or has_check else "test"

    def _class_calls(self, cases: set[str]) -> Iterator[tuple[str, str]]:
        for name in self._classes:
            if name in cases:
                for method, function in self._methods(name).items():
                    is_skipped = any(called_name(d).startswith("skip") for d in function.decorator_list)
                    if method.startswith("test") and not is_skipped:
                        yield self._test_kind(function, set()), f"__case__({name}, {method!r})"
            elif name.startswith("Test"):
                methods = self._methods(name)
                if "__init__" in methods:
                    raise ValueError(f"`tests`: pytest does not run class `{name}`, which has `__init__`")
                if "setup_class" in methods:
                    yield "setup", f"{name}.setup_class()"
                starts = ""
                for before in [m for m in ("setup_method", "setUp") if m in methods]:
                    starts += f"; __object__.{before}({', '.join(['None'] * len(required(methods[before])[1:]))})"
                for method, function in methods.items():
                    if any(called_name(d) == "fixture" for d in function.decorator_list):
                        fixture = f"the fixture `{method}`; only module-level fixtures are supported"
                        raise ValueError(f"`tests`: class `{name}` has {fixture}")
                    if method.startswith("test"):
                        call = self._call(f"{name}.{method}", f"__object__.{method}", function, [name])
                        yield self._test_kind(function, set()), f"__object__ = {name}(){starts}\n{call}"

    def _call(self, name: str, callee: str, function: Function, owner: list[str]) -> str:
        """Return the code that calls a test function of pytest, once per row of its parameters."""
        if isinstance(function, ast.AsyncFunctionDef):
            raise ValueError(f"`tests`: test function `{name}` is async, which needs a plug-in of pytest")
        marks = [*function.decorator_list, *(d for cls in owner for d in self._classes[cls].decorator_list)]
        for decorator in marks:
            if called_name(decorator) in _SELECTING:
                mark = f"the mark `{called_name(decorator)}`, which only pytest itself can read"
                raise ValueError(f"`tests`: test function `{name}` has {mark}")
        by_pytest = all(".mark." in ast.unparse(d) for d in function.decorator_list)
        rows = [d for d in marks if called_name(d) == "parametrize"]
        given = {n for d in rows if isinstance(d, ast.Call) for n in parameter_names(d)}
        names = [n for n in required(function)[1 if owner else 0 :] if n not in given] if by_pytest else []
        arguments = [f"{n}={self._fixture(name, n, ())}" for n in names]
        if not rows:
            return f"{callee}({', '.join(arguments)})"
        sources = ", ".join(filter(None, [name, *owner]))
        return f"for __row__ in __rows__({sources}): {callee}({', '.join([*arguments, '**__row__'])})"

    def _fixture(self, test: str, name: str, seen: tuple[str, ...]) -> str:
        function, decorator = self._functions.get(name), self._fixtures.get(name)
        if not function or not decorator or name in seen:
            if name == "candidate":
                return self._entry_value(test, name)
            raise ValueError(f"`tests`: test function `{test}` takes the fixture `{name}`, which is not supported")
        if isinstance(decorator, ast.Call) and any(k.arg == "params" for k in decorator.keywords):
            raise ValueError(f"`tests`: the fixture `{name}` has `params`, which is not supported")
        function.decorator_list = [d for d in function.decorator_list if d is not decorator]
        inner = ", ".join(f"{n}={self._fixture(test, n, (*seen, name))}" for n in required(function))
        return f"__value__({name}({inner}))"

    def _entry_value(self, function: str, parameter: str) -> str:
        if not self._entry:
            missing = "the row has no `entry_point` to call it with"
            raise ValueError(f"`tests` defines `{function}({parameter})`, and {missing}")
        if not _ENTRY.fullmatch(self._entry):
            raise ValueError(f"`entry_point` is not a function's name: {self._entry!r:.100}")
        self.calls_entry = True
        return f"__function__({self._entry!r})"

    def _is_case(self, name: str) -> bool:
        bases = {ast.unparse(base).rpartition(".")[2] for base in self._classes[name].bases}
        return any(b.endswith("TestCase") or (b in self._classes and b != name and self._is_case(b)) for b in bases)

    def _methods(self, name: str) -> dict[str, Function]:
        """Return the methods of a class, with those of its bases in the same text."""
        node, methods = self._classes[name], dict[str, Function]()
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in self._classes and base.id != name:
                methods |= self._methods(base.id)
        return methods | {s.name: s for s in node.body if isinstance(s, Function)}


def _statement(code: str) -> ast.stmt:
    return ast.parse(code).body[0]


def _reason(text: str) -> str:
    try:
        ast.parse(text)
    except SyntaxError as error:
        return f" ({error.msg}, line {error.lineno})"
    except (ValueError, RecursionError, MemoryError):
        pass
    return ""
