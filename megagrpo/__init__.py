"""GRPO for language models: `megagrpo.train` from Python, `megagrpo train` from the command line (docs/python.md).

Importing this package takes milliseconds: each public name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megagrpo.commands.api.evaluate_call import Evaluation as Evaluation
    from megagrpo.commands.api.evaluate_call import evaluate as evaluate
    from megagrpo.commands.api.inputs.errors import CommandFailed as CommandFailed
    from megagrpo.commands.api.inputs.errors import TrainingFailed as TrainingFailed
    from megagrpo.commands.api.plan_call import plan as plan
    from megagrpo.commands.api.run_handle import Run as Run
    from megagrpo.commands.api.run_handle import load_run as load_run
    from megagrpo.commands.api.train_call import train as train
    from megagrpo.config import ConfigError as ConfigError
    from megagrpo.config import Problem as Problem
    from megagrpo.config import RunConfig as RunConfig
    from megagrpo.config import load_config as load_config
    from megagrpo.weights.hub.upload import PushError as PushError

    __version__: str

_HOMES = {
    "train": "megagrpo.commands.api.train_call",
    "Run": "megagrpo.commands.api.run_handle",
    "load_run": "megagrpo.commands.api.run_handle",
    "plan": "megagrpo.commands.api.plan_call",
    "evaluate": "megagrpo.commands.api.evaluate_call",
    "Evaluation": "megagrpo.commands.api.evaluate_call",
    "TrainingFailed": "megagrpo.commands.api.inputs.errors",
    "CommandFailed": "megagrpo.commands.api.inputs.errors",
    "RunConfig": "megagrpo.config",
    "load_config": "megagrpo.config",
    "ConfigError": "megagrpo.config",
    "Problem": "megagrpo.config",
    "PushError": "megagrpo.weights.hub.upload",
}  # public name -> module that defines it

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("megagrpo")
        except PackageNotFoundError:  # a clone that is not installed
            return "unknown"
    if name not in _HOMES:
        raise AttributeError(f"module 'megagrpo' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
