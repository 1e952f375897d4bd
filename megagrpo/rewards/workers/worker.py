"""The process that runs reward functions, tools and schedulers, started and killed by `pool.Worker`:
`python -m megagrpo.rewards.workers.worker functions|coroutines FD`.

It reads [number, action, target, options, arguments, timeout, parts] from the socket FD (channel.py) and answers each
with [number, "started"] when the function is loaded, and then [number, "result", value, seconds], [number, "error",
text, seconds], [number, "invalid", text, seconds] for a result that is no list of one value per completion or, for a
coroutine that it has cancelled at its deadline, [number, "timeout", text, seconds]. A message [number] cancels a
coroutine. It imports no torch of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megagrpo.platform.process import user_code
from megagrpo.platform.process.cleanup.parent_death import end_with_parent, guard_session
from megagrpo.rewards.registry.reward_values import LOG_ARGUMENTS, CallLog, InvalidRewards, Parts, reward_of, rewards_of
from megagrpo.rewards.registry.target import Signature, Target
from megagrpo.rewards.workers.channel import Channel, from_json

PASSED_TO_ALL = (
    *("prompts", "completions", "completion_ids", "finish_reason", "is_truncated"),
    *("prefixes", "trajectories", "max_completion_length", "trainer_state", *LOG_ARGUMENTS),
)
_LONGEST_REPORT = 20_000  # characters of an error
_OWN_FILES = (__file__, user_code.__file__)


@dataclass(frozen=True)
class Loaded:
    """A loaded function or class instance. `options` are passed with each call; a class got them at construction."""

    function: Callable[..., Any]
    options: dict[str, Any]
    signature: Signature


_loaded: dict[str, Loaded] = {}
_pid = os.getpid()


def load(target: Target, options: dict[str, Any]) -> Loaded:
    """Import `target`, and construct it with `options` when it is a class; once per process."""
    key = repr((target, sorted(options.items())))
    if key not in _loaded:
        loaded = find(target)
        is_class = isinstance(loaded, type)
        described = _signature(loaded, target, options)
        options = {**dict(target.preset), **options}
        function = loaded(**options) if is_class and not described["unknown"] else loaded
        # an instance may need other columns than its class
        needs = getattr(function, "needs_columns", described["needs"])
        described["needs"] = tuple(n for n in needs if is_class or set(n).isdisjoint(options))
        described["independent"] = target.independent or bool(getattr(function, "independent", False))
        _loaded[key] = Loaded(function, {} if is_class else options, described)
    return _loaded[key]


def find(target: Target) -> Callable[..., Any]:
    """Import the function or class that `target` names; once per process."""
    return user_code.load(target.location, target.attribute)


def _signature(function: type[Any] | Callable[..., Any], target: Target, options: dict[str, Any]) -> Signature:
    """Describe a function or class before it is called. `options` are those of the config."""
    call = function.__call__ if isinstance(function, type) else function
    takes, takes_any = named_parameters(call, skip_first=isinstance(function, type))
    # A class object, not an instance: its constructor is the one that will be called.
    options_of = function.__init__ if isinstance(function, type) else call  # type: ignore[misc]
    constructor, is_open = named_parameters(options_of, skip_first=isinstance(function, type))
    preset = {name for name, _ in target.preset}
    names = tuple(p.name for p in constructor if p.name not in preset)
    required = tuple((p.name,) for p in takes if p.default is p.empty and p.name not in PASSED_TO_ALL)
    columns = getattr(function, "columns_read", ())  # of a function that takes any column, and reads these only
    return {
        "options": names,
        "unknown": () if is_open else tuple(name for name in options if name not in names),
        "accepts": (*(p.name for p in takes), *columns),
        "open": takes_any and not columns,
        "needs": required,
        "is_coroutine": any(map(inspect.iscoroutinefunction, (call, type(function).__call__))),
        "independent": False,  # known when a class is constructed
        "completions_per_call": getattr(function, "completions_per_call", None),
        "value_of_failure": _value_of_failure(function),
        "finds_row_faults": hasattr(function, "row_fault"),
    }


def _value_of_failure(function: Callable[..., Any]) -> float | None:
    value = getattr(function, "value_of_failure", 0.0)
    try:
        return None if value is None else reward_of(value)
    except (TypeError, ValueError):
        raise ValueError(
            f"its attribute value_of_failure is {value!r:.100}; it must be a finite number or None"
        ) from None


def named_parameters(function: Callable[..., Any], skip_first: bool) -> tuple[list[inspect.Parameter], bool]:
    """Return the parameters that a call can name, and whether the function takes any further name."""
    parameters = list(inspect.signature(function).parameters.values())[int(skip_first) :]
    if function is object.__init__:
        return [], False
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return named, any(p.kind is p.VAR_KEYWORD for p in parameters)


def call(loaded: Loaded, arguments: dict[str, Any], log: CallLog) -> Any:
    """Call the function with the arguments that it accepts. Returns its values or an awaitable of them."""
    arguments = arguments | copy.deepcopy(loaded.options) | {name: getattr(log, name) for name in LOG_ARGUMENTS}
    if not loaded.signature["open"]:
        arguments = {k: v for k, v in arguments.items() if k in loaded.signature["accepts"]}
    return loaded.function(**arguments)


def explain(error: BaseException, whole: bool) -> str:
    """Return the error with its traceback without this program's frames, or one line with the place of the raise."""
    report = traceback.TracebackException.from_exception(error)
    seen: traceback.TracebackException | None = report
    while seen is not None:
        frames = [f for f in seen.stack if f.filename not in _OWN_FILES and not f.filename.startswith("<frozen")]
        seen.stack = traceback.StackSummary.from_list(frames)
        seen = seen.__cause__ or seen.__context__
    if whole:
        return "".join(report.format()).rstrip()[-_LONGEST_REPORT:]
    where = f" ({report.stack[-1].filename}:{report.stack[-1].lineno})" if report.stack else ""
    return f"{type(error).__name__}: {str(report)[:_LONGEST_REPORT]}{where}"  # its `__str__` may raise


# -------------------------------------------------------------------------------------------------------- the two kinds


def serve_functions(channel: Channel) -> None:
    """Answer calls one at a time until the other side closes the connection."""
    home = os.getcwd()
    while True:
        try:
            number, action, target, options, arguments, _, parts = from_json(channel.receive())
        except EOFError:
            return
        begun = time.perf_counter()
        try:
            loaded = load(target, options)
            channel.send([number, "started"])
            begun = time.perf_counter()
            answer = ["result", _result(action, loaded, arguments, parts)]
        except BaseException as error:  # SystemExit and KeyboardInterrupt of a reward count as its errors too
            answer = _failure(error, action)
        seconds = time.perf_counter() - begun
        signal.setitimer(signal.ITIMER_REAL, 0)  # the next call may be another function's
        with contextlib.suppress(OSError):
            os.chdir(home)
        _reply(channel, number, answer, seconds)


def _result(action: str, loaded: Loaded, arguments: dict[str, Any], parts: Parts | None) -> Any:
    if action == "describe":
        return loaded.signature
    if action == "call":
        return loaded.function(**arguments)
    if action == "row_faults":
        return [_row_fault(loaded, row) for row in arguments["rows"]]
    count = len(arguments["completions"])
    log = CallLog(count)
    return [rewards_of(awaited(call(loaded, arguments, log)), count, parts), log.contents()]


def _row_fault(loaded: Loaded, row: dict[str, Any]) -> str | None:
    """Return why the function says it cannot score a row, or why it cannot say so; None for a row without a fault."""
    find_fault = loaded.function.row_fault  # type: ignore[attr-defined]
    takes, takes_any = named_parameters(find_fault, skip_first=False)
    names = {p.name for p in takes}
    try:
        fault = find_fault(**{name: v for name, v in (row | loaded.options).items() if takes_any or name in names})
    except Exception as error:
        return f"its row_fault fails: {explain(error, whole=False)}"
    if fault is None or isinstance(fault, str):
        return fault
    return f"its row_fault returned {type(fault).__name__}; return a text or None"


def awaited(value: Any) -> Any:
    """Return the value of a plain function that may return an awaitable."""

    async def wait() -> Any:
        return await value

    return asyncio.run(wait()) if inspect.isawaitable(value) else value


def _failure(error: BaseException, action: str) -> list[Any]:
    if isinstance(error, InvalidRewards):
        return ["invalid", str(error)]
    return ["error", explain(error, whole=action == "score")]


def _reply(channel: Channel, number: int, answer: list[Any], seconds: float) -> None:
    if os.getpid() != _pid:  # user code has forked, and the copy has returned too: only the worker's own return counts
        os._exit(0)
    flush()
    try:
        channel.send([number, *answer, seconds])
    except (TypeError, ValueError, RecursionError) as error:
        channel.send([number, "error", f"its result cannot be sent: {error}", seconds])


def flush() -> None:
    """Write what user code has printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # user code may have replaced or closed it
            stream.flush()


async def serve_coroutines(channel: Channel) -> None:
    """Answer calls as they come, concurrently, until the other side closes the connection."""
    closed, tasks = asyncio.Event(), dict[int, asyncio.Task[None]]()

    def read() -> None:
        try:
            messages = channel.read()
        except EOFError:
            closed.set()
            return
        for number, *call in messages:
            if call:
                tasks[number] = asyncio.ensure_future(_answer(channel, number, *from_json(call)))
                tasks[number].add_done_callback(partial(_forget, tasks, number))
            elif number in tasks:
                tasks[number].cancel()

    asyncio.get_running_loop().add_reader(channel.fileno(), read)
    await closed.wait()


def _forget(tasks: dict[int, asyncio.Task[None]], number: int, _: asyncio.Task[None]) -> None:
    del tasks[number]


async def _answer(
    channel: Channel,
    number: int,
    action: str,
    target: Target,
    options: dict[str, Any],
    arguments: dict[str, Any],
    timeout: float,
    parts: Parts | None,
) -> None:
    begun, limit = time.perf_counter(), None
    try:
        loaded = load(target, options)
        channel.send([number, "started"])
        begun = time.perf_counter()
        if action == "describe":
            answer: list[Any] = ["result", loaded.signature]
        elif action == "call":
            async with asyncio.timeout(timeout) as limit:
                answer = ["result", await loaded.function(**arguments)]
        else:
            count = len(arguments["completions"])
            log = CallLog(count)
            async with asyncio.timeout(timeout) as limit:
                answer = ["result", [rewards_of(await call(loaded, arguments, log), count, parts), log.contents()]]
    except BaseException as error:
        is_late = isinstance(error, TimeoutError) and limit is not None and limit.expired()
        answer = ["timeout", "no answer in time"] if is_late else _failure(error, action)
    _reply(channel, number, answer, time.perf_counter() - begun)


def tie_to_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel kill this process with the trainer, even if a reward holds the GIL, and first on low memory.
    `number` is the signal that it sends when the trainer ends."""
    end_with_parent(os.getppid(), number)
    try:
        Path("/proc/self/oom_score_adj").write_text("1000")
    except OSError:
        pass


def leave_trainer() -> None:
    """Close a forked worker's copy of the connection to the trainer."""
    os.close(int(sys.argv[-1]))


def main() -> None:
    tie_to_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    kind, descriptor = sys.argv[1:]
    guard_session(int(descriptor))
    os.set_inheritable(int(descriptor), False)  # child processes of a reward must not keep the connection open
    channel = Channel(socket.socket(fileno=int(descriptor)), trusted=True)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the trainer no longer waits for the result
        if kind == "coroutines":
            asyncio.run(serve_coroutines(channel))
        else:
            serve_functions(channel)
    os._exit(0)  # threads that a reward left must not keep the worker alive


if __name__ == "__main__":
    main()
