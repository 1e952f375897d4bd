"""Rollouts stay with the replica that sampled them: the facts of all samples reach every rank, and each token travels
once. Real ranks with gloo, without a model; the oracle packs all samples on every rank."""

import json
import math
import random
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ranks import run_ranks

from megagrpo.algorithms.advantages import advantages_of, to_samples
from megagrpo.algorithms.token_advantages import with_token_advantages
from megagrpo.config import AlgorithmSection, ParallelSection, load_config
from megagrpo.data.packing.readings import with_readings, with_teachers
from megagrpo.data.packing.sample_packing import PackingRules, build_batch, pack, plan_packing, slices
from megagrpo.data.packing.step_samples import StepSamples
from megagrpo.platform.parallel.bulk_messages import PartError
from megagrpo.platform.parallel.layout import Layout, init_layout
from megagrpo.platform.process.phases import Phases
from megagrpo.records.rows.completions import completion_lines, completion_row
from megagrpo.records.rows.jsonl_file import encoded
from megagrpo.records.rows.recorder import TrainedRollouts
from megagrpo.records.writer import JSONL, CompletionsLog, MetricsWriter
from megagrpo.train_types import Trajectories
from megagrpo.trainer.rollout.collector import Collector, numbered
from megagrpo.trainer.rollout.groups import useful_groups
from megagrpo.trainer.rollout.sample_metrics import pass_rates, rollout_metrics, staleness
from megagrpo.trainer.rollout.token_exchange import trained_samples
from megagrpo.types import Dialogue, PartRewards, Prompt, Rollout, SamplingParams, ScoredRollout, Turn
from tests.distributed.suites import usual
from tests.message_log import objects, record
from tests.unit.trainer.rollout import naive_samples

GROUP, VERSION = 4, 7
QUICKSTART = Path(__file__).parents[4] / "configs" / "quickstart.yaml"
SAMPLING = SamplingParams(1.0, 64)
RULES = PackingRules(max_tokens=96, at_least=2, skip_zero_advantage=True, mask_truncated=True)
NOT_READ = ("token_ids", "labels", "rollout_logprobs")  # by middle stages


def prompts(start: int, stop: int) -> list[Prompt]:
    """Prompts of three or four tokens, most neighbours equally long, and every third the one before it again."""
    ids = [start + (i if i % 3 else max(i - 1, 0)) for i in range(stop - start)]
    return numbered(
        [
            Prompt(i, tuple(range(2 + i, 5 + i + (i % 4 == 3))), f"question {i}", position=start + n)
            for n, i in enumerate(ids)
        ]
    )


def teachers(prompt: Prompt) -> dict[str, tuple[int, ...] | None]:
    """A teacher with prompts of its own, some as long and some longer, and one that teaches two of three prompts."""
    i = prompt.prompt_id
    return {"hinted": (9, *prompt.token_ids) if i % 2 else prompt.token_ids[::-1], "some": () if i % 3 else None}


def branches_of(rollout: Rollout, index: int) -> tuple[Rollout, ...]:
    """None to three further samples; the first two of three have one context."""
    draw = random.Random(f"branches {rollout.prompt.prompt_id} {rollout.prompt.occurrence} {index}")
    contexts = [(5, 5, index), (7, index), (5, 5, index)][: draw.randint(0, 3)]
    branches = []
    for context in contexts:
        count = draw.randint(1, 20)
        ids, logprobs = ([draw.randint(3, 90) for _ in range(count)], [-draw.random() for _ in range(count)])
        dialogue = None
        if rollout.dialogue is not None and draw.random() < 0.5:
            written = [draw.random() < 0.7 for _ in range(count)]
            dialogue = Dialogue(written, (), (Turn(0, count, calls=("f",)),), "done")
        prompt = replace(rollout.prompt, token_ids=context)
        branches.append(Rollout(prompt, ids, logprobs, "stop", VERSION - 1, "branch", dialogue))
    return tuple(branches)


def response(
    prompt: Prompt, index: int, dialogues: bool, length: int | None, branches: bool = False, tokens: bool = False
) -> ScoredRollout:
    """A response that depends on its prompt and index alone."""
    draw = random.Random(f"{prompt.prompt_id} {prompt.occurrence} {index}")
    count = length or draw.randint(1, 30)
    dialogue, later = None, ((count // 2, VERSION),) if draw.random() < 0.3 and count > 1 else ()
    if dialogues:
        written = [draw.random() < 0.7 for _ in range(count)]
        if index == 1:
            prompt = replace(prompt, token_ids=(*prompt.token_ids, 9, 9))  # an environment's text
        ended = "failed" if index == 2 else "done"
        calls, eighths = ("f",) * draw.randint(0, 3), [draw.randint(0, 30) / 8 for _ in range(3)]  # exact in float32
        seconds = dict(queued=eighths[0], generated=eighths[0] + eighths[1], answered=eighths[2])
        turns = [Turn(0, 0, calls=calls, failures=draw.randint(0, 1), **seconds)] * draw.randint(1, 3)
        dialogue = Dialogue(written, ({"role": "user"},), tuple(turns), ended, {"env": draw.random()})
    rollout = Rollout(
        prompt,
        [draw.randint(3, 90) for _ in range(count)],
        [-draw.random() for _ in range(count)],
        draw.choice(["stop", "length"]),
        VERSION - draw.randint(1, 2),
        f"text {prompt.prompt_id} {index}",
        dialogue,
        later,
        draw.choice(["", "end"]),
    )
    if branches:
        rollout = replace(rollout, branches=branches_of(rollout, index))
    reward = None if draw.random() < 0.1 else draw.random() if prompt.prompt_id % 5 else 1.0
    rewards = {"f": reward, "g": float(index)} | (dialogue.rewards if dialogue else {})
    logged = {f"f/{draw.choice('ab')}": draw.random()} if draw.random() < 0.5 else {}
    scored = ScoredRollout(rollout, rewards, math.nan if reward is None else reward, {}, logged)
    return with_token_rewards(scored, draw) if tokens else scored


def with_token_rewards(scored: ScoredRollout, draw: random.Random) -> ScoredRollout:
    """The rollout with rewards of some tokens of all its samples; one of eight without any."""
    samples = scored.rollout, *scored.rollout.branches
    rows = [np.array([draw.choice([math.nan, 0.0, draw.random()]) for _ in s.response_ids]) for s in samples]
    rows = [np.where(sample.written, row, math.nan) for sample, row in zip(samples, rows, strict=True)]
    parts = PartRewards(scored.reward - float(sum(map(np.nansum, rows))), tokens=tuple(rows))
    return scored if draw.random() < 0.125 else replace(scored, parts=parts)


class Sampler:
    """Engine and rewards of a replica. Its groups finish in another order than the order of the prompts."""

    def __init__(self, *options):
        self.options, self.scored = options, {}

    def groups(self, asked, n, sampling, seed):
        for index in reversed(range(len(asked))):
            group = [response(asked[index], i, *self.options) for i in range(n)]
            self.scored |= {id(s.rollout): s for s in group}
            yield index, [s.rollout for s in group]

    def begin(self, step, task=""):
        group = []
        return SimpleNamespace(
            add=lambda index, rollouts: group.extend(self.scored[id(rollout)] for rollout in rollouts),
            finish=lambda: group,
            counters=lambda: {"rewards/f/timeouts": 1.0, "rewards/f/seconds": 0.1},
            drop=lambda: None,
        )


def collector(
    layout: Layout,
    dialogues: bool = False,
    length: int | None = None,
    branches: bool = False,
    by: str = "trajectory",
) -> Collector:
    sampler = Sampler(dialogues, length, branches, by == "token") if layout.is_dp_leader else None
    return Collector(layout, sampler, sampler, Phases(), algorithm=AlgorithmSection(advantage_by=by))


def scored_everywhere(asked: list[Prompt], dialogues: bool, branches: bool) -> list[ScoredRollout]:
    return [response(prompt, i, dialogues, None, branches) for prompt in asked for i in range(GROUP)]


def drawn(
    layout: Layout, dialogues: bool, by_place: bool, branches: bool = False
) -> tuple[StepSamples, list[ScoredRollout]]:
    """Two rounds of which the groups with a signal are kept, and the same of all rollouts."""
    source = collector(layout, dialogues, branches=branches)
    if by_place:
        source._by_slice = lambda count: [(7 * i + 1) % layout.dp_size for i in range(count)]
    rounds = [[replace(p, teachers=None if branches else teachers(p)) for p in prompts(*r)] for r in ((0, 7), (7, 12))]
    samples, counters = source.collect(rounds[0], GROUP, SAMPLING, 0)
    assert counters["rewards/f/timeouts"] == 7
    samples += source.collect(rounds[1], GROUP, SAMPLING, 1)[0]
    everything = [s for asked in rounds for s in scored_everywhere(asked, dialogues, branches)]
    assert pass_rates(samples, 0.5) == naive_samples.pass_rates(everything, 0.5)
    useful = useful_groups(samples.rewards(GROUP))
    flat = {
        g
        for g in range(12)
        if len({s.reward for s in everything[g * GROUP : g * GROUP + GROUP] if s.reward == s.reward}) < 2
    }
    assert set(useful.tolist()) == set(range(12)) - flat and flat, "every group has a signal"
    indices = (useful[:, None] * GROUP + np.arange(GROUP)).flatten()
    return samples.select(indices), [everything[i] for i in indices.tolist()]


def equal(one: object, other: object) -> bool:
    if isinstance(other, Trajectories):
        return torch.equal(one.index, other.index) and torch.equal(one.num_loss, other.num_loss)
    return torch.equal(one, other) if isinstance(other, torch.Tensor) else one == other


def members_of(part: list[int], everything: list[ScoredRollout]) -> list[int]:
    """The samples of these trajectories, the branches after all others, each moved up to the first one with its
    prompt."""
    owners = [*range(len(everything)), *(i for i, s in enumerate(everything) for _ in s.rollout.branches)]
    rollouts = [s.rollout for s in everything] + [branch for s in everything for branch in s.rollout.branches]
    chosen = [i for i, owner in enumerate(owners) if owner in set(part)]
    if len(rollouts) == len(everything):
        return chosen
    prompts = [
        (*r.prompt.token_ids, *r.response_ids[: int(r.written.argmax()) if r.written.any() else None].tolist())
        for r in rollouts
    ]
    first = {prompt: i for i, prompt in reversed([(i, prompts[i]) for i in chosen])}
    return sorted(chosen, key=lambda i: (first[prompts[i]], i))


def check_step(parallel: ParallelSection, dialogues: bool, share_prompts: bool, by_place: bool, branches: bool) -> str:
    layout = init_layout(parallel)
    samples, everything = drawn(layout, dialogues, by_place, branches)
    assert rollout_metrics(samples) == naive_samples.rollout_metrics(everything)
    assert list(rollout_metrics(samples)) == list(naive_samples.rollout_metrics(everything))
    assert staleness(samples, VERSION) == naive_samples.staleness(everything, VERSION)
    assert samples.facts["reward"].tolist() == pytest.approx([s.reward for s in everything], abs=0, nan_ok=True)
    assert {i: s.rollout for i, s in samples.own.items()} == {
        i: everything[i].rollout for i in np.flatnonzero(samples.sampled_by == layout.dp_rank) if layout.is_dp_leader
    }
    advantages = advantages_of(samples.rewards(GROUP), samples.rewards_by_function(GROUP), AlgorithmSection(), [1.0])
    rules = replace(RULES, share_prompts=share_prompts)
    parts = slices(len(samples), 2, seed=5)
    shapes = samples.shapes(advantages.flatten().numpy(), rules)
    plans = [plan_packing(shapes, rules, layout.dp_size, samples.members(part)) for part in parts]
    mine = trained_samples(samples.every, plans, layout, round_words=200)
    whole = to_samples(everything, advantages)
    for plan, part in zip(plans, parts, strict=True):
        batch = build_batch(plan, layout.dp_rank, mine, rules)
        chosen = [whole[i] for i in members_of(part.tolist(), everything)]
        expected = pack(chosen, rules, layout.dp_rank, layout.dp_size)
        assert (batch.num_tokens, batch.samples) == (expected.num_tokens, expected.samples)
        assert batch.num_sequences == len(part) and batch.trajectories == tuple(part.tolist())
        assert batch.packing == expected.packing and len(batch.micro_batches) == len(expected.micro_batches)
        pairs, other_prompts = [*zip(batch.micro_batches, expected.micro_batches, strict=True)], []
        if not branches:
            taught = {
                i: with_teachers(whole[i], s.rollout.prompt.teachers, len(s.rollout.response_ids))
                for i, s in enumerate(everything)
            }
            read, wanted = (
                with_readings(batch, plan, layout.dp_rank, of, rules).micro_batches for of in (mine, taught)
            )
            for one, other in zip(read, wanted, strict=True):
                assert [*one.readings] == [*other.readings] == (["hinted", "some"] if (one.samples >= 0).any() else [])
                couples = [(one.readings[name], other.readings[name]) for name in one.readings]
                pairs += [(a.micro_batch, b.micro_batch) for a, b in couples]
                other_prompts += [id(a.micro_batch) for a, _ in couples]
                for a, _ in couples:
                    assert a.tokens.sum() == a.micro_batch.loss_mask.sum() and not (a.tokens & ~one.loss_mask).any()
                if layout.ends is not None:
                    for a, _ in couples:
                        assert torch.equal(one.labels[a.tokens], a.micro_batch.labels[a.micro_batch.loss_mask])
        for one, other in pairs:
            for name in (f.name for f in fields(one)):
                a, b = getattr(one, name), getattr(other, name)
                if layout.ends is None and name in NOT_READ:
                    assert a.shape == b.shape and (id(one) in other_prompts or not a.any())
                else:
                    assert equal(a, b), name
    trained = TrainedRollouts(3, samples, advantages.flatten().tolist())
    written = b"".join(completion_lines(layout, trained))
    rows = [completion_row(3, *pair) for pair in zip(everything, trained.advantages, strict=True)]
    assert written == (encoded(rows) if layout.world_rank == 0 else b"")
    return "middle" if layout.ends is None else "end"


LAYOUTS = [
    (1, {}, {}),
    (2, {}, dict(dialogues=True)),
    (4, dict(tp=2), {}),
    (4, dict(cp=2), dict(dialogues=True, share_prompts=True)),
    (6, dict(pp=3), dict(share_prompts=True)),
    (3, {}, dict(branches=True, by_place=True, share_prompts=True)),
    (3, {}, dict(share_prompts=True, by_place=True)),
    (4, dict(pp=2), dict(by_place=True)),
    (6, dict(pp=3), dict(dialogues=True, share_prompts=True)),
    (2, {}, dict(branches=True)),
    (6, dict(pp=3), dict(dialogues=True, branches=True, share_prompts=True)),
]


@pytest.mark.parametrize(("ranks", "sizes", "options"), usual(LAYOUTS, 5, 8))
def test_every_rank_trains_on_the_micro_batches_of_a_rank_that_has_all_samples(ranks, sizes, options):
    options = dict(dialogues=False, share_prompts=False, by_place=False, branches=False) | options
    stages = run_ranks(check_step, ranks, ParallelSection(**sizes), *options.values())
    assert Counter(stages)["middle"] == (ranks // 3 if sizes.get("pp") == 3 else 0)


def step_bytes(length: int, gathers: bool) -> tuple[list[str], int, int, int]:
    """The messages with objects of a step's data path, their bytes, the bytes of tensors, and what they may be."""
    layout = init_layout(ParallelSection(pp=2))
    source = collector(layout, length=length)
    source.collect(prompts(0, 2), GROUP, SAMPLING, 0)  # the first step agrees on the names of columns
    source.collect(prompts(0, 8), GROUP, SAMPLING, 0)
    with record(layout) as messages:
        samples, _ = source.collect(prompts(8, 16), GROUP, SAMPLING, 1)
        if gathers:
            layout.all_gather_objects(list(samples.own.values()))
        rewards = samples.rewards(GROUP), samples.rewards_by_function(GROUP)
        advantages = advantages_of(*rewards, AlgorithmSection(), [1.0, 1.0])
        rules = PackingRules(max_tokens=8 * (length + 8))
        plans = [plan_packing(samples.shapes(advantages.flatten().numpy(), rules), rules, layout.dp_size)]
        mine = trained_samples(samples, plans, layout)
    tensors = sum(m.sent + m.received for m in messages if not m.is_object)
    sampled = sum(len(s.rollout.prompt.token_ids) + len(s.rollout.response_ids) for s in samples.own.values())
    allowed = 12 * (sampled + sum(s.token_ids.numel() for s in mine.values())) + 64 * len(samples)
    assert tensors <= allowed, f"rank {layout.world_rank}: {tensors} bytes of tensors; at most {allowed}"
    with record(layout) as writing:
        for _ in completion_lines(layout, TrainedRollouts(3, samples, advantages.flatten().tolist())):
            pass
    found = objects(messages) + objects(writing)
    return found, sum(m.received for m in messages if m.is_object), tensors, allowed


@pytest.mark.parametrize("length", usual([50, 800], 1))
def test_no_object_travels_in_a_step_and_each_token_travels_once(length):
    for found, received, tensors, allowed in run_ranks(step_bytes, 4, length, False):
        assert found == [] and received == 0 and tensors <= allowed


def test_an_object_gather_that_is_put_back_is_found():
    short, long = (run_ranks(step_bytes, 4, length, True) for length in (50, 800))
    for (found, few, *_), (_, many, *_) in zip(short, long, strict=True):
        assert len(found) == 1 and "all_gather_object from" in found[0] and many > 4 * few


def test_a_row_of_facts_has_37_bytes_with_one_reward_function():
    rollout = Rollout(Prompt(0, (1,), ""), (2, 3), (-1.0, -1.0), "stop", 0, "")
    assert StepSamples.of([ScoredRollout(rollout, {"f": 1.0}, 1.0)]).facts.itemsize == 37


def broken() -> str:
    """A leader whose row cannot be written."""
    layout = init_layout(ParallelSection())
    samples, _ = collector(layout).collect(prompts(0, 4), GROUP, SAMPLING, 0)
    if layout.dp_rank == 1:
        index = max(samples.own)
        samples.own[index] = replace(samples.own[index], extra={"f/x": object()})
    read = 0
    try:
        for part in completion_lines(layout, TrainedRollouts(1, samples, [0.0] * len(samples))):
            read += len([json.loads(line) for line in part.splitlines()])
    except PartError as error:
        return f"{read} rows, {error}"
    return f"{read} rows"


def test_a_row_that_cannot_be_written_is_reported_by_rank_0_after_the_others():
    first, second = run_ranks(broken, 2)
    assert first == "8 rows, rank 1: TypeError: Object of type object is not JSON serializable" and second == "0 rows"


def one_sender() -> list[int]:
    """All prompts have places of one replica, as after a curriculum that skips the others."""
    layout = init_layout(ParallelSection())
    source = collector(layout)
    source._by_slice = lambda count: [1] * count
    samples, counters = source.collect(prompts(0, 6), GROUP, SAMPLING, 0)
    assert counters["rewards/f/timeouts"] == 6 and len(samples.own) == 6 * GROUP * (layout.dp_rank == 1)
    advantages = np.linspace(-1, 1, len(samples))
    plans = [plan_packing(samples.shapes(advantages, RULES), RULES, layout.dp_size)]
    return sorted(trained_samples(samples, plans, layout))


def test_a_replica_that_sampled_nothing_trains_on_its_share():
    shares = run_ranks(one_sender, 3)
    assert all(shares) and len(set().union(*shares)) == sum(map(len, shares)) > 0


def full_disk(folder) -> list[str]:
    """The writer of rank 0 fails in the middle of the lines of all ranks."""
    layout = init_layout(ParallelSection())
    writer = MetricsWriter.silent()
    if layout.world_rank == 0:
        writer = MetricsWriter(folder, load_config(QUICKSTART))
        files = writer._sinks[JSONL]._completions

        def fails(lines):
            raise OSError(28, "No space left on device")

        files.append_lines = fails
    log = CompletionsLog(layout, writer)
    for step in (1, 2):
        samples, _ = collector(layout).collect(prompts(0, 40), GROUP, SAMPLING, 0)
        log.finish(TrainedRollouts(step, samples, [0.0] * len(samples)))
        if layout.world_rank == 0:
            vars(files).pop("append_lines", None)  # there is room again
    return (folder / "completions.jsonl").read_text().splitlines()


def test_a_full_disk_of_rank_0_keeps_no_rank_waiting(tmp_path):
    lines = run_ranks(full_disk, 2, tmp_path)[0]
    assert [json.loads(line)["step"] for line in lines] == [2] * 40 * GROUP


def turns_of_a_step(by_place: bool) -> tuple[str, str]:
    """The turns of two rounds of which some groups are kept, gathered from the ranks, and made of all rollouts."""
    layout = init_layout(ParallelSection(pp=2))
    source = collector(layout, dialogues=True, branches=True, by="turn")
    if by_place:
        source._by_slice = lambda count: [(7 * i + 1) % layout.dp_size for i in range(count)]
    rounds = [prompts(0, 5), prompts(5, 9)]
    samples = source.collect(rounds[0], GROUP, SAMPLING, 0)[0]
    samples += source.collect(rounds[1], GROUP, SAMPLING, 1)[0]
    chosen = np.array([5, 4, 30, 31, 2, 17])
    samples = samples.select(chosen)
    everything = [s for asked in rounds for s in scored_everywhere(asked, True, True)]
    expected = StepSamples.of([everything[i] for i in chosen.tolist()], turns=True)
    for found, wanted in zip(samples.turn_owners(), expected.turn_owners(), strict=True):
        assert found.tolist() == wanted.tolist() and found.size == len(samples.turns)
    assert samples.every.facts["length"].tolist() == expected.every.facts["length"].tolist()
    return str(samples.turns.tolist()), str(expected.turns.tolist())  # NaN equals no NaN


@pytest.mark.parametrize("by_place", usual([False, True], 1))
def test_every_rank_has_the_turns_of_all_trajectories_in_their_order(by_place):
    for found, expected in run_ranks(turns_of_a_step, 4, by_place):
        assert found == expected and len(expected) > 100


def advantages_of_tokens(parallel: ParallelSection, dialogues: bool, by_place: bool) -> int:
    """Compare this rank's micro-batches with those of a rank that has all samples. Return the number of tokens that
    have an advantage of their own."""
    layout, algorithm = init_layout(parallel), AlgorithmSection(advantage_by="token")
    source = collector(layout, dialogues, branches=True, by="token")
    if by_place:
        source._by_slice = lambda count: [(7 * i + 1) % layout.dp_size for i in range(count)]
    asked = prompts(0, 9)
    samples, _ = source.collect(asked, GROUP, SAMPLING, 0)
    chosen = np.arange(GROUP, 9 * GROUP)
    samples = samples.select(chosen)
    scored = [response(prompt, i, dialogues, None, True, True) for prompt in asked[1:] for i in range(GROUP)]
    scored = with_token_advantages(scored, GROUP, algorithm)
    expected = StepSamples.of(scored)
    assert samples.every.facts["highest"].tolist() == expected.every.facts["highest"].tolist()
    advantages = advantages_of(samples.outcomes(GROUP), samples.rewards_by_function(GROUP), algorithm, [1.0])
    flat = advantages.flatten().numpy()
    plan = plan_packing(samples.shapes(flat, RULES), RULES, layout.dp_size, samples.members(np.arange(len(samples))))
    mine = samples.with_token_advantages(trained_samples(samples.every, [plan], layout), flat)
    every = [*scored, *(branch for s in scored for branch in s.branches)]
    assert {i: s.rollout for i, s in samples.every.own.items()}.items() <= {
        i: s.rollout for i, s in enumerate(every)
    }.items()
    several = 0
    for index, sample in mine.items():
        own, advantage = every[index], np.float32(flat[expected.trajectories[index]])
        before = len(own.rollout.prompt.token_ids)
        row = own.token_advantages[0] if own.token_advantages else np.zeros(len(own.rollout.response_ids), np.float32)
        if layout.ends is None:
            assert sample.token_advantages is None
        else:
            assert sample.token_advantages[before:].tolist() == (row + advantage).tolist()
        several += np.unique(row[own.rollout.written]).size
    return several


@pytest.mark.parametrize(
    ("ranks", "sizes", "dialogues", "by_place"),
    usual([(1, {}, False, False), (2, {}, True, True), (4, dict(pp=2), True, False), (6, dict(pp=3), False, True)], 3),
)
def test_advantages_of_tokens_travel_from_the_rank_that_sampled_to_those_that_train(ranks, sizes, dialogues, by_place):
    found = run_ranks(advantages_of_tokens, ranks, ParallelSection(**sizes), dialogues, by_place)
    assert sum(found) > 100


def bytes_of_facts(length: int) -> tuple[int, int]:
    """The bytes that the facts of a step with rewards of tokens take on this rank, and the number of samples."""
    layout = init_layout(ParallelSection())
    source = collector(layout, length=length, by="token")
    source.collect(prompts(0, 2), GROUP, SAMPLING, 0)  # the first step agrees on the names of columns
    with record(layout) as messages:
        samples, _ = source.collect(prompts(8, 16), GROUP, SAMPLING, 1)
    return sum(m.sent + m.received for m in messages), len(samples)


def test_rewards_of_tokens_stay_on_the_rank_that_sampled_them():
    short, long = (run_ranks(bytes_of_facts, 2, length)[0] for length in (8, 2048))
    assert short == long, "the bytes of a sample's facts do not depend on its tokens"
