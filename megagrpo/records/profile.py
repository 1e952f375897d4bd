"""Profiles single steps (`run.profile`): a torch profiler trace, ranges for Nsight Systems, or a GPU memory snapshot.

A step's phases are ranges in the profile: `Phases.mark` is `Profiler.mark`. docs/profiling.md explains the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from megagrpo.config import Problem, ProblemError, ProfileSection
from megagrpo.platform.device.profile_recorders import RECORDERS


def check_profile(profile: ProfileSection, has_gpu: bool) -> None:
    """Raise ProblemError when this machine cannot make the profile."""
    if profile.steps and profile.tool != "torch" and not has_gpu:
        raise ProblemError(
            Problem(("run.profile.tool",), f"{profile.tool} needs a GPU, and this machine has none; set it to torch")
        )


class Profiler:
    """Profiles this rank's part of the steps that `run.profile` names. `say` prints a line for the user."""

    def __init__(self, profile: ProfileSection, run_folder: Path, rank: int, say: Callable[[str], None]):
        self._profile, self._rank, self._say = profile, rank, say
        self._folder = run_folder / "profile"
        self._runs = False

    def mark(self, name: str) -> AbstractContextManager[object]:
        """Return a context that names a range in the profile; it does nothing outside of profiled steps."""
        if not self._runs:
            return nullcontext()
        return RECORDERS[self._profile.tool].mark(name)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Profile the step inside the context, if it is one of `run.profile.steps`. An error inside leaves no files."""
        if step not in self._profile.steps or (self._profile.ranks and self._rank not in self._profile.ranks):
            yield
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        recorder, stem = RECORDERS[self._profile.tool], self._folder / f"step_{step:06d}_rank_{self._rank}"
        with recorder.record(stem) as path:
            self._runs = True
            try:
                with self.mark(f"step {step}"):
                    yield
            finally:
                self._runs = False
        if path is not None:
            self._say(f"profile of step {step}: {path.relative_to(self._folder.parent)}")
