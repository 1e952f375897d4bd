"""Writes a run's Python objects (reward functions, callbacks, data) into its folder, for config values to name."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megagrpo.commands.api.inputs import dataset_rows, objects
from megagrpo.commands.api.inputs.dataset_rows import Rows
from megagrpo.config import ConfigError, RunConfig, evaluation_sets, override_text
from megagrpo.config.basics.paths import anchored
from megagrpo.config.basics.yaml_text import shortened
from megagrpo.platform.process.cleanup.removal import remove
from megagrpo.records.checkpoints.run_files import FROM_PYTHON, make_run_folder

type Reward = str | Callable[..., Any] | Mapping[str, Any]
"""A reward function, its name for `rewards.functions.N.function`, or a mapping of `function` and keys like `weight`."""

# their folder is in sys.path: names that no module of a user has
REWARDS, CALLBACKS = "megagrpo_rewards.py", "megagrpo_callbacks.py"


@dataclass(frozen=True)
class Data:
    """A data set of the caller: the config's key, the argument's name, the rows, and the file's name; or the name of a
    source."""

    key: str
    argument: str
    rows: Any
    file: str

    @property
    def named(self) -> bool:
        """Whether the argument names a source."""
        return isinstance(self.rows, str)


@dataclass(frozen=True)
class Pickles:
    """The Python objects among the elements of a list: index -> name, and name -> pickle."""

    names: dict[int, str]
    pickles: dict[str, bytes]


@dataclass(frozen=True)
class Inputs:
    """The Python objects of a run, checked, and not written yet."""

    # sections of `rewards.functions`, those of `rewards` without the key `function`
    functions: list[dict[str, Any]] | None
    rewards: Pickles
    callbacks: list[str]  # names as in `run.callbacks`; empty for those of `callback_objects`
    callback_objects: Pickles
    instances: list[str]  # names of callbacks that are objects, not classes
    data: list[Data]

    @property
    def to_write(self) -> bool:
        """Whether there is anything to write."""
        return bool(self.rewards.names or self.callback_objects.names or any(not data.named for data in self.data))

    def overrides(self, folder: Path, callbacks: Sequence[str] | None = None) -> list[str]:
        """Return the overrides that name these objects as files in `folder`. With the config's `callbacks` also
        `run.callbacks`: the config's, then these."""
        made: dict[str, Any] = {}
        if self.functions is not None:
            files = {i: {"function": f"{folder / REWARDS}:{name}"} for i, name in self.rewards.names.items()}
            made["rewards.functions"] = [files.get(i, {}) | section for i, section in enumerate(self.functions)]
        if self.callbacks and callbacks is not None:
            names = self.callback_objects.names
            named = [f"{folder / CALLBACKS}:{names[i]}" if i in names else c for i, c in enumerate(self.callbacks)]
            made["run.callbacks"] = [*callbacks, *named]
        made |= {data.key: {"source": data.rows if data.named else str(folder / data.file)} for data in self.data}
        return [override_text(key, value) for key, value in made.items()]

    def check_rows(self, config: RunConfig) -> None:
        """Raise ConfigError when rows lack the config's prompt column."""
        sets = evaluation_sets(config)
        columns = {f"evaluation.sets.{name}" if name else "data.eval": sets[name].prompt_column for name in sets}
        for data in self.data:
            if not data.named:
                dataset_rows.check(data.rows, data.argument, columns.get(data.key, config.data.prompt_column))

    def write(self, run_folder: Path) -> Path:
        """Write the objects into a folder of the run, named after their content, and return it. Raises ConfigError."""
        above = from_python_folder(run_folder)
        try:
            partial = Path(tempfile.mkdtemp(prefix=".partial_", dir=above))
            try:
                self._write_files(partial)
                folder = above / _digest(partial)
                if not folder.exists():
                    partial.rename(folder)
                    folder.chmod(above.stat().st_mode & 0o777)  # as the umask says, unlike mkdtemp
            finally:
                remove(partial)
        except OSError as error:
            raise _unwritable(above, error) from error
        return folder

    def _write_files(self, folder: Path) -> None:
        if self.rewards.names:
            title = "Reward functions that megagrpo.train got as Python objects"
            objects.write_module(folder / REWARDS, title, self.rewards.pickles)
        if self.callback_objects.names:
            title = "Callbacks that megagrpo.train got as Python objects"
            objects.write_module(folder / CALLBACKS, title, self.callback_objects.pickles, self.instances)
        for data in self.data:
            if not data.named:
                dataset_rows.write(data.rows, folder / data.file, data.argument)


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
    functions, rewards = (None, Pickles({}, {})) if reward_functions is None else _rewards(reward_functions)
    named, pickles, instances = _callbacks(callbacks or ())
    return Inputs(functions, rewards, named, pickles, instances, list(_data(dataset, eval_dataset)))


def _rewards(given: Reward | Sequence[Reward]) -> tuple[list[dict[str, Any]], Pickles]:
    sections: list[dict[str, Any]] = []
    for i, reward in enumerate(_listed(given)):
        section = dict(reward) if isinstance(reward, Mapping) else {"function": reward}
        function = section.get("function")
        if not isinstance(function, str) and not callable(function):
            reason = "must be a function, a name such as accuracy, or a mapping with the key `function`"
            raise ConfigError(f"reward_functions.{i}: {reason} (got {shortened(repr(reward))})")
        sections.append(section)
    by_index = {i: each.pop("function") for i, each in enumerate(sections) if not isinstance(each["function"], str)}
    anchored({"rewards": {"functions": sections}}, Path())  # changes them in place
    return sections, _pickled(by_index, "reward_functions")


def _callbacks(given: Any) -> tuple[list[str], Pickles, list[str]]:
    listed = _listed(given)
    by_index = {i: callback for i, callback in enumerate(listed) if not isinstance(callback, str)}
    named = ["" if i in by_index else callback for i, callback in enumerate(listed)]
    anchored({"run": {"callbacks": named}}, Path())  # changes them in place
    pickles = _pickled(by_index, "callbacks")
    return named, pickles, [pickles.names[i] for i, callback in by_index.items() if not isinstance(callback, type)]


def _listed(given: Any) -> list[Any]:
    """Return an argument that is one object or several as a list."""
    one = isinstance(given, (str, Mapping)) or callable(given) or not isinstance(given, Iterable)
    return [given] if one else list(given)


def _pickled(by_index: Mapping[int, Any], argument: str) -> Pickles:
    names = dict(zip(by_index, objects.names_of(list(by_index.values())), strict=True))
    keys = {name: f"{argument}.{i}" for i, name in names.items()}
    return Pickles(names, objects.pickled({names[i]: thing for i, thing in by_index.items()}, keys))


def _data(dataset: Rows | None, eval_dataset: Rows | Mapping[str, Rows] | None) -> Iterator[Data]:
    if dataset is not None:
        yield _one("data.train", "dataset", dataset, "train")
    if isinstance(eval_dataset, Mapping):
        for name, held_out in eval_dataset.items():
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", str(name)):
                raise ConfigError(
                    f"eval_dataset: {shortened(repr(name))} is no name of a set; use letters, digits, _ and -"
                )
            yield _one(f"evaluation.sets.{name}", f"eval_dataset.{name}", held_out, f"eval_{name}")
    elif eval_dataset is not None:
        yield _one("data.eval", "eval_dataset", eval_dataset, "eval")


def _one(key: str, argument: str, given: Rows, stem: str) -> Data:
    if isinstance(given, str):
        values = anchored({"data": {"train": {"source": given}}}, Path())
        return Data(key, argument, values["data"]["train"]["source"], "")
    rows = dataset_rows.normalize(given, argument)
    return Data(key, argument, rows, stem + dataset_rows.suffix(rows))


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        with file.open("rb") as content:
            digest.update(file.name.encode() + hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()[:12]
