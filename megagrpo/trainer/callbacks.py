"""Callbacks: user classes (`run.callbacks`) with methods run between steps, named as in transformers' TrainerCallback.

Methods run on rank 0. What they ask for (stop, save) and what they raise reaches every rank.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from megagrpo.config import Problem, ProblemError, RunConfig
from megagrpo.platform.parallel.agree import run_own_and_agree
from megagrpo.platform.parallel.layout import Layout
from megagrpo.platform.process import user_code
from megagrpo.platform.process.terminal import warn

CALLBACKS_KEY = "run.callbacks"
EVENTS = ("on_train_begin", "on_step_begin", "on_step_end", "on_log", "on_evaluate", "on_save", "on_train_end")
EVENT_ARGUMENTS = {"on_log": "logs", "on_evaluate": "metrics"}  # keyword arguments, as transformers passes them
METHOD_PARAMETERS = "a method takes (self, config, state, control, **kwargs): docs/callbacks.md"


@dataclass(frozen=True)
class CallbackState:
    """The progress of a run as its callbacks see it."""

    step: int  # finished steps
    max_steps: int
    # of the last step; in on_evaluate of the evaluation
    metrics: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    checkpoint: Path | None = None  # the newest one that the run wrote, or started from

    @property
    def global_step(self) -> int:
        """`step` under transformers' name."""
        return self.step


@dataclass
class CallbackControl:
    """What callbacks ask for; a method sets an attribute to True. The run reads it after each method."""

    should_training_stop: bool = False  # end the run after this step, with a checkpoint
    should_save: bool = False  # write a checkpoint after this step


class CallbackError(RuntimeError):
    """A callback raised. Raised on rank 0, which has printed the traceback; others raise a RankError that names it."""


class Callbacks:
    """The callbacks of a run. Every method is collective, but without callbacks each returns at once.

    `instances` are on rank 0. `control` has what they have asked for, and is equal on all ranks.
    """

    def __init__(self, config: RunConfig, layout: Layout, instances: Sequence[Any] | None = None):
        self._config, self._layout, self._instances = config, layout, instances or ()
        self._state, self.control = CallbackState(0, config.run.num_steps), CallbackControl()

    def train_begin(self, step: int, checkpoint: Path | None = None) -> None:
        """Report the start of the loop after `step` finished steps, from `checkpoint` if the run resumes."""
        self._state = replace(self._state, step=step, checkpoint=checkpoint)
        self._call("on_train_begin")

    def step_begin(self) -> None:
        """Report that a step begins. A request for a checkpoint of an earlier step is over."""
        self.control.should_save = False
        self._call("on_step_begin")

    def step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report that step `step` is finished and that its metrics are written."""
        self._state = replace(self._state, step=step, metrics=MappingProxyType(dict(metrics)))
        self._call("on_step_end")
        self._call("on_log", metrics)

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Report an evaluation."""
        of_step = self._state
        self._state = replace(of_step, metrics=MappingProxyType(dict(metrics)))
        self._call("on_evaluate", metrics)
        self._state = of_step

    def saved(self, checkpoint: Path) -> None:
        """Report a complete checkpoint."""
        self._state = replace(self._state, checkpoint=checkpoint)
        self._call("on_save")

    def train_end(self) -> None:
        """Report the end of the loop, after the last checkpoint; also when a signal or the time limit ended it."""
        self._call("on_train_end")

    def _call(self, event: str, metrics: Mapping[str, float] | None = None) -> None:
        """Run `event` on rank 0 and take its requests on all ranks. Raises CallbackError there, RankError elsewhere."""
        if self._config.run.callbacks:
            first = self._layout.world_rank == 0
            run_own_and_agree(self._layout, lambda: self._run(event, dict(metrics or {})) if first else None)
            asked = [self.control.should_training_stop, self.control.should_save] if first else [False, False]
            flags = self._layout.all_reduce(torch.tensor(asked, dtype=torch.int64), "max").tolist()
            self.control = CallbackControl(*map(bool, flags))

    def _run(self, event: str, metrics: dict[str, float]) -> None:
        for name, instance in zip(self._config.run.callbacks, self._instances, strict=True):
            method = getattr(instance, event, None)
            if method is None:
                continue
            try:
                method(self._config, self._state, self.control, **_accepted(method, event, metrics))
            except Exception as error:
                own_frames = error.__traceback__ and error.__traceback__.tb_next
                warn("".join(traceback.format_exception(error.with_traceback(own_frames))).rstrip())
                raise CallbackError(
                    f"{CALLBACKS_KEY}: `{name}`: {event} raised {user_code.described(error)} after {self._state.step} "
                    "finished steps; correct the callback and continue with --resume"
                ) from error


def load_callbacks(names: Sequence[str]) -> list[Any]:
    """Return one instance of each class in `run.callbacks`. Raises ProblemError with every class that is unusable."""
    instances, problems = [], []
    for index, name in enumerate(names):
        try:
            instances.append(_instance(name))
        except (TypeError, ValueError) as error:
            problems.append(Problem((f"{CALLBACKS_KEY}.{index}",), f"`{name}` {error}"))
    if problems:
        raise ProblemError(*problems)
    return instances


def _instance(name: str) -> Any:
    """Return an instance of the class `name`. Raises ValueError with the rule that it breaks."""
    made = user_code.load_named(name)
    try:
        made = made() if isinstance(made, type) else made
    except Exception as error:
        raise ValueError(f"cannot be loaded: {user_code.described(error)}; correct the file or the name") from error
    if inspect.isfunction(made):
        raise ValueError("is a function, not a class; name a class with methods such as on_step_end")
    own = {event: getattr(made, event) for event in dir(made) if event.startswith("on_") and _is_own(type(made), event)}
    if unknown := [event for event in own if event not in EVENTS]:
        raise ValueError(f"defines {unknown[0]}, which a run never calls; it calls {', '.join(EVENTS)}")
    if not own:
        raise ValueError(f"defines no method that a run calls: {', '.join(EVENTS)}")
    for event, method in own.items():
        try:
            inspect.signature(method).bind(None, None, None, **_accepted(method, event, {}))
        except TypeError as error:
            raise ValueError(f"cannot be called: {event}: {error}; {METHOD_PARAMETERS}") from None
    return made


def _is_own(cls: type, name: str) -> bool:
    """Whether the user defined the method `name`; the methods of transformers' own class do nothing."""
    return not next((base.__module__ for base in cls.__mro__ if name in vars(base)), "").startswith("transformers.")


def _accepted(method: Callable[..., Any], event: str, metrics: dict[str, float]) -> dict[str, dict[str, float]]:
    """Return the metrics as the keyword argument of the event, if it has one that the method takes."""
    name, parameters = EVENT_ARGUMENTS.get(event), inspect.signature(method).parameters
    if name is None or not (name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())):
        return {}
    return {name: metrics}
