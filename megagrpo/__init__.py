"""GRPO for language models: `megagrpo.train` from Python, `megagrpo train` from the command line (docs/python.md).

Importing this package takes milliseconds: each public name is imported when it is first used.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megagrpo.api.checks import Evaluation as Evaluation
    from megagrpo.api.checks import Verification as Verification
    from megagrpo.api.checks import evaluate as evaluate
    from megagrpo.api.checks import plan as plan
    from megagrpo.api.checks import verify as verify
    from megagrpo.api.errors import CommandFailed as CommandFailed
    from megagrpo.api.errors import TrainingFailed as TrainingFailed
    from megagrpo.api.run import Run as Run
    from megagrpo.api.run import load_run as load_run
    from megagrpo.api.training import train as train
    from megagrpo.config import ConfigError as ConfigError
    from megagrpo.config import Problem as Problem
    from megagrpo.config import RunConfig as RunConfig
    from megagrpo.config import load_config as load_config
    from megagrpo.hub.upload import PushError as PushError

    __version__: str

_HOMES = {
    "train": "megagrpo.api.training",
    "Run": "megagrpo.api.run",
    "load_run": "megagrpo.api.run",
    "plan": "megagrpo.api.checks",
    "verify": "megagrpo.api.checks",
    "Verification": "megagrpo.api.checks",
    "evaluate": "megagrpo.api.checks",
    "Evaluation": "megagrpo.api.checks",
    "TrainingFailed": "megagrpo.api.errors",
    "CommandFailed": "megagrpo.api.errors",
    "RunConfig": "megagrpo.config",
    "load_config": "megagrpo.config",
    "ConfigError": "megagrpo.config",
    "Problem": "megagrpo.config",
    "PushError": "megagrpo.hub.upload",
}  # public name -> module that defines it

__all__ = [
    "CommandFailed",
    "ConfigError",
    "Evaluation",
    "Problem",
    "PushError",
    "Run",
    "RunConfig",
    "TrainingFailed",
    "Verification",
    "__version__",
    "evaluate",
    "load_config",
    "load_run",
    "plan",
    "train",
    "verify",
]


class _Package(ModuleType):
    """This package as a module whose public names are imported at first use.

    Two public functions, `plan` and `verify`, have the name of a subpackage. Python sets the attribute to the subpackage when that is
    imported; here it stays the function.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            from importlib.metadata import PackageNotFoundError, version

            try:
                return version("megagrpo")
            except PackageNotFoundError:  # a clone that is not installed
                return "unknown"
        if name not in _HOMES:
            raise AttributeError(f"module 'megagrpo' has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOMES[name]), name)
        setattr(self, name, value)
        return value

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return importlib.import_module, ("megagrpo",)  # a notebook's function that names this package is pickled with it

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
