"""Python objects of the caller as a module that other processes import: a pickle, and a `.py` file that loads it.

The config names an object as `FILE.py:NAME`, like any function in a file. So a notebook's functions, lambdas and
closures run in the reward workers, a resumed run finds them, and `resolved.yaml` runs again. Reading a pickle runs
code, as importing a `.py` file does.
"""

from __future__ import annotations

import functools
import keyword
import pickle
import re
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megagrpo.config import ConfigError
from megagrpo.config.sections.rewards import numbered

MODULE = '''\
"""Objects that megagrpo.train got from Python. {pickle} holds them; this file loads them."""

import pathlib as _pathlib
import pickle as _pickle
import sys as _sys

_sys.path.extend(_path for _path in {paths!r} if _path not in _sys.path)
_pickled = _pickle.loads(_pathlib.Path(__file__).with_name("{pickle}").read_bytes())


def _load(name):
    made = _pickle.loads(_pickled[name])
    return made if callable(made) else type(name, (), {{"__new__": lambda cls: made}})  # a callback stands for a class


'''


def names_of(objects: Iterable[Any]) -> list[str]:
    """Return a unique Python name for each object: the name of the function or class; repeated names get a number."""
    stems = [re.sub(r"\W", "", _name(thing)).lstrip("0123456789") or "function" for thing in objects]
    return numbered(f"{stem}_function" if keyword.iskeyword(stem) else stem for stem in stems)  # a keyword: lambda


def _name(thing: Any) -> str:
    while isinstance(thing, functools.partial):
        thing = thing.func
    name = getattr(thing, "__name__", None)
    return name if isinstance(name, str) else type(thing).__name__


def pickled(thing: Any, key: str) -> bytes:
    """Return the pickle of an object. Raises ConfigError, naming the argument `key`, for an object without one."""
    import cloudpickle

    torch = sys.modules.get("torch")
    if torch is not None and isinstance(thing, torch.nn.Module):
        raise ConfigError(f"{key}: a {type(thing).__name__} is a model, not a function; save it and pass model:FOLDER")
    try:
        made: bytes = cloudpickle.dumps(thing)
    except Exception as error:  # any class may define how it is pickled
        why = f"cannot be sent to the run's processes: {type(error).__name__}: {' '.join(str(error).split())[:500]}"
        fix = "open files, locks, models and connections inside the function, or define it in a file and pass "
        raise ConfigError(f"{key}: `{_name(thing)}` {why}; {fix}path/file.py:name") from error
    return made


def write_module(file: Path, pickles: Mapping[str, bytes]) -> None:
    """Write the module `file` and its pickle, name -> pickle of an object."""
    data = file.with_suffix(".pkl")
    data.write_bytes(pickle.dumps(dict(pickles)))
    installed = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))  # the workers have these folders too
    folders = dict.fromkeys(str(Path(path).absolute()) for path in sys.path)
    paths = [path for path in folders if not path.startswith(installed)]
    lines = [f'{name} = _load("{name}")\n' for name in pickles]
    file.write_text(MODULE.format(pickle=data.name, paths=paths) + "".join(lines))
