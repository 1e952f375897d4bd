"""Every rank gets the routes of the tokens and layers that it computes, and no others. Real ranks with gloo, without a
model; the oracle takes them from all samples, which every rank has."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from ranks import run_ranks

from megagrpo.config import ParallelSection
from megagrpo.data.packing.routed_experts import RouteShape
from megagrpo.data.packing.sample_packing import PackingRules, build_batch, plan_packing, slices
from megagrpo.data.packing.step_samples import StepSamples
from megagrpo.platform.parallel.agree import RankError
from megagrpo.platform.parallel.layout import Layout, init_layout
from megagrpo.policy.moe.rank_routed_experts import with_sample_routes
from megagrpo.trainer.rollout.routed_experts_exchange import replayed_batches
from megagrpo.trainer.rollout.token_exchange import trained_samples
from megagrpo.types import Rollout, Routes
from tests.distributed.suites import usual
from tests.message_log import objects, record
from tests.unit.trainer.rollout.test_token_exchange import drawn

# one byte per expert and padded words; two bytes per expert, and a stage without experts
SMALL = RouteShape(layers=(1, 2, 3, 4, 5), num_layers=6, experts=8, per_token=3)
LARGE = RouteShape(layers=(3, 4, 5), num_layers=6, experts=300, per_token=2)
RULES = PackingRules(max_tokens=96, at_least=3, align=4, skip_zero_advantage=True)


def routes_of(index: int, rollout: Rollout, shape: RouteShape) -> Routes:
    """Random routes [L - 1, M, k] that depend on the sample's index alone."""
    length = len(rollout.prompt.token_ids) + len(rollout.response_ids)
    draw = np.random.default_rng(index).random((length - 1, len(shape.layers), shape.experts))
    return draw.argsort(-1)[..., : shape.per_token].astype(shape.dtype)


def with_routes(samples: StepSamples, shape: RouteShape) -> StepSamples:
    own = {}
    for i, scored in samples.own.items():
        own[i] = replace(scored, rollout=replace(scored.rollout, routes=routes_of(i, scored.rollout, shape)))
    return replace(samples, own=own)


def exchanged(layout: Layout, shape: RouteShape, dialogues: bool, share_prompts: bool, round_words: int = 500):
    """The batches with routes, those with the oracle's, and the log of the exchange's messages. With `dialogues` some
    trajectories have several samples."""
    samples, everything = drawn(layout, dialogues, by_place=True, branches=dialogues)
    rules = replace(RULES, share_prompts=share_prompts, sequence_align=layout.parallel.sequence_align)
    shapes = samples.shapes(np.linspace(-1, 1, len(samples)), rules)
    parts = [samples.members(part) for part in slices(len(samples), 2, seed=5)]
    plans = [plan_packing(shapes, rules, layout.dp_size, part) for part in parts]
    samples = with_routes(samples.every, shape)
    mine = trained_samples(samples, plans, layout)
    batches = [build_batch(plan, layout.dp_rank, mine, rules) for plan in plans]
    with record(layout) as messages:
        found = replayed_batches(batches, samples, plans, layout, shape, round_words)
    rollouts = [s.rollout for s in everything] + [branch for s in everything for branch in s.rollout.branches]
    known = {i: routes_of(i, rollout, shape) for i, rollout in enumerate(rollouts)}
    return found, [with_sample_routes(batch, known, layout, shape) for batch in batches], messages


def check(parallel: ParallelSection, shape: RouteShape, dialogues: bool, share_prompts: bool) -> int:
    layout = init_layout(parallel)
    found, expected, messages = exchanged(layout, shape, dialogues, share_prompts)
    assert objects(messages) == []
    rows = 0
    for one, other in zip(found, expected, strict=True):
        for a, b in zip(one.micro_batches, other.micro_batches, strict=True):
            assert a.routes is not None and torch.equal(a.routes, b.routes) and a.routes.dtype == b.routes.dtype
            rows += a.routes.shape[0] * a.routes.shape[1]
    return rows


LAYOUTS = [
    (1, {}, {}, LARGE),
    (3, {}, dict(share_prompts=True), SMALL),
    (4, dict(tp=2, sequence_parallel=True), dict(dialogues=True), LARGE),
    (4, dict(tp=2), {}, SMALL),
    (4, dict(cp=2), dict(share_prompts=True), LARGE),
    (4, dict(pp=2), {}, SMALL),
    (6, dict(pp=3), dict(dialogues=True, share_prompts=True), SMALL),
    (8, dict(tp=2, cp=2, pp=2, sequence_parallel=True), dict(share_prompts=True), SMALL),
]


@pytest.mark.parametrize(
    ("ranks", "sizes", "options", "shape"),
    usual(LAYOUTS + [(*row, SMALL if shape is LARGE else LARGE) for *row, shape in LAYOUTS], 1, 7),
)
def test_every_rank_gets_the_routes_of_its_tokens_and_layers(ranks, sizes, options, shape):
    options = dict(dialogues=False, share_prompts=False) | options
    rows = run_ranks(check, ranks, ParallelSection(**sizes), shape, *options.values())
    assert sum(rows) > 0


def received(parallel: ParallelSection) -> tuple[int, int, bool]:
    """The bytes that this rank receives, those of the routes that it replays, and whether it is a leader."""
    layout = init_layout(parallel)
    found, _, messages = exchanged(layout, SMALL, dialogues=False, share_prompts=False)
    kept = sum(m.routes.nbytes for batch in found for m in batch.micro_batches)
    return sum(m.received for m in messages), kept, layout.is_dp_leader


def test_a_rank_receives_no_more_than_it_replays():
    for got, kept, is_leader in run_ranks(received, 8, ParallelSection(tp=2, cp=2, pp=2, sequence_parallel=True)):
        # besides the routes, a rank agrees that all samples have them
        assert is_leader or 0 < got <= kept + 64


def without_routes(count: int | None) -> str:
    """The error of a sample with routes of its first `count` tokens; without `count` of all but the last that needs
    one."""
    layout = init_layout(ParallelSection())
    samples, _ = drawn(layout, dialogues=True, by_place=True, branches=False)
    samples = with_routes(samples, SMALL)
    if layout.dp_rank == 1:
        # tokens of others stand before the policy's last one
        index = next(i for i, s in samples.own.items() if not s.rollout.written.all() and s.rollout.written[-1])
        rollout = samples.own[index].rollout
        count = len(rollout.prompt.token_ids) + len(rollout.response_ids) - 2 if count is None else count
        samples.own[index] = replace(samples.own[index], rollout=replace(rollout, routes=rollout.routes[:count]))
    try:
        replayed_batches([], samples, [], layout, SMALL)
    except (RankError, ValueError) as error:
        return str(error)
    return "no error"


def test_a_sample_without_routes_is_an_error_that_names_token_and_layer_on_every_rank():
    for said in run_ranks(without_routes, 2, 2):
        assert "has no route for token 2 in layer 1" in said and "sample" in said, said
    for said in run_ranks(without_routes, 2, None):
        missing = re.search(r"no route for token (\d+) in layer 1, and (\d+) of its tokens need one", said)
        assert missing and int(missing[2]) == int(missing[1]) + 1, said
