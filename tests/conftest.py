"""How tests are shared among the processes of pytest-xdist (`make test`), and which Python `launch/local.sh` takes."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

os.environ["VIRTUAL_ENV"] = sys.prefix  # for launch/local.sh in a clone without a .venv: the tests' own environment

TOGETHER = ("tests/e2e/",)
"""Folders whose files share servers and models: one process takes all files of a folder, because each process makes its
own."""


def scope_of(nodeid: str) -> str:
    """Return the name of the group of tests that one process takes: the test's file, or its folder if that is in
    `TOGETHER`."""
    return next((folder for folder in TOGETHER if nodeid.startswith(folder)), nodeid.partition("::")[0])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A pytest-xdist scheduler that groups tests by `scope_of`. The `loadgroup` of xdist 3.8 does not group with pytest
    9.2."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    return Scheduling(config, log)
