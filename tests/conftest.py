"""How tests are shared among the processes of pytest-xdist (`make test`), and which Python `launch/local.sh` takes."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

from megagrpo.platform.process.imports import without_garbage_collection
from tests import forked_workers, timing

# Without caches of bytecode each process compiles what it imports, and pytest rewrites all asserts again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ["VIRTUAL_ENV"] = sys.prefix  # for launch/local.sh in a clone without a .venv: the tests' own environment


def scope_of(nodeid: str) -> str:
    """Return the name of the group of tests that one process takes: the test's file, or tests/e2e. Its files share
    servers, of which each process starts its own: two processes with them do not fit 24 GB."""
    return "tests/e2e" if nodeid.startswith("tests/e2e/") else nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A pytest-xdist scheduler that groups tests by `scope_of`. The `loadgroup` of xdist 3.8 does not group with pytest
    9.2."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    return Scheduling(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help="write tests/durations.json")
    parser.addoption("--shard", metavar="K/N", help="run the K-th of N parts of the tests")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collect tests without the garbage collector: imports create no garbage, and repeated collections take half of the
    time. Afterwards the collector ignores the imported objects, in the tests and in the ranks that they fork."""
    with without_garbage_collection():
        return (yield)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(timing.Timing(config), "timing")
    if not hasattr(config, "workerinput") and config.getoption("numprocesses", None):
        forked_workers.install()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.shard is None:
        return
    part, count = map(int, config.option.shard.split("/"))
    if not 1 <= part <= count:
        raise pytest.UsageError(f"--shard: {config.option.shard} is not K/N with K from 1 to N")
    kept = shard([item.nodeid for item in items], part, count)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in items if item.nodeid in kept]


def shard(ids: list[str], part: int, count: int) -> set[str]:
    """The ids of part `part`, from 1, of `count`: every `count`-th test, or case of a test with `count` cases or more."""
    cases = Counter(of_test(each) for each in ids)
    units = [each if cases[of_test(each)] >= count else of_test(each) for each in ids]
    kept = set(sorted(set(units))[part - 1 :: count])
    return {each for each, unit in zip(ids, units, strict=True) if unit in kept}


def of_test(nodeid: str) -> str:
    """A case's id without its parameters."""
    return nodeid.partition("[")[0]
