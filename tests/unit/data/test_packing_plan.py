"""Plans from columns, and micro-batches built as whole arrays, against the packing that goes sample by sample."""

import random
from dataclasses import fields, replace

import numpy as np
import torch

from megagrpo.data.packing.sample_packing import (
    PackingRules,
    SampleShapes,
    build_batch,
    build_micro_batch,
    pack,
    plan_packing,
    slices,
)
from megagrpo.train_types import TrainSample
from tests.unit.data.naive_packing import naive_micro_batch, naive_pack
from tests.unit.for_each import for_each


def random_group(draw, index, longest):
    """Samples of one prompt; some of them truncated, without loss tokens, with tokens of a tool, or with `inputs`."""
    prompt = [draw.randint(0, 2) for _ in range(draw.choice([1, 2, draw.randint(1, longest)]))]
    inputs = draw.choice([{}, {}, dict(pixels=torch.ones(1))])
    made = []
    for _ in range(draw.randint(1, 5)):
        response = draw.randint(1, longest)
        written = [True] + [draw.random() < 0.8 for _ in range(response - 1)]
        mask = torch.tensor([False] * len(prompt) + (written if draw.random() < 0.95 else [False] * response))
        ids = torch.tensor(prompt + [draw.randint(3, 9) for _ in range(response)])
        chosen = draw.choice([inputs, inputs, dict(inputs)])
        advantage, truncated = draw.choice([-1.5, 0.0, 0.1]), draw.random() < 0.3
        made.append(TrainSample(ids, mask, torch.randn(len(mask)), advantage, index + len(made), truncated, chosen))
    return made


def problem(seed):
    """(samples, rules, ranks): neighbours and samples further apart that share a prompt, aligned and skipped ones."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    samples, longest, sequence_align = [], draw.choice([3, 12, 40]), draw.choice([1, 1, 2, 8])
    for _ in range(draw.randint(0, 12)):
        samples += random_group(draw, len(samples), longest)
        if draw.random() < 0.3:  # the prompt again, a few samples later
            samples += [replace(s, index=len(samples) + i) for i, s in enumerate(random_group(draw, 0, longest))]
            samples += [replace(samples[0], index=len(samples))]
    rules = PackingRules(
        max_tokens=draw.choice([1, 2, 4]) * (2 * longest + 48) + draw.randint(0, 7),
        at_least=draw.choice([1, 2]),
        multiple_of=draw.choice([1, 1, 2]),
        align=sequence_align * draw.choice([1, 3]),
        sequence_align=sequence_align,
        skip_zero_advantage=draw.random() < 0.5,
        share_prompts=draw.random() < 0.7,
        mask_truncated=draw.random() < 0.5,
    )
    return samples, rules, draw.choice([1, 2, 3])


def assert_same_bits(found, expected):
    for field in fields(found):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype and torch.equal(one, other), field.name
        elif field.name == "inputs":
            assert len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True) if a or b)
        else:
            assert one == other, field.name


@for_each("seed", range(100))
def test_plan_counts_and_every_bit_of_the_micro_batches_are_those_of_packing_sample_by_sample(seed):
    samples, rules, ranks = problem(seed)
    plan = plan_packing(SampleShapes.of(samples, rules), rules, ranks)
    for rank in range(ranks):
        mine, num_tokens, balance, spans, num_loss = naive_pack(samples, rules, rank, ranks)
        assert [i.tolist() for i in plan.of_rank(rank)] == [[s.index for s in chosen] for chosen in mine]
        of_rank = {i: samples[i] for indices in plan.of_rank(rank) for i in indices.tolist()}
        batch = build_batch(plan, rank, of_rank, rules)  # of the rank's own samples alone
        assert (batch.num_tokens, batch.num_sequences, batch.packing) == (num_tokens, len(samples), balance)
        assert batch.samples == tuple(range(len(samples)))
        assert (batch.computed.spans.tolist(), batch.computed.num_loss) == (spans, num_loss)
        for found, chosen in zip(batch.micro_batches, mine, strict=True):
            assert_same_bits(found, naive_micro_batch(chosen, rules))


@for_each("seed", range(40))
def test_a_micro_batch_without_limits_is_that_of_packing_sample_by_sample(seed):
    samples = problem(seed)[0]
    assert_same_bits(build_micro_batch(samples), naive_micro_batch(samples))


@for_each("seed", range(40))
def test_the_plan_of_a_slice_is_that_of_its_samples_alone(seed):
    samples, rules, ranks = problem(seed)
    shapes = SampleShapes.of(samples, rules)
    for members in slices(len(samples), 3, seed):
        plan = plan_packing(shapes, rules, ranks, members)
        alone = pack([samples[i] for i in members], rules, 0, ranks)
        batch = build_batch(plan, 0, dict(enumerate(samples)), rules)
        assert batch.samples == alone.samples == tuple(members.tolist())
        assert (batch.num_tokens, batch.packing) == (alone.num_tokens, alone.packing)
        for found, expected in zip(batch.micro_batches, alone.micro_batches, strict=True):
            assert_same_bits(found, expected)


def test_a_plan_needs_columns_only():
    """Two prompts of 4 tokens, each with responses of 6 and 5 tokens, and a response that is masked."""
    shapes = SampleShapes(
        lengths=np.array([10, 9, 10, 9, 12]),
        prompt_lengths=np.full(5, 4),
        prompt_keys=np.array([7, 7, 3, 3, 3]),
        num_loss=np.array([6, 5, 6, 5, 0]),
        advantages=np.array([1.0, -1.0, 0.5, -0.5, 0.0]),
        masked=np.array([False, False, False, False, True]),
    )
    rules = PackingRules(max_tokens=16, share_prompts=True, skip_zero_advantage=True)
    plan = plan_packing(shapes, rules, dp_size=2)
    assert [i.tolist() for i in plan.of_rank(0)] == [[0, 1]] and [i.tolist() for i in plan.of_rank(1)] == [[2, 3]]
    assert (plan.num_tokens, plan.samples.size, plan.computed.num_loss) == (22, 5, 22)
    assert plan.computed.spans.tolist() == [[0, 3], [3, 10], [3, 9]] * 2
