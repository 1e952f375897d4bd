"""Seconds of each test: every run writes the slowest to `build/slowest_tests.txt`; --record-durations writes
`tests/durations.json`, from which `tests/unit/test_suite_budget.py` knows what a folder costs.

CPU seconds are those of the test's process and of its children that have ended, module fixtures included in the first
test that uses them.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SLOWEST, SHOWN = ROOT / "build" / "slowest_tests.txt", 40
DURATIONS = ROOT / "tests" / "durations.json"
KEY = "test_seconds"


def cpu_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    now = os.times()
    return now.user + now.system + now.children_user + now.children_system


class Timing:
    """The plugin: `seconds` maps a test's id to its CPU and wall seconds."""

    def __init__(self, config: pytest.Config):
        self.config, self.seconds = config, {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        cpu, wall = cpu_seconds(), time.perf_counter()
        result = yield
        self.seconds[item.nodeid] = [round(cpu_seconds() - cpu, 3), round(time.perf_counter() - wall, 3)]
        return result

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.seconds |= getattr(node, "workeroutput", {}).get(KEY, {})

    def pytest_sessionfinish(self) -> None:
        if hasattr(self.config, "workeroutput"):  # a process of pytest-xdist
            self.config.workeroutput[KEY] = self.seconds
        elif self.seconds:
            SLOWEST.parent.mkdir(exist_ok=True)
            slowest = sorted(self.seconds.items(), key=lambda pair: -pair[1][1])[:SHOWN]
            lines = [f"{wall:8.1f} s  {cpu:8.1f} CPU s  {test}" for test, (cpu, wall) in slowest]
            SLOWEST.write_text("\n".join(lines) + "\n")
            if self.config.option.record_durations:
                DURATIONS.write_text(recorded(self.seconds))


def recorded(seconds: dict[str, list[float]]) -> str:
    """Test file -> number of cases and CPU seconds, as JSON with a line for each file."""
    files = defaultdict(lambda: [0, 0.0])
    for test, (cpu, _) in seconds.items():
        of_file = files[test.partition("::")[0]]
        of_file[0], of_file[1] = of_file[0] + 1, round(of_file[1] + cpu, 1)
    lines = [f"  {json.dumps(name)}: {json.dumps(values)}" for name, values in sorted(files.items())]
    return "{\n" + ",\n".join(lines) + "\n}\n"
