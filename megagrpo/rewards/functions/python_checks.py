"""What checks something in Python tests, and what the tests need: the static analysis behind `python_tests`."""

from __future__ import annotations

import ast
from collections.abc import Callable, Container, Iterator
from itertools import pairwise

Function = ast.FunctionDef | ast.AsyncFunctionDef
COMPOUND = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.TryStar, ast.Match, ast.AsyncFor, ast.AsyncWith)
PROGRAM_MODULES = ("solution", "__main__")  # names under which tests may import the program
_RAISES = "raises assertRaises assertRaisesRegex warns assertWarns assertWarnsRegex assertLogs assertNoLogs".split()


def is_check(statement: ast.stmt, own_functions: Container[str]) -> bool:
    """Tell whether a statement itself checks. `own_functions`, of the same text, are judged by their bodies."""
    if isinstance(statement, ast.Assert):
        return constant(statement.test) is None
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        name = called_name(statement.value)
        return (name.startswith("assert") or name == "raises") and name not in own_functions
    if isinstance(statement, (ast.With, ast.AsyncWith)):
        calls = [item.context_expr for item in statement.items if isinstance(item.context_expr, ast.Call)]
        return any(called_name(call) in _RAISES for call in calls)
    return isinstance(statement, (ast.If, ast.Try, ast.Match)) and can_fail(statement)


def blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """Yield the lists of statements directly inside a statement."""
    for name in ("body", "orelse", "finalbody"):
        yield from filter(None, [getattr(statement, name, None)])
    for name in ("handlers", "cases"):
        yield from (part.body for part in getattr(statement, name, []))


def before_failures(statement: ast.stmt) -> Iterator[ast.stmt]:
    """Yield statements directly inside one that can return before a failure: `try: ... return`, then `assert False`."""
    body = getattr(statement, "body", [])
    yield from (first for first, then in pairwise(body) if fails(then) and isinstance(first, COMPOUND))


def can_fail(statement: ast.stmt) -> bool:
    """Tell whether a statement contains one that fails, outside of definitions."""
    return any(
        fails(inner) or (not isinstance(inner, (Function, ast.ClassDef)) and can_fail(inner))
        for block in blocks(statement)
        for inner in block
    )


def fails(statement: ast.stmt) -> bool:
    """Tell whether a statement always fails: `raise`, `assert False`, or a call of `fail` or `exit`."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return called_name(statement.value) in ("fail", "exit")
    return isinstance(statement, ast.Raise) or (isinstance(statement, ast.Assert) and constant(statement.test) is False)


def constant(test: ast.expr) -> bool | None:
    """Return the truth of a condition that no program can change; None for another condition."""
    if isinstance(test, ast.Constant):
        return bool(test.value)
    if isinstance(test, (ast.Tuple, ast.List, ast.Set)):
        return bool(test.elts)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        truth = constant(test.operand)
        return None if truth is None else not truth
    if isinstance(test, ast.BoolOp):
        truths, decisive = [constant(v) for v in test.values], isinstance(test.op, ast.Or)
        return decisive if decisive in truths else None if None in truths else not decisive
    if isinstance(test, ast.Compare) and not any(isinstance(n, (ast.Name, ast.Call)) for n in ast.walk(test)):
        return True  # a comparison of constants
    return None


def required(function: Function) -> list[str]:
    """Return the names of the positional parameters without a default, and of keyword-only ones."""
    arguments = function.args
    positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    keywords = [
        a.arg for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default is None
    ]
    return positional[: len(positional) - len(arguments.defaults)] + keywords


def parameter_names(mark: ast.Call) -> list[str]:
    """Return the names that a mark `parametrize` gives values to."""
    names = [*mark.args, *(k.value for k in mark.keywords if k.arg == "argnames")][:1]
    texts = [
        n.value for node in names for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    ]
    return [name.strip() for text in texts for name in text.split(",")]


def called_name(node: ast.expr) -> str:
    """Return the last name of what an expression calls or names: `raises` of `pytest.raises(ValueError)`."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def main_names(tree: ast.Module) -> set[str]:
    """Return how a text calls what runs all tests: `unittest.main`, `pytest.main`, or their names after an import."""
    names = set[str]()
    for node in tree.body:
        if isinstance(node, ast.Import):
            names |= {f"{a.asname or a.name}.main" for a in node.names if a.name in ("unittest", "pytest")}
        elif isinstance(node, ast.ImportFrom) and node.module in ("unittest", "pytest"):
            names |= {a.asname or a.name for a in node.names if a.name == "main"}
    return names


def program_imports(tree: ast.Module, installed: Callable[[str], bool]) -> set[str]:
    """Return the names that tests import from the program. Raises ValueError for another module that is not installed,
    unless the import is tried."""
    nodes = [*ast.walk(tree)]
    tried = {id(n) for t in nodes if isinstance(t, ast.Try) for s in t.body for n in ast.walk(s)}
    names, aliases = set[str](), set[str]()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module in PROGRAM_MODULES:
            names |= {alias.name for alias in node.names if alias.name != "*"}
        elif isinstance(node, ast.Import):
            aliases |= {a.asname or a.name for a in node.names if a.name in PROGRAM_MODULES}
        for module in _other_modules(node) if id(node) not in tried else []:
            if module.startswith(".") or not installed(module.partition(".")[0]):
                raise ValueError(
                    f"`tests` imports `{module}`, which is not installed; the program is the module "
                    f"`{PROGRAM_MODULES[0]}`"
                )
    attributes = [n for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]
    return names | {n.attr for n in attributes if called_name(n.value) in aliases}


def _other_modules(node: ast.AST) -> list[str]:
    """Return the modules that an import names, without the program's."""
    if isinstance(node, ast.ImportFrom):
        modules = ["." * node.level + (node.module or "")]
    else:
        modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
    return [module for module in modules if module not in PROGRAM_MODULES]
