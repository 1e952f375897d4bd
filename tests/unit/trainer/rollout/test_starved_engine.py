"""An engine that loses its weights during generation gets them again from all ranks, and the request is retried. A dead
engine ends the step on every rank."""

from types import SimpleNamespace

import pytest
from ranks import run_ranks

from megagrpo.config import ParallelSection
from megagrpo.engine.http.protocol import EngineDeadError, EngineStarved
from megagrpo.platform.parallel.layout import Layout, init_layout
from megagrpo.platform.process.phases import Phases
from megagrpo.trainer.rollout.collector import Collector, StopRequested
from megagrpo.types import Prompt, Rollout, SamplingParams, ScoredRollout

PROMPTS = [Prompt(i, (1, 2), "") for i in range(3)]


def rollout(prompt: Prompt, text: str) -> Rollout:
    return Rollout(prompt, (1,), (-1.0,), "stop", 0, text)


class Starving:
    """An engine that has weights only after a refill."""

    def __init__(self):
        self.filled, self.asked = False, []

    def groups(self, prompts, n, sampling, seed):
        self.asked.append(([prompt.prompt_id for prompt in prompts], n, seed))
        for place in range(len(prompts)):
            yield place, [rollout(prompts[place], f"response {len(self.asked)}")] * n
        if not self.filled:
            raise EngineStarved("http://a: none has weight version 3")

    def interrupt(self):
        pass


class Scoring:
    """Counts the groups that are no longer to be scored."""

    dropped = 0

    def begin(self, step, task=""):
        groups = []
        return SimpleNamespace(
            add=lambda place, group: groups.extend(ScoredRollout(rollout, {}, 0.0) for rollout in group),
            finish=lambda: groups,
            counters=dict,
            drop=self.drop,
        )

    def drop(self):
        self.dropped += 1


def collector(layout: Layout) -> Collector:
    """The rank's collector. Engines and rewards are on the first rank of each replica."""
    return Collector(layout, Starving(), Scoring(), Phases())


def filled_again() -> list[str]:
    made = collector(init_layout(ParallelSection()))
    engine, refills = made.engine, []

    def refill():
        refills.append(len(engine.asked))
        engine.filled = True

    made.refill = refill
    engine.filled = made.layout.dp_rank == 1  # one engine of two has lost its weights
    samples, _ = made.collect(PROMPTS, 4, SamplingParams(1.0, 8), seed=5)
    own = [PROMPTS[:1], PROMPTS[1:]][made.layout.dp_rank] if made.layout.dp_size == 2 else PROMPTS
    # a replica whose engine had weights keeps its rollouts: an AsyncPool hands its groups out once
    times = 1 if made.layout.dp_rank == 1 else 2
    assert refills == [1] and engine.asked == [([prompt.prompt_id for prompt in own], 4, 5)] * times
    assert made.rewards.dropped == (0 if made.layout.dp_rank else len(own)) and len(samples) == 12
    return [s.rollout.text for s in samples.own.values()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_is_filled_and_asked_for_the_same_again(ranks):
    starved, *fed = run_ranks(filled_again, ranks)
    # what came before the refill does not count
    assert starved == ["response 2"] * (12 // ranks - 2 * (ranks - 1)) and fed == [["response 1"] * 8] * (ranks - 1)


def stopped() -> int:
    made = collector(init_layout(ParallelSection()))
    if made.layout.world_rank == 1:
        made.stop(15)
    with pytest.raises(StopRequested) as stop:
        made.collect(PROMPTS, 4, SamplingParams(1.0, 8), seed=5)
    assert made.engine.asked == []  # the engine may lack the current weights
    return stop.value.number


def test_a_request_to_stop_comes_first():
    assert run_ranks(stopped, 2) == [15, 15]


def dead(error: Exception) -> str:
    made = collector(init_layout(ParallelSection()))
    made.engine.filled = True
    if made.layout.world_rank == 1:
        made.engine.groups = lambda *_: (_ for _ in ()).throw(error)
    try:
        made.collect(PROMPTS, 4, SamplingParams(1.0, 8), seed=5)
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    return "no error"


def test_an_engine_that_is_dead_on_one_rank_ends_the_step_on_all_and_the_rank_is_named():
    told = run_ranks(dead, 2, EngineDeadError("nobody answers"))
    assert told == ["NoRollouts: rank 1: nobody answers", "NoRollouts: nobody answers"]


def test_another_error_of_one_rank_is_raised_on_all():
    told = run_ranks(dead, 2, KeyError("place"))
    assert told == ["RankError: rank 1: KeyError: 'place'", "KeyError: 'place'"]
