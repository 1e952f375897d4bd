"""Types: mypy checks the package and the benchmarks with the settings of pyproject.toml, and the docstrings' examples of
`megagrpo.types` are run."""

import dataclasses
import doctest
import subprocess
import sys
from pathlib import Path

import pytest

from megagrpo import types

ROOT = Path(__file__).parents[2]
SHOWN = 30  # lines of the checker's output


@pytest.mark.slow  # without mypy's cache, .mypy_cache
def test_the_type_checker_reports_nothing():
    checker = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True, timeout=280)
    lines = (checker.stdout + checker.stderr).splitlines()
    assert checker.returncode == 0, "\n".join(["mypy reports:", *lines[:SHOWN], lines[-1]])


def test_the_examples_of_the_exchanged_types_are_true():
    """They share their names, in the order of the file, as a reader takes them."""
    examples = [test for test in doctest.DocTestFinder(exclude_empty=True).find(types) if test.examples]
    names, runner = dict(vars(types)), doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    said = []
    for example in sorted(examples, key=lambda test: test.lineno):
        example.globs = names
        runner.run(example, out=said.append, clear_globs=False)
    assert not runner.failures, "".join(said)
    shown = {test.name.removeprefix("megagrpo.types.") for test in examples}
    assert shown == {
        name for name, value in vars(types).items() if dataclasses.is_dataclass(value) and isinstance(value, type)
    }
