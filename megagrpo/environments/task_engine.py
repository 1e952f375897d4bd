"""An engine for the prompts of several tasks, some of which are conversations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from collections.abc import Generator as Stream

from megagrpo.engine.client import VllmEngine
from megagrpo.engine.http.protocol import AheadGenerator, Group
from megagrpo.engine.load_balancing import Generation, Home
from megagrpo.environments.dialogues import Dialogues
from megagrpo.environments.wrapped_engine import WrappedEngine
from megagrpo.types import Prompt, Rollout, SamplingParams


class TaskEngine(WrappedEngine):
    """Generates with one vLLM engine; the prompts of tasks with `dialogues` become conversations. `dialogues` are
    those of each task by its name."""

    def __init__(self, engine: VllmEngine, dialogues: Mapping[str, Dialogues | None]):
        super().__init__(engine)
        self._engines = {name: each.wrap(engine) if each else engine for name, each in dialogues.items()}

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

        return self.engine.converse(prompts, n, respond, on_begun)

    def cut(self, positions: Collection[int]) -> None:
        """Truncate responses in progress to the prompts with these `Prompt.position`s."""
        for engine in self._engines.values():
            engine.cut(positions)


def generator_of(engine: VllmEngine, dialogues: Mapping[str, Dialogues | None]) -> AheadGenerator:
    """Return the generator of a run whose tasks have these `dialogues`; a run without tasks has one, named ""."""
    if [*dialogues] != [""]:
        return TaskEngine(engine, dialogues)
    only = dialogues[""]
    return only.wrap(engine) if only else engine
