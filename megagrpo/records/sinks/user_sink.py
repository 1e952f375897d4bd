"""Runs a sink of the user: a class with any of the methods of `sink.Sink`."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from megagrpo.platform.process import user_code
from megagrpo.records.completions import Row
from megagrpo.records.sinks.sink import Sink, TrackedRun

SINK_METHODS = {  # name -> parameters
    name: list(inspect.signature(getattr(Sink, name)).parameters)
    for name in ("step", "evaluation", "completions", "message", "close")
}


class OwnSink:
    """Calls the methods that the user's class defines; others do nothing."""

    def __init__(self, name: str, run: TrackedRun):
        self._sink: Any = load_class(name)(run)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self._call("step", step, dict(metrics))

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        self._call("evaluation", step, dict(metrics))

    def completions(self, step: int, rows: Sequence[Row]) -> None:
        self._call("completions", step, [dict(row) for row in rows])

    def message(self, text: str) -> None:
        self._call("message", text)

    def close(self) -> None:
        self._call("close")

    def _call(self, name: str, *arguments: Any) -> None:
        if (method := getattr(self._sink, name, None)) is not None:
            method(*arguments)


def load_class(name: str) -> type[Any]:
    """Import the class that `name` names: `path/file.py:Class` or `package.module:Class`.

    Raises ValueError with the violated rule for a class that a run cannot use.
    """
    location, _, attribute = name.rpartition(":")
    try:
        sink = user_code.load(user_code.absolute(location), attribute)
    except Exception as error:
        raise ValueError(f"cannot be loaded: {user_code.described(error)}; correct the file or the name") from error
    if not isinstance(sink, type):
        raise ValueError("is not a class; name a class with methods such as step: docs/trackers.md")
    methods = {name: getattr(sink, name) for name in SINK_METHODS if callable(getattr(sink, name, None))}
    if not methods:
        raise ValueError(f"defines no method that a run calls: {', '.join(SINK_METHODS)}")
    try:
        inspect.signature(sink).bind(None)
    except TypeError as error:
        raise ValueError(f"cannot be constructed: {error}; write __init__(self, run): docs/trackers.md") from None
    for name, method in methods.items():
        try:
            inspect.signature(method).bind(*SINK_METHODS[name])
        except TypeError as error:
            written = f"{name}({', '.join(SINK_METHODS[name])})"
            raise ValueError(f"cannot be called: {name}: {error}; write {written}: docs/trackers.md") from None
    return sink
