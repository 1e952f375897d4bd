"""Which cases of a test the default suite runs; `make test-full` runs all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def usual(values: Iterable[Any], *indices: int) -> list[Any]:
    """Parameters of a test, of which the default suite runs those at `indices` and the full suite all. A tuple has the
    values of several arguments."""
    return [_marked(value, () if index in indices else pytest.mark.full) for index, value in enumerate(values)]


def _marked(value: Any, marks: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks)
