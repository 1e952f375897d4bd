"""Types: mypy checks the package and the benchmarks with the settings of pyproject.toml."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHOWN = 30  # lines of the checker's output


@pytest.mark.slow  # without mypy's cache, .mypy_cache
def test_the_type_checker_reports_nothing():
    checker = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True, timeout=280)
    lines = (checker.stdout + checker.stderr).splitlines()
    assert checker.returncode == 0, "\n".join(["mypy reports:", *lines[:SHOWN], lines[-1]])
