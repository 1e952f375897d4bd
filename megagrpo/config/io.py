"""Converts YAML and command-line overrides to a validated `RunConfig` and back, and reports all problems at once."""

from __future__ import annotations

import copy
import difflib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megagrpo.config.basics.paths import SHIPPED as SHIPPED
from megagrpo.config.basics.paths import anchored
from megagrpo.config.basics.paths import shipped_folder as shipped_folder
from megagrpo.config.basics.problems import ConfigError, Problem
from megagrpo.config.basics.task_values import merged
from megagrpo.config.basics.yaml_text import block_text, parse_yaml, shortened
from megagrpo.config.key_table import PLACEHOLDERS, REMOVED_KEYS, fields, fits, without_old_defaults
from megagrpo.config.overrides import apply_override
from megagrpo.config.run_config import RunConfig
from megagrpo.config.tasks import KINDS_OF_WEIGHT, NAME, of_task, task_values
from megagrpo.regular_files import open_regular
from megagrpo.suggestions import did_you_mean

PIPES = ("/dev/stdin", "/dev/fd/")  # what a shell gives a command to read, as `<(...)`
LARGEST_FILE = 10_000_000  # bytes of a YAML file
FOLDER_CONFIG = "run.yaml"  # the config of a shipped folder, which is named by the folder alone


# -------------------------------------------------------------------------------------------------------------- reading


def shipped_configs() -> Path:
    """Return the folder of the shipped configs."""
    return shipped_folder("configs")


def read_yaml(path: str | Path, _children: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return the mapping in `path`, merged over the file that its `defaults:` key names, and so on up the chain.

    `defaults:` is a path relative to the file, or `megagrpo:NAME` for a shipped config. Mappings merge key by key; a
    list or a scalar replaces what it overrides. The relative paths of each file become absolute.
    """
    path = config_file(path)
    itself = Path(os.path.realpath(path))
    if itself in _children:
        chain = " -> ".join(p.name for p in (*_children, itself))
        raise ConfigError(f"{path}: `defaults:` forms a cycle: {chain}; remove one of these keys")
    named_by = f" (named by `defaults:` in {_children[-1]})" if _children else ""
    try:
        given = not _children and str(path).startswith(PIPES)
        with path.open("rb") if given else open_regular(path) as file:
            content = file.read(LARGEST_FILE + 1)
    except OSError as error:
        hint = _shipped_hint(path) or _neighbour_hint(path) if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"{shortened(str(path))}: cannot read it: {error.strerror}{named_by}{hint}") from None
    if len(content) > LARGEST_FILE:
        raise ConfigError(f"{path}: the file has more than {LARGEST_FILE} bytes, the limit for a config{named_by}")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not a text file in UTF-8 (byte {error.start}); save it in UTF-8{named_by}"
        ) from None
    values = parse_yaml(text, str(path))
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold `section: ...` keys at the top, not a {type(values).__name__}")
    return over_defaults(values, path, (*_children, itself))


def over_defaults(values: dict[str, Any], path: Path, _children: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return `values`, read from the file `path`, merged over the file of their key `defaults:`. See `read_yaml`."""
    if "defaults" not in values:
        return anchored(values, path.parent)
    own = {key: value for key, value in values.items() if key != "defaults"}
    parent = values["defaults"]
    if not isinstance(parent, str):
        raise ConfigError(f"{path}: `defaults:` must name one file (got {shortened(repr(parent))})")
    return merged(read_yaml(_parent_file(parent, path), _children), anchored(own, path.parent))


def _parent_file(name: str, child: Path) -> Path:
    """Return the file of `defaults: name` in the file `child`. Raises ConfigError for an unknown shipped config."""
    if not name.startswith(SHIPPED):
        return child.parent / os.path.expanduser(name)
    try:
        return shipped_config(name)
    except ConfigError as error:
        raise ConfigError(f"{child}: defaults: {error}") from None


def config_file(name: str | Path) -> Path:
    """Return the file of `name`: a path, or `megagrpo:NAME`. Raises ConfigError for an unknown shipped config."""
    return shipped_config(str(name)) if str(name).startswith(SHIPPED) else Path(os.path.expanduser(name))


def shipped_config(name: str) -> Path:
    """Return the file of `megagrpo:NAME`: NAME.yaml, NAME/run.yaml, or clusters/NAME of a cluster. Raises ConfigError
    for an unknown name."""
    stem, known = name.removeprefix(SHIPPED).removesuffix(".yaml").removesuffix("/run"), shipped_names()
    known |= {f"clusters/{cluster}": path for cluster, path in shipped_clusters().items()}
    if stem not in known:
        hint = did_you_mean(stem, known, form=f"{SHIPPED}{{}}")
        raise ConfigError(f"no shipped config {name}{hint}; shipped: {', '.join(known)}")
    return known[stem]


def shipped_clusters() -> dict[str, Path]:
    """Return the shipped clusters: name -> file."""
    return {path.stem: path for path in sorted((shipped_folder("launch") / "clusters").glob("*.yaml"))}


def shipped_names() -> dict[str, Path]:
    """Return the name of every shipped config without `megagrpo:`, and its file."""
    folder = shipped_configs()
    paths = (file.relative_to(folder) for file in sorted(folder.rglob("*.yaml")))
    return {str(path.parent if path.name == FOLDER_CONFIG else path.with_suffix("")): folder / path for path in paths}


def _shipped_hint(path: Path) -> str:
    """Return a hint for a missing file with the name of a shipped config, as configs/quickstart.yaml of a clone."""
    stem = path.as_posix().rpartition("configs/")[2].removesuffix(".yaml").removesuffix("/run")
    if path.name in shipped_clusters():  # `defaults:` of a cluster
        return f"; did you mean `{SHIPPED}clusters/{path.name}`?"
    return did_you_mean(stem, shipped_names(), 0.85, f"the shipped config {SHIPPED}{{}}")


def _neighbour_hint(path: Path) -> str:
    """Return a hint with a YAML file beside the missing one, as run.yaml for run.yml or run."""
    beside = [file.name for file in path.parent.glob("*.y*ml")]
    return did_you_mean(path.name if path.suffix else f"{path.name}.yaml", beside, 0.8)


def with_task_files(values: dict[str, Any], unread: list[str]) -> dict[str, Any]:
    """Return `values` with the mappings of the files that `tasks` names. A task without a name has its file's. Files
    that cannot be read are left out, and their problems added to `unread`."""
    tasks, read = values.get("tasks"), list[Any]()
    if not isinstance(tasks, list):
        return values
    for task in tasks:
        try:
            read.append({"name": Path(task).stem} | read_yaml(task) if isinstance(task, str) else task)
        except ConfigError as error:
            unread.append(str(error))
    return values | {"tasks": read}


# ----------------------------------------------------------------------------------------------------------- validating


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the config in the YAML file `path`, or the shipped config `megagrpo:NAME`, with `key=value` overrides
    applied. Raises one ConfigError with all problems: unknown keys, invalid values, and contradicting fields."""
    return validated(read_yaml(path), overrides, path)


def validated(values: dict[str, Any], overrides: Sequence[str], origin: str | Path) -> RunConfig:
    """Apply the overrides to `values`, perhaps in place, and return the validated config. Raises the errors of
    `load_config`, which name `origin`."""
    unread, invalid_overrides = list[str](), list[str]()
    values = with_task_files(values, unread)
    for override in overrides:
        try:
            apply_override(values, override)
        except ConfigError as error:
            invalid_overrides.append(str(error))
    values = without_old_defaults(with_task_files(values, unread))
    if unread and not values["tasks"]:  # without its tasks, the run's values say little
        raise ConfigError(listed(origin, unread))
    config, problems = _checked(RunConfig, values)
    problems += _of_tasks(values, problems)
    if config is None or unread or invalid_overrides or problems:
        raise ConfigError(listed(origin, [*unread, *invalid_overrides, *problems]), problems)
    return config


def validated_as[S: BaseModel](kind: type[S], values: dict[str, Any], origin: str | Path) -> S:
    """Return `values` as a model of this kind. Raises one ConfigError that names `origin` and lists all problems."""
    model, problems = _checked(kind, values)
    if model is None:
        raise ConfigError(listed(origin, problems), problems)
    return model


def _checked[S: BaseModel](kind: type[S], values: dict[str, Any]) -> tuple[S | None, list[Problem]]:
    try:
        return kind.model_validate(values), []
    except ValidationError as error:
        return None, _problems(kind, values, error)


def _of_tasks(values: dict[str, Any], of_run: Sequence[Problem]) -> list[Problem]:
    """Return the problems of each task's config that the run's own does not have."""
    known, found = {*map(str, of_run)}, dict[str, Problem]()
    tasks = values.get("tasks")
    for number, task in enumerate(tasks if isinstance(tasks, list) else ()):
        if isinstance(task, dict):  # else the run's config names what is wrong
            problems = _checked(RunConfig, task_values(values, task))[1]
            own = [of_task(_task_name(task, number), each) for each in problems if str(each) not in known]
            found |= {str(problem): problem for problem in own}
    return list(found.values())


def _task_name(task: dict[str, Any], number: int) -> str:
    """Return the name of a task in messages: its number if it has no valid one."""
    name = task.get("name")
    return name if isinstance(name, str) and re.fullmatch(NAME, name) else str(number)


def listed(path: str | Path, problems: Sequence[object]) -> str:
    """Return the text of a ConfigError about the file `path`: the number of problems, then one line per problem."""
    return "\n  ".join([f"{path}: {len(problems)} problem(s)", *map(str, problems)])


# type of pydantic's error -> a replacement value
_EMPTY: dict[str, Any] = {"missing": "", "list_type": [], "dict_type": {}, "model_type": {}}


def _problems(kind: type[BaseModel], values: dict[str, Any], error: ValidationError) -> list[Problem]:
    """Return every invalid field, then every contradiction between valid fields."""
    known = [key for key, _ in fields(kind)]
    original, wrong = values, list[Problem]()
    for _ in range(20):  # sections are nested less deeply; each round may empty one level
        errors = error.errors(include_url=False)
        if [e["loc"] for e in errors] == [()]:  # every field is valid now: the model's cross-field check failed
            keys = [problem.keys[0] for problem in wrong]
            return wrong + [problem for problem in errors[0]["ctx"]["error"].problems if not problem.is_about(keys)]
        keys = [problem.keys[0] for problem in wrong]
        wrong += [problem for e in errors if not (problem := _problem(e, known, original)).is_about(keys)]
        values = _repaired(values, errors)
        try:
            kind.model_validate(values)
        except ValidationError as another:
            error = another
        else:
            break
    return wrong


def _repaired(values: dict[str, Any], errors: list[ErrorDetails]) -> dict[str, Any]:
    """Return a copy of `values` with invalid values removed (the default), or emptied where a value is required."""
    values = copy.deepcopy(values)
    for error in errors:
        here: Any = values
        owner: dict[Any, Any] | None = None
        name: str | int | None = None
        for part in error["loc"]:
            if isinstance(here, dict) and (part in here or error["type"] == "missing"):
                owner, name = here, part
            try:
                here = here[part]
            except (LookupError, TypeError):
                if part not in KINDS_OF_WEIGHT:
                    break
        if owner is not None and name == error["loc"][-1] and error["type"] in _EMPTY:
            unique = "_".join(map(str, error["loc"]))  # as the name of a task
            owner[name] = unique if error["type"] == "missing" else copy.copy(_EMPTY[error["type"]])
        elif owner is not None:
            owner.pop(name, None)
    return values


# Type of pydantic's error -> the violated rule; names in braces come from pydantic's context.
_RULES = {
    "int_type": "must be an integer",
    "int_parsing": "must be an integer",
    "int_parsing_size": "must be an integer of 64 bits",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be a string",
    "list_type": "must be a list",
    "dict_type": "must be a mapping of `key: value`",
    "model_type": "must be a mapping of `key: value`",
    "literal_error": "must be {expected}",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "string_pattern_mismatch": "must match the pattern {pattern}",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must have at least {min_length} characters",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
}


def _key(error: ErrorDetails, values: dict[str, Any]) -> str:
    """Return the dotted key of a pydantic error. Tasks have names in place of their numbers, and what pydantic calls
    the kind of a value is left out."""
    parts, loc, here = list[str](), error["loc"], cast(Any, values)
    for part in loc:
        name, below = str(part), None
        if isinstance(here, list) and isinstance(part, int) and part < len(here):
            below = here[part]
            if parts == ["tasks"] and isinstance(below, dict):
                name = _task_name(below, part)
        elif isinstance(here, dict) and part in here:
            below = here[part]
        elif part in KINDS_OF_WEIGHT or (part != loc[-1] and not isinstance(here, dict | list)):
            continue
        parts, here = [*parts, name], below
    return ".".join(parts)


def _problem(error: ErrorDetails, known: list[str], values: dict[str, Any]) -> Problem:
    """Return the problem of one pydantic error: the key, the violated rule, the value, and a fix if one is known."""
    loc, value = error["loc"], error["input"]
    keys = (_key(error, values),)
    if error["type"] == "extra_forbidden":
        if fix := next((fix for key, (_, fix) in REMOVED_KEYS.items() if fits(key, loc)), None):
            return Problem(keys, f"no longer a key; {fix}")
        near = nearest_key(loc, known)
        if near.startswith("tasks."):
            near = ".".join([*keys[0].split(".")[:2], *near.split(".")[2:]])
        return Problem(keys, f"unknown key; did you mean {near}?" if near else "unknown key")
    if error["type"] == "missing":
        return Problem(keys, "required, but missing; set it")
    known_rule = _RULES.get(error["type"])
    bounds = {
        name: int(b) if isinstance(b, float) and b.is_integer() else b for name, b in error.get("ctx", {}).items()
    }
    rule = known_rule.format(**bounds) if known_rule else error["msg"].removeprefix("Value error, ")
    fix = _fix(error, value)
    return Problem(keys, f"{rule} (got {'nothing' if value is None else shortened(repr(value))}){fix}")


_MEANT = {"false": ("off", "no", "none"), "true": ("on", "yes")}  # YAML 1.1 reads these choices as booleans


def _fix(error: ErrorDetails, value: Any) -> str:
    """Return how to correct a value, as the end of a message; empty if that is not known."""
    choices = _choices(error)
    if meant := [choice for choice in _MEANT.get(str(value).lower(), ()) if choice in choices]:
        return f"; did you mean '{meant[0]}', in quotes?" if isinstance(value, bool) else f"; did you mean {meant[0]}?"
    if error["type"] == "string_type" and isinstance(value, (bool, int, float)):
        return "; put it in quotes"
    if not isinstance(value, str):
        return ""
    if error["type"] == "list_type":
        return f"; write [{shortened(value)}]"
    if hint := did_you_mean(value.strip("'\""), choices, 0.6, "{}"):
        return hint
    quoted = len(value) > 1 and value[0] in "'\"" and value[0] == value[-1]
    return "; leave the quotes out" if quoted and error["type"] == "string_pattern_mismatch" else ""


def _choices(error: ErrorDetails) -> list[str]:
    """Return the valid values of a key with a fixed set of strings; empty for another error."""
    return re.findall("'([^']*)'", error["ctx"]["expected"]) if error["type"] == "literal_error" else []


def nearest_key(loc: Sequence[str | int], known: list[str]) -> str:
    """Return the nearest known key, by dotted name or last word, with `loc`'s indices and names; empty if none."""
    unknown = ".".join("N" if isinstance(part, int) else part for part in loc)
    nearest = difflib.get_close_matches(unknown, known, n=1, cutoff=0.75)
    by_leaf = {key.rpartition(".")[2]: key for key in reversed(known)}
    nearest = nearest or [by_leaf[leaf] for leaf in difflib.get_close_matches(str(loc[-1]), by_leaf, n=1, cutoff=0.75)]
    parts = nearest[0].split(".") if nearest else []
    return ".".join(str(loc[i]) if part in PLACEHOLDERS and i < len(loc) else part for i, part in enumerate(parts))


# -------------------------------------------------------------------------------------------------------------- saving


def save_resolved(config: RunConfig, folder: str | Path) -> Path:
    """Write `resolved.yaml` into `folder` and return its path. It loads back to an equal config from any folder."""
    path = Path(folder) / "resolved.yaml"
    save_config(config, path)
    return path


def save_config(config: RunConfig, path: Path) -> None:
    """Write every value as YAML that loads back to an equal config, with absolute paths from the current folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block_text(anchored(config.model_dump(), Path())), encoding="utf-8")


def as_yaml(config: BaseModel) -> str:
    """Return every value of `config` as YAML text."""
    return block_text(config.model_dump())


def flat(config: BaseModel) -> dict[str, Any]:
    """Return every value of `config` by its dotted key. Lists stay whole."""
    return _flat(config.model_dump(mode="json"), "")


def _flat(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return found
