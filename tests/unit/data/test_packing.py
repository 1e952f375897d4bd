import random
from dataclasses import dataclass, replace

import pytest
import torch

from megagrpo.data.packing.sample_packing import PackingRules, assign, build_micro_batch, imbalances, pack, padded
from megagrpo.records.rows.step_metrics import values_of
from megagrpo.train_types import StepTerms, TrainSample
from tests.unit.for_each import for_each

SHARE = PackingRules(max_tokens=64, share_prompts=True)


def sample(prompt=2, response=3, advantage=1.0, first=10):
    length = prompt + response
    mask = torch.tensor([False] * prompt + [True] * response)
    return TrainSample(torch.arange(first, first + length), mask, torch.where(mask, -1.0, 0.0), advantage)


def random_samples(seed, count=40, longest=30):
    draw = random.Random(seed)
    half = longest // 2
    return [
        sample(draw.randint(1, half), draw.randint(1, half), draw.choice([-1.0, 0.0, 2.0]), first=1000 * i)
        for i in range(count)
    ]


def test_labels_are_the_next_token_and_the_mask_says_which_are_responses():
    batch = build_micro_batch([sample(first=10), sample(prompt=1, response=1, first=50)])
    assert batch.token_ids.tolist() == [10, 11, 12, 13, 14, 50, 51]
    assert batch.labels.tolist() == [11, 12, 13, 14, 0, 51, 0]
    assert batch.loss_mask.tolist() == [False, True, True, True, False, True, False]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 5, 7]
    assert batch.rollout_logprobs.tolist() == [0, -1, -1, -1, 0, -1, 0]


@for_each("seed", range(6))
@for_each("num_ranks", [1, 3])
def test_every_token_lands_in_exactly_one_micro_batch_within_the_budget(seed, num_ranks):
    samples, rules = random_samples(seed), PackingRules(max_tokens=64)
    batches = [pack(samples, rules, rank, num_ranks) for rank in range(num_ranks)]
    micro_batches = [m for b in batches for m in b.micro_batches]
    assert all(m.num_tokens <= 64 for m in micro_batches)
    packed = torch.cat([m.token_ids for m in micro_batches]).sort().values
    assert torch.equal(packed, torch.cat([s.token_ids for s in samples]).sort().values)
    assert sum(int(m.loss_mask.sum()) for m in micro_batches) == batches[0].num_tokens
    assert {(b.num_tokens, b.num_sequences) for b in batches} == {(batches[0].num_tokens, len(samples))}


@for_each("num_ranks", [1, 2, 5])
@for_each(("at_least", "multiple_of"), [(1, 1), (2, 1), (3, 4)])
def test_every_rank_gets_the_same_admissible_number_of_micro_batches(num_ranks, at_least, multiple_of):
    rules = PackingRules(max_tokens=50, at_least=at_least, multiple_of=multiple_of)
    counts = {len(pack(random_samples(1), rules, rank, num_ranks).micro_batches) for rank in range(num_ranks)}
    assert len(counts) == 1
    assert (count := counts.pop()) >= at_least and count % multiple_of == 0


def test_a_rank_without_samples_gets_tokens_that_count_for_nothing():
    batches = [pack([sample()], PackingRules(max_tokens=16), rank, 2) for rank in range(2)]
    (idle,) = batches[1].micro_batches
    assert idle.num_tokens == 2 and not idle.loss_mask.any()
    assert batches[1].num_tokens == 3


def test_samples_without_advantage_are_left_out_but_still_count():
    samples = [sample(advantage=0.0), sample(advantage=1.0), sample(advantage=-1.0)]
    kept = pack(samples, PackingRules(max_tokens=64, skip_zero_advantage=True))
    assert sum(m.num_tokens for m in kept.micro_batches) == 10
    assert (kept.num_tokens, kept.num_sequences) == (9, 3)
    assert sum(m.num_tokens for m in pack(samples, PackingRules(max_tokens=64)).micro_batches) == 15


def test_micro_batches_are_padded_to_the_alignment_with_a_sequence_that_counts_for_nothing():
    batch = build_micro_batch([sample()], PackingRules(max_tokens=64, align=4))
    assert batch.num_tokens == 8
    assert batch.cu_seqlens.tolist() == [0, 5, 8]
    assert not batch.loss_mask[5:].any()


def test_a_sample_above_the_budget_is_an_error_that_names_the_setting():
    with pytest.raises(
        ValueError, match=r"sample of 5 tokens exceeds train\.max_tokens_per_micro_batch 4; raise it to 5"
    ):
        pack([sample()], PackingRules(max_tokens=4))


@dataclass
class Mix:
    """A random packing problem: a small version of the trainer's layouts and data."""

    samples: list
    rules: PackingRules
    dp: int


def random_mix(seed):
    draw = random.Random(seed)
    sequence_align = draw.choice([1, 1, 4, 8])
    align = sequence_align * draw.choice([1, 2, 3])
    longest = draw.choice([8, 40, 200])
    samples = []
    for _ in range(draw.randint(0, 30)):
        prompt, skew = draw.randint(1, longest // 2), draw.choice([1, 1, 4])
        responses = [max(1, draw.randint(1, longest // 2) // skew) for _ in range(draw.randint(1, 6))]
        samples += group(prompt, responses, first=1000 * len(samples))
    for number, one in enumerate(samples):  # no response token occurs twice
        one.token_ids[one.response_mask] = torch.arange(
            1_000_000 + 1000 * number, 1_000_000 + 1000 * number + int(one.response_mask.sum())
        )
    samples = [replace(s, advantage=draw.choice([-1.0, 0.0, 2.0])) for s in samples]
    budget = padded(
        max((padded(s.token_ids.numel(), sequence_align) for s in samples), default=1), align
    ) * draw.choice([1, 2, 5])
    rules = PackingRules(
        max_tokens=budget + draw.randint(0, align - 1),
        at_least=draw.choice([1, 2, 4]),
        multiple_of=draw.choice([1, 1, 2]),
        align=align,
        sequence_align=sequence_align,
        skip_zero_advantage=draw.random() < 0.3,
        share_prompts=draw.random() < 0.5,
    )
    return Mix(samples, rules, draw.choice([1, 2, 3, 8]))


def loss_tokens(rows):
    """The required loss terms, in no order: (label, advantage) of every loss token."""
    return sorted(
        (label, advantage) for labels, advantages in rows for label, advantage in zip(labels, advantages, strict=True)
    )


@for_each("seed", range(60))
def test_any_mix_is_packed_whole_within_the_budget_evenly_and_alike_on_every_rank(seed):
    mix = random_mix(seed)
    rules = mix.rules
    batches = [pack(mix.samples, rules, rank, mix.dp) for rank in range(mix.dp)]
    micro_batches = [m for batch in batches for m in batch.micro_batches]
    (count,) = {len(batch.micro_batches) for batch in batches}
    assert count >= rules.at_least and count % rules.multiple_of == 0
    assert all(
        m.num_tokens <= rules.max_tokens and m.num_tokens % rules.align == 0 for m in micro_batches if m.loss_mask.any()
    )
    assert not any((m.cu_seqlens.diff() % rules.sequence_align).any() for m in micro_batches)

    trained = [s for s in mix.samples if s.advantage != 0 or not rules.skip_zero_advantage]
    expected = loss_tokens(
        (s.token_ids[s.response_mask].tolist(), [s.advantage] * int(s.response_mask.sum())) for s in trained
    )
    assert (
        loss_tokens((m.labels[m.loss_mask].tolist(), m.advantages[m.loss_mask].tolist()) for m in micro_batches)
        == expected
    )
    assert {(b.num_tokens, b.num_sequences) for b in batches} == {
        (sum(int(s.response_mask.sum()) for s in mix.samples), len(mix.samples))
    }
    assert all(b.packing == batches[0].packing for b in batches)


@for_each("seed", range(60))
def test_no_micro_batch_and_no_rank_is_fuller_than_another_by_more_than_the_longest_sample(seed):
    draw = random.Random(seed)
    spread = draw.choice([1, 10, 400])
    lengths = [draw.randint(400 // spread, 400) for _ in range(draw.randint(1, 120))]
    ranks = draw.choice([1, 2, 3, 7])
    bins = assign(lengths, PackingRules(max_tokens=draw.choice([400, 900, 4000]), at_least=draw.choice([1, 4])), ranks)
    loads = [sum(lengths[i] for i in b) for b in bins]
    per_rank = [sum(loads[rank::ranks]) for rank in range(ranks)]
    longest, mean = max(lengths), sum(loads) / len(loads)
    assert loads == sorted(loads, reverse=True)
    assert max(loads) - min(loads) <= longest and max(per_rank) - min(per_rank) <= longest
    found = values_of(imbalances(loads, ranks))
    assert found == {
        "packing/micro_batch_imbalance": pytest.approx(max(loads) / mean),
        "packing/rank_imbalance": pytest.approx(max(per_rank) / (sum(per_rank) / ranks)),
    }
    assert found["packing/micro_batch_imbalance"] <= 1 + longest / mean
    assert found["packing/rank_imbalance"] <= 1 + longest / (len(bins) // ranks * mean)


def naive_bins(lengths, budget, per_rank, ranks):
    """Each sample, the longest first, into the emptiest bin; one more micro-batch per rank until all fit."""
    while True:
        bins, loads = [[] for _ in range(per_rank * ranks)], [0] * per_rank * ranks
        for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
            emptiest = min(range(len(bins)), key=lambda b: (loads[b], b))
            bins[emptiest].append(index)
            loads[emptiest] += lengths[index]
        if max(loads) <= budget:
            return sorted(map(sorted, bins), key=lambda b: -sum(lengths[i] for i in b))
        per_rank += 1


@for_each("seed", range(200))
def test_the_bins_are_those_of_the_naive_search(seed):
    draw = random.Random(seed)
    budget, ranks, least = draw.choice([64, 100, 401, 4096]), draw.choice([1, 2, 3, 7]), draw.choice([1, 2, 4])
    low, high = sorted(draw.choice([1, budget // 4, budget // 3 + 1, budget // 2, budget]) for _ in range(2))
    lengths = [draw.randint(low, high) for _ in range(draw.randint(0, 120))]
    found = assign(lengths, PackingRules(max_tokens=budget, at_least=least), ranks)
    assert [indices.tolist() for indices in found] == naive_bins(lengths, budget, least, ranks)


def test_many_samples_are_all_but_perfectly_balanced():
    draw = random.Random(0)
    samples = [sample(draw.randint(10, 100), draw.randint(10, 100)) for _ in range(256)]
    found = pack(samples, PackingRules(max_tokens=4096), dp_size=4).packing
    found = values_of(found)
    assert 1 <= found["packing/rank_imbalance"] < 1.001
    assert 1 <= found["packing/micro_batch_imbalance"] < 1.01


def test_a_step_that_trains_nothing_is_balanced():
    found = pack([sample(advantage=0.0)], PackingRules(max_tokens=16, skip_zero_advantage=True), dp_size=2)
    assert set(values_of(found.packing).values()) == {1.0}


def group(prompt, responses, first=10):
    """Samples with one prompt of `prompt` tokens and responses of these lengths."""
    made = []
    for i, length in enumerate(responses):
        ids = torch.cat([torch.arange(first, first + prompt), torch.arange(100 * (i + 1), 100 * (i + 1) + length)])
        mask = torch.tensor([False] * prompt + [True] * length)
        made.append(TrainSample(ids, mask, torch.where(mask, -float(i + 1), 0.0), float(i + 1)))
    return made


def test_responses_to_one_prompt_share_all_of_it_but_its_last_token():
    batch = build_micro_batch(group(3, [2, 1]), SHARE)
    assert batch.token_ids.tolist() == [10, 11, 12, 100, 101, 12, 200]
    assert batch.labels.tolist() == [11, 12, 100, 101, 0, 200, 0]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 2, 3]
    assert batch.cu_seqlens.tolist() == [0, 2, 5, 7]
    assert batch.prefixes.tolist() == [-1, 0, 0]
    assert batch.loss_mask.tolist() == [False, False, True, True, False, True, False]
    assert batch.advantages[batch.loss_mask].tolist() == [1, 1, 2]
    assert batch.rollout_logprobs[batch.loss_mask].tolist() == [-1, -1, -2]


def test_sharing_keeps_every_loss_token_and_saves_the_repeated_prompts():
    samples = [s for i in range(5) for s in group(20, [3, 7, 1, 4], first=1000 * i)]
    plain, shared = (pack(samples, PackingRules(max_tokens=70, share_prompts=share)) for share in (False, True))
    labels = [torch.cat([m.labels[m.loss_mask] for m in b.micro_batches]).sort().values for b in (plain, shared)]
    assert torch.equal(*labels)
    assert (plain.num_tokens, plain.num_sequences) == (shared.num_tokens, shared.num_sequences)
    assert (
        sum(m.num_tokens for m in plain.micro_batches) == sum(m.num_tokens for m in shared.micro_batches) + 5 * 3 * 19
    )
    assert all(m.num_tokens <= 70 for m in shared.micro_batches)


@pytest.mark.parametrize("share", [False, True])
def test_the_computed_tokens_are_those_of_all_ranks_without_padding(share):
    samples = [s for i in range(5) for s in group(20, [3, 7, 1, 4], first=1 + 1000 * i)] + [sample(advantage=0.0)]
    rules = PackingRules(max_tokens=70, share_prompts=share, skip_zero_advantage=True, align=8)
    batches = [pack(samples, rules, rank, 2) for rank in range(2)]
    computed, plain = batches[0].computed, [m for b in batches for m in b.micro_batches]
    assert batches[1].computed.spans.tolist() == computed.spans.tolist()
    assert computed.num_loss == sum(int(m.loss_mask.sum()) for m in plain) == 5 * 15
    assert sum(stop - start for start, stop in computed.spans.tolist()) == sum(
        int((m.token_ids > 0).sum()) for m in plain
    )
    spans = set(map(tuple, computed.spans.tolist()))
    assert ((0, 19) in spans) == share and (19 * share, 27) in spans


def test_a_group_above_the_budget_is_split_and_its_prompt_repeated():
    batch = pack(group(10, [5] * 6), PackingRules(max_tokens=30, share_prompts=True))
    assert [m.num_tokens for m in batch.micro_batches] == [9 + 3 * 6] * 2


def test_prompts_of_one_token_have_nothing_to_share():
    batch = build_micro_batch(group(1, [2, 3]), SHARE)
    assert batch.prefixes is None
    assert batch.cu_seqlens.tolist() == [0, 3, 7]


def test_a_batch_gets_each_term_per_micro_batch_and_its_other_terms_stay():
    batch = pack(random_samples(0), PackingRules(max_tokens=64))
    old, ref = (
        [torch.full((m.num_tokens,), number + i) for i, m in enumerate(batch.micro_batches)] for number in (0.0, 0.5)
    )
    both = batch.with_terms(old_logprobs=old).with_terms(ref_logprobs=ref, high_entropy=[None] * len(ref))
    assert [m.terms.old_logprobs for m in both.micro_batches] == old and [
        m.terms.ref_logprobs for m in both.micro_batches
    ] == ref
    assert (
        batch.micro_batches[0].terms == StepTerms()
        and both.micro_batches[0].token_ids is batch.micro_batches[0].token_ids
    )
    with pytest.raises(ValueError, match="shorter"):
        batch.with_terms(old_logprobs=old[1:])


def test_a_micro_batch_moves_to_a_device_with_its_terms_and_leaves_the_rows_of_sequences_on_the_host():
    batch = build_micro_batch([sample()]).with_terms(old_logprobs=torch.zeros(5), high_entropy=torch.ones(5).bool())
    moved = batch.to(torch.device("meta"))
    rows = {
        name: row.device.type
        for of in (moved, moved.terms)
        for name, row in vars(of).items()
        if isinstance(row, torch.Tensor)
    }
    assert {name for name, place in rows.items() if place == "cpu"} == {"cu_seqlens", "samples"}
    assert list(rows.values()).count("meta") == 7 + 2


def test_every_token_has_the_index_of_its_sequence():
    batch = build_micro_batch([sample(), sample()])
    assert batch.sequence_index.tolist() == [0] * 5 + [1] * 5 and batch.num_sequences == 2


def test_inputs_travel_with_their_samples_without_copies():
    image, other = dict(pixels=torch.ones(3, 2)), dict(pixels=torch.zeros(3, 2))
    first, second, plain = (replace(sample(first=10), index=i, inputs=of) for i, of in enumerate((image, other, {})))
    batch = build_micro_batch([first, second, plain], replace(SHARE, align=16, sequence_align=4)).to(
        torch.device("cpu")
    )
    assert batch.samples.tolist() == [0, 1, 2, -1]
    assert batch.inputs[0] is image and batch.inputs[1] is other and batch.inputs[2:] == ({}, {})
    assert build_micro_batch([plain]).inputs == ()


def test_samples_share_a_prompt_only_with_the_same_inputs():
    image = dict(pixels=torch.ones(3, 2))
    prompts = [replace(sample(first=10), inputs=of) for of in (image, image, dict(image), {}, {})]
    batch = build_micro_batch(prompts, SHARE)
    assert batch.prefixes.tolist() == [-1, 0, 0, -1, -1, 4, 4]
    assert [inputs is image for inputs in batch.inputs] == [True] * 3 + [False] * 4
