"""Writes a run's Python objects (reward functions, callbacks, data) into its folder, for config values to name."""

from __future__ import annotations

import functools
import hashlib
import keyword
import pickle
import re
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megagrpo.commands.api.inputs import dataset_rows
from megagrpo.commands.api.inputs.dataset_rows import Rows
from megagrpo.config import ConfigError, RunConfig, evaluation_sets, override_text
from megagrpo.config.basics.paths import anchored
from megagrpo.config.basics.yaml_text import shortened
from megagrpo.config.sections.rewards import numbered
from megagrpo.platform.process.cleanup.removal import remove
from megagrpo.records.checkpoints.run_files import FROM_PYTHON, make_run_folder

type Reward = str | Callable[..., Any] | Mapping[str, Any]
"""A reward function, its name for `rewards.functions.N.function`, or a mapping of `function` and keys like `weight`."""

# their folder is in sys.path: names that no module of a user has
REWARDS, CALLBACKS = "megagrpo_rewards.py", "megagrpo_callbacks.py"


@dataclass(frozen=True)
class Data:
    """A data set of the caller. `source` is the name of a source, or of the file that gets `rows`."""

    argument: str
    source: str
    rows: Any = None


@dataclass(frozen=True)
class Inputs:
    """The Python objects of a run, checked, and not written yet. Objects have the names FILE:NAME, where FILE is a key
    of `modules`; other names are absolute or have no path."""

    functions: list[dict[str, Any]] | None  # `rewards.functions`
    callbacks: list[str]  # to append to `run.callbacks`
    modules: dict[str, dict[str, bytes]]  # file -> name -> pickle
    data: dict[str, Data] = field(default_factory=dict)  # key of the config -> data set

    @property
    def to_write(self) -> bool:
        """Whether there is anything to write."""
        return bool(self.modules) or any(data.rows is not None for data in self.data.values())

    def overrides(self, folder: Path, callbacks: Sequence[str] | None = None) -> list[str]:
        """Return the overrides that name these objects as files in `folder`. With the config's `callbacks` also
        `run.callbacks`: the config's, then these."""

        def placed(name: str) -> str:
            return str(folder / name) if name.partition(":")[0] in self.modules else name

        made: dict[str, Any] = {}
        if self.functions is not None:
            made["rewards.functions"] = [each | {"function": placed(each["function"])} for each in self.functions]
        if self.callbacks and callbacks is not None:
            made["run.callbacks"] = [*callbacks, *map(placed, self.callbacks)]
        for key, data in self.data.items():
            made[key] = {"source": data.source if data.rows is None else str(folder / data.source)}
        return [override_text(key, value) for key, value in made.items()]

    def check_rows(self, config: RunConfig) -> None:
        """Raise ConfigError when rows lack the config's prompt column."""
        sets = evaluation_sets(config)
        columns = {f"evaluation.sets.{name}" if name else "data.eval": sets[name].prompt_column for name in sets}
        for key, data in self.data.items():
            if data.rows is not None:
                dataset_rows.check(data.rows, data.argument, columns.get(key, config.data.prompt_column))

    def write(self, run_folder: Path) -> Path:
        """Write the objects into a folder of the run, named after their content, and return it. Raises ConfigError."""
        above = from_python_folder(run_folder)
        try:
            partial = Path(tempfile.mkdtemp(prefix=".partial_", dir=above))
            try:
                for file, pickles in self.modules.items():
                    write_module(partial / file, pickles)
                for data in self.data.values():
                    if data.rows is not None:
                        dataset_rows.write(data.rows, partial / data.source, data.argument)
                folder = above / _digest(partial)
                if not folder.exists():
                    partial.rename(folder)
                    folder.chmod(above.stat().st_mode & 0o777)  # as the umask says, unlike mkdtemp
            finally:
                remove(partial)
        except OSError as error:
            raise _unwritable(above, error) from error
        return folder


def from_python_folder(run_folder: Path) -> Path:
    """Create a run's folder for functions and data from Python, and return its absolute path. Raises ConfigError."""
    folder = (run_folder / FROM_PYTHON).absolute()
    try:
        make_run_folder(run_folder)
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    return folder


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    why = error.strerror or error
    return ConfigError(f"run.output_dir: {folder} cannot be written: {why}; name another folder")


def collect(
    reward_functions: Reward | Sequence[Reward] | None,
    dataset: Rows | None,
    eval_dataset: Rows | Mapping[str, Rows] | None,
    callbacks: Sequence[Any] | None,
) -> Inputs:
    """Check the Python objects of a run and pickle the functions. Raises ConfigError."""
    functions = None
    modules: dict[str, dict[str, bytes]] = {}
    if reward_functions is not None:
        functions = [_section(index, reward) for index, reward in enumerate(_listed(reward_functions))]
        anchored({"rewards": {"functions": functions}}, Path())  # changes them in place
        names = _named([each["function"] for each in functions], REWARDS, "reward_functions", modules)
        functions = [each | {"function": name} for each, name in zip(functions, names, strict=True)]
    given = _listed(callbacks or ())
    anchored({"run": {"callbacks": given}}, Path())
    inputs = Inputs(functions, _named(given, CALLBACKS, "callbacks", modules), modules)
    if dataset is not None:
        inputs.data["data.train"] = _data("dataset", dataset, "train")
    if isinstance(eval_dataset, Mapping):
        for name, rows in eval_dataset.items():
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", str(name)):
                why = "is no name of a set; use letters, digits, _ and -"
                raise ConfigError(f"eval_dataset: {shortened(repr(name))} {why}")
            inputs.data[f"evaluation.sets.{name}"] = _data(f"eval_dataset.{name}", rows, f"eval_{name}")
    elif eval_dataset is not None:
        inputs.data["data.eval"] = _data("eval_dataset", eval_dataset, "eval")
    return inputs


def _listed(given: Any) -> list[Any]:
    """Return an argument that is one object or several as a list."""
    one = isinstance(given, (str, Mapping)) or callable(given) or not isinstance(given, Iterable)
    return [given] if one else list(given)


def _section(index: int, reward: Any) -> dict[str, Any]:
    """Return a reward as a section of `rewards.functions`, whose function may be an object."""
    section = dict(reward) if isinstance(reward, Mapping) else {"function": reward}
    if not isinstance(section.get("function"), str) and not callable(section.get("function")):
        reason = "must be a function, a name such as accuracy, or a mapping with the key `function`"
        raise ConfigError(f"reward_functions.{index}: {reason} (got {shortened(repr(reward))})")
    return section


def _named(things: Sequence[Any], file: str, argument: str, modules: dict[str, dict[str, bytes]]) -> list[str]:
    """Return the names of these names and objects, and add the pickles of the objects to `modules`."""
    listed = {index: thing for index, thing in enumerate(things) if not isinstance(thing, str)}
    names = dict(zip(listed, names_of(listed.values()), strict=True))
    if listed:
        modules[file] = {names[i]: pickled(thing, f"{argument}.{i}") for i, thing in listed.items()}
    return [f"{file}:{names[index]}" if index in names else thing for index, thing in enumerate(things)]


def _data(argument: str, given: Rows, stem: str) -> Data:
    if isinstance(given, str):
        values = anchored({"data": {"train": {"source": given}}}, Path())
        return Data(argument, values["data"]["train"]["source"])
    rows = dataset_rows.normalize(given, argument)
    return Data(argument, stem + dataset_rows.suffix(rows), rows)


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        with file.open("rb") as content:
            digest.update(file.name.encode() + hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()[:12]


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


# The config names an object as `FILE.py:NAME`, like any function in a file. So a notebook's functions, lambdas and
# closures run in the reward workers, a resumed run finds them, and `resolved.yaml` runs again. Reading a pickle runs
# code, as importing a `.py` file does.
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
