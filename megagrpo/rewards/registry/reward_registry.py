"""Converts a reward function's config name to its import location. Imports nothing: workers load the functions."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megagrpo.config.basics.problems import Problem, ProblemError
from megagrpo.config.sections.placement import address_fault
from megagrpo.config.sections.rewards import LOADED_MODEL, SERVER
from megagrpo.rewards.registry.target import BUILT_IN_REWARDS, JUDGES, WHOLE_GROUP, Target
from megagrpo.suggestions import did_you_mean

REWARD_MODEL = "megagrpo.rewards.functions.reward_model:RewardModel"
SERVED_REWARD = "megagrpo.rewards.functions.served:ServedReward"
_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_FILE_PATH = re.compile(r".+\.py:[A-Za-z_]\w*")
# built in before -> what to write
FORMER_REWARDS = {
    name: f"is in an example's file; write configs/examples/gsm8k_xml/rewards.py:{name.replace('int', 'whole_number')}"
    for name in ("xmlcount", "soft_format", "strict_format", "int", "correctness")
} | {
    "llm_judge": "is gone; write `function: rubric` with args.criteria beside url and model (docs/judges.md), or read "
    "a number from the judge's text as configs/examples/llm_judge/score.py does"
}


def resolve(function: str, key: str = "rewards.functions") -> Target:
    """Return the location of `function`, the value of the config's `key`.

    Raises ProblemError for an unknown name, with the known ones, for an invalid URL, and for a file that is missing.
    """
    if function.startswith(LOADED_MODEL):
        preset = (("path", _model_path(function.removeprefix(LOADED_MODEL), key)),)
        return Target(*_split(REWARD_MODEL), preset=preset, heavy=True, independent=True)
    if function.startswith(SERVER):
        if why := address_fault(function):
            raise ProblemError(Problem((key,), f"`{function}` {why}; write it as http://HOST:PORT/PATH"))
        return Target(*_split(SERVED_REWARD), preset=(("url", function),))
    if function in FORMER_REWARDS:
        raise ProblemError(Problem((key,), f"`{function}` {FORMER_REWARDS[function]}"))
    own = "package.module:function, path/file.py:function; models: model:PATH or http://..."
    target = locate(function, key, "reward function", BUILT_IN_REWARDS, own)
    return replace(target, independent=function in BUILT_IN_REWARDS.keys() - WHOLE_GROUP)


def asks_service(function: str) -> bool:
    """Whether a built-in reward function sends responses to a server: an LLM judge or a reward server."""
    return function in JUDGES or function.startswith(SERVER)


def locate(
    name: str,
    key: str,
    kind: str,
    built_in: Mapping[str, str],
    own: str = "package.module:name or path/file.py:name",
) -> Target:
    """Return the location of a plug-in of some `kind`, such as a tool: a name of `built_in`, or one that a user writes
    as `own` says. Raises ProblemError for an unknown name and a missing file."""
    if _FILE_PATH.fullmatch(name):
        path, attribute = name.rsplit(":", 1)
        return Target(str(find_file(path, key)), attribute)
    dotted = built_in.get(name, name)
    if not _IMPORT_PATH.fullmatch(dotted):
        known = f"known: {', '.join(built_in)}; your own: " if built_in else "give it as "
        text = f"`{name}` is not a known {kind}{did_you_mean(name, built_in)}; {known}{own}"
        raise ProblemError(Problem((key,), text))
    return Target(*_split(dotted))


def undefined(target: Target, key: str) -> list[Problem]:
    """Return the problem of a name that the file of `target`, the value of the config's `key`, does not define.

    The file is parsed, not run, so the names of a star import remain unknown.
    """
    if not target.location.endswith(".py"):
        return []
    try:
        body = list(ast.walk(ast.parse(Path(target.location).read_bytes())))
    except SyntaxError as error:
        return [Problem((key,), f"{target.location}, line {error.lineno}: not valid Python: {error.msg}")]
    except (OSError, ValueError):
        return []  # the run reports the error
    defined = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    names = set(defined) | {node.id for node in body if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    imports = (node for node in body if isinstance(node, ast.Import | ast.ImportFrom))
    names |= {alias.asname or alias.name for node in imports for alias in node.names}
    if target.attribute in names or "*" in names:
        return []
    hint = did_you_mean(target.attribute, names)
    said = f"{target.location} defines no `{target.attribute}`{hint}; it defines {', '.join(defined) or 'nothing'}"
    return [Problem((key,), said)]


def unknown_arguments(name: str, target: Target, args: Iterable[str], key: str) -> list[Problem]:
    """Return a problem for each of `args` that the built-in reward function `name` does not take. Its file is parsed,
    not run: some of them import torch. `check` and a run ask the functions of users too."""
    module = target.location.removeprefix("megagrpo.rewards.functions.")
    if module == target.location:
        return []
    body = ast.parse((Path(__file__).parents[1] / "functions" / f"{module}.py").read_bytes()).body
    (found,) = (node for node in body if getattr(node, "name", None) == target.attribute)
    if isinstance(found, ast.ClassDef):  # a dataclass, and its bases in this file
        named = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
        classes = [*(named[ast.unparse(base)] for base in found.bases), found]
        nodes = [node for one in classes for node in one.body]
        fields = [node for node in nodes if isinstance(node, ast.AnnAssign) and "init=False" not in ast.unparse(node)]
        names, is_open = [ast.unparse(node.target) for node in fields], False
    else:
        takes = found.args  # type: ignore[attr-defined]
        names, is_open = [arg.arg for arg in (*takes.args, *takes.kwonlyargs)], takes.kwarg is not None
    options = [name for name in names if name not in dict(target.preset)]
    return [
        Problem((f"{key}.{arg}",), no_such_argument(name, arg, options))
        for arg in args
        if arg not in options and not is_open
    ]


def no_such_argument(function: str, name: str, options: Sequence[str]) -> str:
    """Return the text for an argument that a reward function does not take."""
    return f"`{function}` has no such argument{did_you_mean(name, options)}; it takes {', '.join(options)}"


def find_file(path: str, key: str) -> Path:
    """Return the resolved path of a file. Raises ProblemError, with the config's `key`, when it does not exist."""
    file = Path(os.path.expanduser(path))
    if not file.is_file():
        raise ProblemError(Problem((key,), f"no file {file.absolute()}"))
    return file.resolve()


def _model_path(path: str, key: str) -> str:
    """Return the resolved path of a model folder; other names are returned unchanged, as models on the hub. Raises
    ProblemError for a path that is not a folder."""
    folder = Path(os.path.expanduser(path))
    if folder.is_dir():
        return str(folder.resolve())
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ProblemError(Problem((key,), f"`{LOADED_MODEL}{path}`: no folder {path}"))
    return path


def _split(dotted: str) -> tuple[str, str]:
    module, _, attribute = dotted.partition(":")
    return module, attribute
