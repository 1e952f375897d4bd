"""The process that runs reward functions: `python -m megagrpo.rewards.worker FD`, started and killed by `pool.Worker`.

It reads `Call` tuples from the socket FD and answers each with ("started",) when the function is loaded and then
("result", value, seconds) or ("error", text, seconds). It never imports torch; standard output goes to standard error.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import importlib.util
import inspect
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PASSED_TO_ALL = ("prompts", "completions", "completion_ids", "finish_reasons", "max_completion_length")
_PR_SET_PDEATHSIG = 1


def serve(connection: Connection) -> None:
    """Answer calls until the other side closes the connection."""
    while True:
        try:
            action, location, attribute, arguments = connection.recv()
        except EOFError:
            return
        started = time.perf_counter()
        try:
            function = load(location, attribute)
            connection.send(("started",))
            started = time.perf_counter()
            answer = ("result", signature(function) if action == "describe" else call(function, arguments))
        except BaseException as error:  # SystemExit and KeyboardInterrupt of a reward are the reward's fault too
            answer = ("error", _explain(error))
        connection.send((*answer, time.perf_counter() - started))


@cache
def load(location: str, attribute: str) -> Callable:
    """Import `attribute` from a dotted module or from the .py file `location`."""
    module = _load_file(Path(location)) if location.endswith(".py") else importlib.import_module(location)
    function = getattr(module, attribute, None)
    if not callable(function):
        own = [n for n, v in vars(module).items() if inspect.isfunction(v) and not n.startswith("_")]
        raise AttributeError(f"{location} has no function `{attribute}`; it has: {', '.join(own) or 'none'}")
    return function


def _load_file(path: Path) -> Any:
    name = f"megagrpo_reward_{path.stem}_{abs(hash(str(path)))}"
    if name not in sys.modules:
        sys.path.insert(0, str(path.parent))  # its own helpers lie beside it
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def signature(function: Callable) -> dict[str, Any]:
    """What the function takes: `accepts` all its keyword names, `open` whether it takes **kwargs, `needs` the columns it cannot do
    without, each as a tuple of alternatives."""
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = tuple((p.name,) for p in named if p.default is p.empty and p.name not in PASSED_TO_ALL)
    return {
        "accepts": tuple(p.name for p in named),
        "open": any(p.kind is p.VAR_KEYWORD for p in parameters),
        "needs": getattr(function, "needs_columns", required),
    }


def call(function: Callable, arguments: dict[str, Any]) -> list[float | None]:
    """Call with those arguments the function accepts; check that one number or None comes back per completion.

    A value that is no finite number comes back as NaN: an error of that completion alone."""
    described = signature(function)
    accepted = arguments if described["open"] else {k: v for k, v in arguments.items() if k in described["accepts"]}
    values = function(**accepted)
    if inspect.isawaitable(values):
        values = asyncio.run(_await(values))
    count = len(arguments["completions"])
    values = list(values)
    if len(values) != count:
        raise ValueError(f"gave {len(values)} rewards for {count} completions")
    return [None if v is None else _finite(v) for v in values]


async def _await(awaitable: Any) -> Any:
    return await awaitable


def _finite(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return math.nan
    return number if math.isfinite(number) else math.nan


def _explain(error: BaseException) -> str:
    """The error and the line it comes from, frames of this file left out."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__ and not f.filename.startswith("<frozen")]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def _tie_to_parent() -> None:
    """Die with the trainer, whatever kills it, even while a reward holds the GIL; and be the first to go when memory runs out."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        Path("/proc/self/oom_score_adj").write_text("1000")
    except OSError:
        pass


def main() -> None:
    _tie_to_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(Connection(int(sys.argv[1])))
    os._exit(0)  # threads that a reward left behind do not keep the worker alive


if __name__ == "__main__":
    main()
