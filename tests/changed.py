"""Prints the test files that a change reaches through imports: python tests/changed.py [BASE]

A file is changed if it differs from the commit BASE (default: HEAD) in the working tree, or is not tracked yet. A test
file is reached if it is changed, or imports a changed module, directly or through other modules. A file that is neither
a module nor a test (a config, a page) reaches the tests that name it.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("megagrpo", "tests", "benchmarks", "docs", "examples", "checkpoints_tools")
BARE = "tests/distributed"  # its modules are imported by their bare names


def modules() -> dict[str, Path]:
    """Dotted name -> file, of every Python file in `FOLDERS`."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    named = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in files}
    return named | {path.stem: path for path in files if path.parent == ROOT / BARE}


def imported(path: Path, known: dict[str, Path]) -> set[Path]:
    """The known files that a file imports, at its top or inside functions, with the packages above them."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {known[name] for name in names if name in known} - {path}


@functools.cache
def importers() -> dict[Path, set[Path]]:
    """File -> the files that import it."""
    known, found = modules(), defaultdict(set)
    for path in set(known.values()):
        for target in imported(path, known):
            found[target].add(path)
    return found


def reached(changed: Iterable[Path]) -> set[Path]:
    """The files that import a changed one, directly or not, and the changed ones."""
    found, left = set(changed), list(changed)
    while left:
        for path in importers()[left.pop()] - found:
            found.add(path)
            left.append(path)
    return found


def changed_files(base: str) -> set[Path]:
    """The files that differ from the commit `base`, and those that git does not track."""
    commands = (["git", "diff", "--name-only", base], ["git", "ls-files", "--others", "--exclude-standard"])
    lines = [
        line for command in commands for line in subprocess.check_output(command, text=True, cwd=ROOT).splitlines()
    ]
    return {ROOT / line for line in lines if (ROOT / line).is_file()}


def tests_of(changed: set[Path]) -> list[Path]:
    """The test files that these changed files reach, sorted."""
    known = modules()
    found = reached(changed & set(known.values()))
    tests = [path for path in known.values() if path.name.startswith("test_")]
    others = [path.name for path in changed - set(known.values())]
    found |= {path for path in tests if any(name in path.read_text() for name in others)}
    return sorted({path for path in found if path.name.startswith("test_")})


if __name__ == "__main__":
    print(*(path.relative_to(ROOT) for path in tests_of(changed_files(sys.argv[1] if sys.argv[1:] else "HEAD"))))
