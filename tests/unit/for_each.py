"""One test that visits many cases of the same check and lists every case that fails."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest


def for_each(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable:
    """Return a decorator that has the arguments of `pytest.mark.parametrize` but makes one test of all `cases`.

    Each case has an empty `tmp_path` and a `monkeypatch` of its own. A message names each case that fails, and shows
    its traceback.
    """
    names = tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else names
    rows = [case if len(names) > 1 else (case,) for case in cases]
    assert rows, f"no case of {names}"
    assert not any(hasattr(value, "marks") for row in rows for value in row), "pytest.param needs parametrize"

    def decorate(test: Callable) -> Callable:
        parameters = inspect.signature(test).parameters.values()

        @functools.wraps(test)
        def loop(**fixtures: Any) -> None:
            failed = []
            for i, row in enumerate(rows):
                given = dict(zip(names, row, strict=True))
                try:
                    with pytest.MonkeyPatch.context() as own:
                        test(**fixtures_of_case(fixtures, i, own), **given)
                except (Exception, pytest.fail.Exception):
                    failed.append(f"case {i}, {given}:\n{traceback.format_exc()}")
            assert not failed, f"{len(failed)} of {len(rows)} cases fail\n" + "\n".join(failed)

        loop.__signature__ = inspect.Signature([one for one in parameters if one.name not in names])  # type: ignore
        return loop

    return decorate


def fixtures_of_case(fixtures: dict[str, Any], i: int, own: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace the folder and the patches of a test by those of its case `i`."""
    replaced: dict[str, Any] = {}
    if "tmp_path" in fixtures:
        replaced["tmp_path"] = Path(fixtures["tmp_path"]) / f"case_{i}"
        replaced["tmp_path"].mkdir()
    if "monkeypatch" in fixtures:
        replaced["monkeypatch"] = own
    return fixtures | replaced
