"""An engine that loses its weights during generation gets them again from all ranks, and the request is retried. A dead
engine ends the step on every rank."""

from types import SimpleNamespace

import pytest

from megagrpo.engine.protocol import EngineDeadError, EngineStarved
from megagrpo.platform.process.phases import Phases
from megagrpo.trainer.rollout.collector import Collector, NoRollouts, StopRequested
from megagrpo.types import Prompt, SamplingParams
from tests.rank_fakes import OneRank

PROMPTS = [Prompt(i, (1, 2), "") for i in range(3)]


class Response(str):
    """A response that equals its text."""

    response_ids = (1,)


class Starving:
    """An engine that has weights only after a refill."""

    def __init__(self):
        self.filled, self.asked = False, []

    def groups(self, prompts, n, sampling, seed):
        self.asked.append(([prompt.prompt_id for prompt in prompts], n, seed))
        for place in range(len(prompts)):
            yield place, [Response(f"response {len(self.asked)}")] * n
        if not self.filled:
            raise EngineStarved("http://a: none has weight version 3")

    def interrupt(self):
        pass


class Scoring:
    """Counts the groups that are no longer to be scored."""

    dropped = 0

    def begin(self, step):
        groups = []
        return SimpleNamespace(
            add=lambda place, group: groups.extend(group), finish=lambda: groups, counters=dict, drop=self.drop
        )

    def drop(self):
        self.dropped += 1


@pytest.fixture
def collector():
    alone = SimpleNamespace(dp_rank=0, dp_size=1, is_dp_leader=True)
    for name in ("world_rank", "world_size", "all_gather_objects", "all_reduce", "broadcast_object"):
        setattr(alone, name, getattr(OneRank(), name))
    return Collector(alone, Starving(), Scoring(), Phases())


def test_it_is_filled_and_asked_for_the_same_again(collector):
    engine, refills = collector.engine, []

    def refill():
        refills.append(len(engine.asked))
        engine.filled = True

    collector.refill = refill
    scored, _ = collector.collect(PROMPTS, 4, SamplingParams(1.0, 8), seed=5)
    assert refills == [1] and engine.asked == [([0, 1, 2], 4, 5)] * 2
    assert scored == ["response 2"] * 12  # what came before the refill does not count
    assert collector.rewards.dropped == 3


def test_a_request_to_stop_comes_first(collector):
    collector.stop(15)
    with pytest.raises(StopRequested):
        collector.collect(PROMPTS, 4, SamplingParams(1.0, 8), seed=5)
    assert collector.engine.asked == []  # the engine may lack the current weights


@pytest.mark.parametrize(("rank", "told"), [(0, "^nobody answers$"), (1, "^rank 1: nobody answers$")])
def test_an_engine_that_is_dead_on_one_rank_ends_the_step_on_all_and_the_rank_is_named(rank, told, collector):
    collector.engine.filled = True
    dead = EngineDeadError("nobody answers")
    collector.layout.all_gather_objects = lambda mine: [dead, mine] if rank == 0 else [mine, dead]
    collector.stop_requested = lambda: 0
    with pytest.raises(NoRollouts, match=told):
        collector.collect(PROMPTS, 4, SamplingParams(1.0, 8), seed=5)
