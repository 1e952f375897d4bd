"""Types: mypy checks the package and the benchmarks with the settings of pyproject.toml, and the docstrings' examples of
`megagrpo.types` and `megagrpo.train_types` are run."""

import dataclasses
import doctest
import importlib
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from megagrpo import train_types, types

ROOT = Path(__file__).parents[2]
SHOWN = 30  # lines of the checker's output


@pytest.mark.full
@pytest.mark.slow  # without mypy's cache, .mypy_cache
def test_the_type_checker_reports_nothing():
    checker = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True, timeout=280)
    lines = (checker.stdout + checker.stderr).splitlines()
    assert checker.returncode == 0, "\n".join(["mypy reports:", *lines[:SHOWN], lines[-1]])


def test_the_examples_of_the_exchanged_types_are_true():
    """They share their names, in the order of the two files, as a reader takes them."""
    names, runner = dict[str, object](), doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    said = []
    for module in (types, train_types):
        names |= vars(module)
        examples = [test for test in doctest.DocTestFinder(exclude_empty=True).find(module) if test.examples]
        for example in sorted(examples, key=lambda test: test.lineno):
            example.globs = names
            runner.run(example, out=said.append, clear_globs=False)
        shown = {test.name.removeprefix(f"{module.__name__}.") for test in examples}
        assert shown == {
            name for name, value in vars(module).items() if dataclasses.is_dataclass(value) and isinstance(value, type)
        }
    assert not runner.failures, "".join(said)


def test_the_examples_of_all_other_modules_are_true():
    files = [file.relative_to(ROOT) for file in (ROOT / "megagrpo").rglob("*.py") if ">>> " in file.read_text()]
    names = {".".join(file.with_suffix("").parts) for file in files} - {types.__name__, train_types.__name__}
    failures = {name: doctest.testmod(importlib.import_module(name)).failed for name in names}
    assert names and not any(failures.values()), failures


def test_a_response_takes_at_most_12_bytes_a_token():
    """With its text of 3.5 characters a token; tuples of Python numbers took 85."""
    prompt, length, count = types.Prompt(0, (1, 2), "x"), 4000, 20
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        rollouts = [
            types.Rollout(prompt, range(length), [-0.125 * (i % 7) for i in range(length)], "stop", 0, "abcdefg" * 2000)
            for _ in range(count)
        ]
        scored = [types.ScoredRollout(rollout, {"exact": 1.0}, 1.0) for rollout in rollouts]
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(scored) == count and (after - before) / (count * length) <= 12


def test_rollouts_are_equal_by_their_tokens():
    prompt, dialogue = types.Prompt(0, (1, 2), "x"), types.Dialogue([True, False], (), (types.Turn(0, 1),), "done")
    one = types.Rollout(prompt, (5, 6), (-0.5, -0.25), "stop", 0, "a", dialogue)
    same = types.Rollout(
        prompt, np.array([5, 6]), np.array([-0.5, -0.25]), "stop", 0, "a", dataclasses.replace(dialogue)
    )
    assert one == same and one.response_ids.dtype == np.int32 and one.rollout_logprobs.dtype == np.float32
    assert one != dataclasses.replace(one, response_ids=(5, 7)) and one != prompt
    assert dialogue != dataclasses.replace(dialogue, written=[True, True])
