"""Runs a program and its checks in the confined process of `child`. Imports only built-in standard library modules.

Results go to the parent one by one, so the ones before a deadline count. The last one tells whether everything ran.
"""

import builtins
import sys

TYPE_CHECKING = False  # importing `typing` takes time
if TYPE_CHECKING:
    from collections.abc import Callable

    from megagrpo.rewards.sandbox.sandbox import Checks

EXEC, COMPILE, ITERATE, LENGTH = exec, compile, iter, len  # a program can replace the built-in names


def execute(
    program: str, checks: "Checks | None", result: "Callable[[object], None]", end: "Callable[[], None]"
) -> None:
    """Run a program, then its checks in the same namespace. `result` gets each check's result, `end` ends the process.

    Without checks the program is `__main__`, and its exit status is the result. With checks it is the module
    `solution`, which tests can import, and `if __name__ == "__main__"` does not run.
    """
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # `site`, which does not run here, defines the two
    module = type(sys)("__main__" if checks is None else "solution")
    names = module.__dict__
    names["__builtins__"] = builtins
    sys.modules["__main__"] = module
    if checks is not None:
        sys.modules["solution"] = module
        EXEC(COMPILE(checks["setup"], "<setup>", "exec"), names)
    status: object = None
    try:
        EXEC(COMPILE(program, "<program>", "exec"), names)
    except SystemExit as error:
        status = error.code
    if checks is None:
        finish_threads()
        flush()
        result(status in (None, 0))
        result(True)
    else:
        run_steps(names, checks, result)
    flush()
    end()


def finish_threads() -> None:
    """Do what the interpreter does at its end: wait for threads, and call the functions of `atexit`."""
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    if "atexit" in sys.modules:
        sys.modules["atexit"]._run_exitfuncs()


def flush() -> None:
    """Write out what the program has printed. It may have replaced or closed `sys.stdout`."""
    for stream in (sys.stdout, sys.__stdout__):
        try:
            stream.flush()  # type: ignore[union-attr]
        except (AttributeError, OSError, ValueError):
            pass


def find(names: dict[str, object], path: str) -> "Callable[..., object]":
    """Return the function of a program: `f`, `Class.f` or `Class().f`; or the method `f` of its class `Solution`."""
    first, *rest = path.replace("()", "").split(".")
    if first not in names and "Solution" in names:
        first, rest = "Solution", [first, *rest]
    target = names[first]
    for name in rest:
        target = getattr(target() if isinstance(target, type) else target, name)
    return target  # type: ignore[return-value]


def run_steps(names: dict[str, object], checks: "Checks", result: "Callable[[object], None]") -> None:
    """Run the steps. A step that sets up and raises ends them; so does a failed test with `stop_early`."""
    counted: list[None] = []
    stop = checks["stop_early"]

    class Test:
        """Reports one assert in the body of a function."""

        def __enter__(self) -> None:
            pass

        def __exit__(self, kind: object, *_: object) -> bool:
            result(kind is None)
            return not stop

    names["__checked__"] = lambda append=counted.append: append(None)
    names["__test__"] = Test
    names["__function__"] = lambda path: find(names, path)
    for kind, code in ITERATE(checks["steps"]):
        if kind == "call":
            arguments, keywords = code
            try:
                value = find(names, checks["function"])(*arguments, **keywords)
                result([value])
            except BaseException:
                result(None)
            continue
        before = LENGTH(counted)
        try:
            EXEC(code, names)
            passed = kind != "check" or LENGTH(counted) > before
        except SystemExit as error:
            passed = kind == "setup" and error.code in (None, 0)
        except BaseException:
            passed = False
        if kind != "setup":
            result(passed)
        if not passed and (stop or kind == "setup"):
            return
    result(True)
