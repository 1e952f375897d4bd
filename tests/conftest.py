"""How tests are shared among the workers of pytest-xdist (`make test`)."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
TOGETHER = {"e2e"}
"""Folders whose files share servers and models that each process makes for itself: one worker takes all of them."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test the xdist group of its file, or of its folder where `TOGETHER` names it: what they share is made once."""
    for item in items:
        parts = item.path.relative_to(TESTS).parts
        item.add_marker(pytest.mark.xdist_group(parts[0] if parts[0] in TOGETHER else "/".join(parts)))
