"""The routes on a rank's device are those that the plan counts, for samples of full length."""

import pytest
from ranks import run_ranks
from suites import usual
from tiny_policy import few_samples, tiny_model, tiny_run

from megagrpo.config import RunConfig
from megagrpo.planner.costs.planned_memory import stage_memory
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.proof.verify.verified_step import prepare


def config(parallel: dict, replay: str) -> RunConfig:
    made = tiny_run(parallel)
    algorithm = made.algorithm.model_copy(update=dict(steps_per_generation=2))
    rollout = made.rollout.model_copy(update=dict(routing_replay=replay))
    return made.model_copy(update=dict(algorithm=algorithm, rollout=rollout))


def recorded(settings: RunConfig) -> tuple[int, int, int]:
    """Bytes of the routes on this rank, the tokens of its replica's micro-batches, and its pipeline stage."""
    layout = init_layout(settings.parallel)
    _, batch, _ = prepare(settings, tiny_model("qwen3_moe"), layout, few_samples())
    held = sum(m.routes.nbytes for m in batch.micro_batches if m.routes is not None)
    layout.close()
    return held, sum(m.num_tokens for m in batch.micro_batches), layout.pp_rank


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    usual([(2, dict(pp=2)), (2, dict(tp=2, sequence_parallel=True, ep=2, etp=1)), (4, dict(cp=2, ep=2))], 1),
    ids=str,
)
def test_recorded_routes_take_the_planned_bytes(ranks, parallel):
    settings, model = config(parallel, "trainer"), tiny_model("qwen3_moe")
    dp = ranks // settings.parallel.model_parallel_size
    for held, tokens, stage in run_ranks(recorded, ranks, settings):
        planned = stage_memory(settings, model, dp)[stage]
        assert planned["train"]["routes"] == planned["logprobs"]["routes"] and "routes" not in planned["sync"]
        r = settings.rollout
        full = r.prompts_per_step * r.num_generations * settings.max_model_len / dp
        assert held > 0 and planned["train"]["routes"] * 2**30 == pytest.approx(held * full / tokens)


def test_routes_of_the_engine_are_on_a_gpu_for_one_optimizer_step():
    model, parallel = tiny_model("qwen3_moe"), dict(pp=2)
    trainer, engine = (stage_memory(config(parallel, kind), model, 1)[0]["train"] for kind in ("trainer", "engine"))
    assert engine["routes"] == trainer["routes"] / 2 > 0
    assert "routes" not in stage_memory(config(parallel, "engine"), model, 1, gpu=False)[0]["train"]
    assert "routes" not in stage_memory(config(parallel, "off"), model, 1)[0]["train"]
