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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megagrpo.config import ConfigError
from megagrpo.config.sections.rewards import numbered

MODULE = '''\
"""{title}. {pickle} holds them; this file loads them."""

import pathlib as _pathlib
import pickle as _pickle
import sys as _sys

_sys.path.extend(_path for _path in {paths!r} if _path not in _sys.path)
_pickled = _pickle.loads(_pathlib.Path(__file__).with_name("{pickle}").read_bytes())

'''
INSTANCE = '''
class {name}:
    """Stands for one object: calling the class returns it."""

    def __new__(cls):
        return _{name}


_{name} = _pickle.loads(_pickled["{name}"])
'''


def names_of(objects: Sequence[Any]) -> list[str]:
    """Return a unique Python name for each object: the name of the function or class; repeated names get a number."""
    stems = [re.sub(r"\W", "", _name(thing)).lstrip("0123456789") or "function" for thing in objects]
    return numbered(f"{stem}_function" if keyword.iskeyword(stem) else stem for stem in stems)  # a keyword: lambda


def _name(thing: Any) -> str:
    while isinstance(thing, functools.partial):
        thing = thing.func
    name = getattr(thing, "__name__", None)
    return name if isinstance(name, str) else type(thing).__name__


def pickled(objects: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, bytes]:
    """Return name -> pickle. Raises ConfigError for an object without a pickle; `keys` names the object's argument."""
    import cloudpickle

    made, torch = {}, sys.modules.get("torch")
    for name, thing in objects.items():
        if torch is not None and isinstance(thing, torch.nn.Module):
            kind = type(thing).__name__
            raise ConfigError(f"{keys[name]}: a {kind} is a model, not a function; save it and pass model:FOLDER")
        try:
            made[name] = cloudpickle.dumps(thing)
        except Exception as error:  # any class may define how it is pickled
            why = f"cannot be sent to the run's processes: {type(error).__name__}: {' '.join(str(error).split())[:500]}"
            fix = "open files, locks, models and connections inside the function, or define it in a file and pass "
            raise ConfigError(f"{keys[name]}: `{_name(thing)}` {why}; {fix}path/file.py:name") from error
    return made


def write_module(file: Path, title: str, pickles: Mapping[str, bytes], instances: Sequence[str] = ()) -> None:
    """Write the module `file` and its pickle. Names in `instances` become classes that return the object on a call."""
    data = file.with_suffix(".pkl")
    data.write_bytes(pickle.dumps(dict(pickles)))
    lines = [f'{name} = _pickle.loads(_pickled["{name}"])\n' for name in pickles if name not in instances]
    lines += [INSTANCE.format(name=name) for name in instances]
    installed = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))  # the workers have these folders too
    folders = dict.fromkeys(str(Path(path).absolute()) for path in sys.path)
    paths = [path for path in folders if not path.startswith(installed)]
    file.write_text(MODULE.format(title=title, pickle=data.name, paths=paths) + "".join(lines))
