"""Imports the user's code: functions and classes in `.py` files and in installed modules."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

_PACKAGE = str(Path(__file__).parents[2])


def load(location: str, name: str) -> Callable[..., Any]:
    """Return function or class `name` of `location`, a `.py` path or a dotted module; imported once per process.

    Raises AttributeError, listing its own functions and classes, without one of that name, and whatever the import
    raises.
    """
    module = load_file(Path(location)) if location.endswith(".py") else importlib.import_module(location)
    function = getattr(module, name, None)
    if not callable(function):
        public = {n: v for n, v in vars(module).items() if not n.startswith("_")}
        own = [n for n, v in public.items() if getattr(v, "__module__", None) == module.__name__ and callable(v)]
        raise AttributeError(f"{location} has no function or class `{name}`; it has: {', '.join(own) or 'none'}")
    return function


def load_named(name: str) -> Callable[..., Any]:
    """Return the function or class that the user names: `FILE.py:name`, from the current folder, or
    `package.module:name`. Raises ValueError with the cause and the fix."""
    location, _, attribute = name.rpartition(":")
    try:
        return load(absolute(location), attribute)
    except Exception as error:
        raise ValueError(f"cannot be loaded: {described(error)}; correct the file or the name") from error


def load_subclass[T](name: str, base: type[T], method: str) -> type[T]:
    """Like `load_named`, for a class. Raises ValueError unless it is a subclass of `base` that defines `method`."""
    loaded: Any = load_named(name)
    if not (isinstance(loaded, type) and issubclass(loaded, base)):
        raise ValueError(f"is not a subclass of {base.__module__}.{base.__name__}")
    if getattr(loaded, method) is getattr(base, method):
        raise ValueError(f"does not define {method}; add it: docs/transports.md")
    return loaded


def absolute(location: str) -> str:
    """Return a `.py` path as absolute, from the current folder; a module unchanged. Raises FileNotFoundError."""
    if not location.endswith(".py"):
        return location
    file = Path(location).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"no file {file.absolute()}")
    return str(file.resolve())


def load_file(path: Path) -> ModuleType:
    """Import the file, once per process. Modules beside the file can be imported by it."""
    name = f"megagrpo_user_{path.stem}_{abs(hash(str(path)))}"
    if name not in sys.modules:
        sys.path.insert(0, str(path.parent))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None, f"{path} ends in .py"
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def described(error: BaseException) -> str:
    """Return the error in one line, with file and line of the last frame that is the user's, if any."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((_PACKAGE, "<frozen"))]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"
