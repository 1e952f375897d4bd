"""What `make test` costs: each folder of tests has a budget, so that a new test takes the place of another one."""

import ast
import json
from collections import Counter
from pathlib import Path

import pytest

from tests import changed, conftest, timing

ROOT = Path(__file__).parents[2]
# CPU seconds on two cores of an AMD EPYC (Zen 5), recorded by `make test ARGS=--record-durations`.
BUDGET = {"tests/distributed": 295, "tests/e2e": 217, "tests/unit": 380}


def test_no_folder_costs_more_than_its_budget():
    cost: Counter[str] = Counter()
    for file, (_, cpu) in json.loads(timing.DURATIONS.read_text()).items():
        cost["/".join(file.split("/")[:2])] += cpu
    assert {folder: seconds for folder, seconds in cost.items() if seconds > BUDGET.get(folder, 0)} == {}


def test_every_default_test_file_has_a_recorded_cost():
    """A new file: run `make test ARGS=--record-durations`."""
    files = {str(path.relative_to(ROOT)) for folder in BUDGET for path in (ROOT / folder).rglob("test_*.py")}
    unknown = {file for file in files - set(json.loads(timing.DURATIONS.read_text())) if has_default_cases(ROOT / file)}
    assert unknown == set()


def has_default_cases(path: Path) -> bool:
    """Whether a test of the file has no marker that leaves it out of `make test`."""
    tree = ast.parse(path.read_text())
    of_file = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Assign)]
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    marks = [[ast.unparse(mark) for mark in test.decorator_list] for test in tests]
    left_out = any(text.startswith("pytestmark = ") and "mark.full" in text for text in of_file)
    return not left_out and any("pytest.mark.full" not in of_test for of_test in marks)


def test_the_seconds_of_a_file_are_those_of_its_cases():
    seconds = {"tests/a.py::test_x": [1.0, 2.0], "tests/a.py::test_y[1]": [0.5, 0.6], "tests/b.py::test_z": [3.0, 3.0]}
    assert json.loads(timing.recorded(seconds)) == {"tests/a.py": [2, 1.5], "tests/b.py": [1, 3.0]}


@pytest.mark.full
@pytest.mark.parametrize(
    ("file", "reached", "not_reached"),
    [
        (
            "megagrpo/rewards/math/units.py",
            "tests/unit/rewards/test_math_answers.py",
            "tests/unit/data/test_packing.py",
        ),
        ("tests/distributed/ranks.py", "tests/distributed/test_ranks.py", "tests/unit/test_help.py"),
        ("tests/unit/test_help.py", "tests/unit/test_help.py", "tests/unit/test_docs.py"),
    ],
)
def test_a_change_reaches_the_tests_that_import_it_and_no_others(file, reached, not_reached):
    found = {str(path.relative_to(ROOT)) for path in changed.tests_of({ROOT / file})}
    assert reached in found and not_reached not in found


def test_each_case_is_in_one_share_and_cases_of_a_small_test_stay_together():
    ids = [*(f"tests/a.py::test_x[{i}]" for i in range(20)), *(f"tests/b.py::test_y[{i}]" for i in range(3))]
    shares = [conftest.shard(ids, part, 4) for part in (1, 2, 3, 4)]
    assert Counter(each for share in shares for each in share) == Counter(ids)
    assert sorted(sum("test_x" in each for each in share) for share in shares) == [5, 5, 5, 5]
    assert sum(any("test_y" in each for each in share) for share in shares) == 1
