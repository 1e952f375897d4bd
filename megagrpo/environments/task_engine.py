"""An engine for the prompts of several tasks, some of which are conversations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from collections.abc import Generator as Stream

from megagrpo.engine.client import VllmEngine
from megagrpo.engine.http.protocol import AheadGenerator, Group
from megagrpo.engine.load_balancing import Generation, Home
from megagrpo.environments.dialogues import Dialogues
from megagrpo.types import Prompt, Rollout, SamplingParams


class TaskEngine(AheadGenerator):
    """Generates with one vLLM engine; the prompts of tasks with `dialogues` become conversations. `dialogues` are
    those of each task by its name."""

    def __init__(self, engine: VllmEngine, dialogues: Mapping[str, Dialogues | None]):
        self._engine = engine
        self._engines = {name: each.wrap(engine) if each else engine for name, each in dialogues.items()}

    @property
    def weight_version(self) -> int:
        """The weight version of the engine."""
        return self._engine.weight_version

    @weight_version.setter
    def weight_version(self, version: int) -> None:
        self._engine.weight_version = version

    def groups(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: SamplingParams,
        seed: int,
        on_begun: Callable[[], None] = lambda: None,
    ) -> Stream[Group]:
        """Generate `n` rollouts of each prompt; see `VllmEngine.groups`."""
        of_tasks = {name: engine.responses(prompts, n, sampling, seed) for name, engine in self._engines.items()}

        def respond(session: Generation, home: Home, index: int, number: int) -> Coroutine[None, None, Rollout]:
            return of_tasks[prompts[index].task](session, home, index, number)

        return self._engine.converse(prompts, n, respond, on_begun)

    def cut(self, positions: Collection[int]) -> None:
        """Truncate responses in progress to the prompts with these `Prompt.position`s."""
        for engine in self._engines.values():
            engine.cut(positions)

    def interrupt(self) -> None:
        """Make running and later calls of `groups` raise EngineInterrupted."""
        self._engine.interrupt()

    def leave_old_adapters(self) -> None:
        """Continue responses in progress with the current adapter if theirs is too old."""
        self._engine.leave_old_adapters()


def generator_of(engine: VllmEngine, dialogues: Mapping[str, Dialogues | None]) -> AheadGenerator:
    """Return the generator of a run whose tasks have these `dialogues`; a run without tasks has one, named ""."""
    if [*dialogues] != [""]:
        return TaskEngine(engine, dialogues)
    only = dialogues[""]
    return only.wrap(engine) if only else engine
