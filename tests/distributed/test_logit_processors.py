"""Logit bias, penalty and own temperatures of rows, replayed on vocabulary-sharded logits, against dense counts in
float64."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from megagrpo.data.packing.sample_packing import PackingRules, build_micro_batch
from megagrpo.policy.lm_head.logit_processors import LogitProcessors, runs_of
from megagrpo.policy.lm_head.task import HeadTask
from megagrpo.policy.lm_head.vocab_logprobs import vocab_logprobs
from megagrpo.train_types import RefHead, TrainSample
from megagrpo.types import SamplingParams

VOCABULARY = 37
NEVER = torch.tensor(-1e30, dtype=torch.float64)  # the logit of a forbidden token
BIAS = ((3, 2.5), (0, -100.0), (36, -1.0))


def changed(**changes):
    return SamplingParams(1.0, 9, **changes)


ALL = changed(logit_bias=BIAS, repetition_penalty=1.3)
FEW = changed(allowed_token_ids=(*range(9), 36), repetition_penalty=1.3)
KINDS = {
    "bias": [changed(logit_bias=BIAS)] * 3,
    "repetition": [changed(repetition_penalty=1.7)] * 3,
    "repetition below 1": [changed(repetition_penalty=0.6)] * 3,
    "allowed": [FEW] * 3,
    "all": [ALL] * 3,
    "of rows": [FEW, ALL, changed()],  # of each of the three samples
}


def samples():
    """Three samples with few different tokens: one turn, two turns, and the first one's prompt again."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for mask in ("000111111", "0001110001111", "00011"):
        ids = torch.randint(0, 9, (len(mask),), generator=generator)
        ids[:3] = torch.tensor([4, 3, 4])
        ids[4:7] = torch.tensor([7, 7, 4])[: len(mask[4:])]
        written = torch.tensor([m == "1" for m in mask])
        made.append(TrainSample(ids, written, torch.zeros(len(mask)), 1.0, index=len(made)))
    return made


def naive_logits(logits, batch, kind):
    """[N, V] processed logits of the loss tokens of a pack without shared prompts: dense counts, token by token."""
    rows, ids, borders = [], batch.token_ids, batch.cu_seqlens.tolist()
    for (start, stop), sampling in zip(pairwise(borders), kind, strict=True):
        penalty = sampling.repetition_penalty
        for t in range(start, stop):
            if not batch.loss_mask[t]:
                continue
            seen = ids[start : t + 1].bincount(minlength=VOCABULARY) > 0
            row = logits[len(rows)]
            if sampling.allowed_token_ids:
                row = torch.stack([row[i] if i in sampling.allowed_token_ids else NEVER for i in range(VOCABULARY)])
            for token, added in sampling.logit_bias:
                row = row + added * torch.eye(VOCABULARY, dtype=row.dtype)[token]
            rows.append(torch.where(seen, torch.where(row > 0, row / penalty, row * penalty), row))
    return torch.stack(rows)


def problem(dtype=torch.float64, ranks=1):
    batch = build_micro_batch(samples())
    places = batch.loss_mask.nonzero()[:, 0]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(places.numel(), 12, generator=generator, dtype=dtype)
    weight = 0.7 * torch.randn(-(-VOCABULARY // ranks) * ranks, 12, generator=generator, dtype=dtype)
    temperature = torch.linspace(0.5, 1.5, places.numel(), dtype=dtype)
    return batch, places, hidden, weight, batch.labels[places], temperature


def expected(hidden, weight, batch, labels, kind, temperature, cap=None):
    logits = hidden @ weight[:VOCABULARY].t()
    logits = logits if cap is None else cap * (logits / cap).tanh()
    logits = naive_logits(logits, batch, kind)
    log_p = (logits / temperature[:, None]).log_softmax(-1)
    return log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1), log_p


def processors(kind, batch, places):
    of_sequences = kind if batch.prefixes is None else [kind[0], *kind]
    return LogitProcessors(tuple(runs_of(batch, places, of_sequences)))


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("early", [False, True], ids=["late gradients", "early gradients"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_values_and_gradients_are_those_of_dense_counts(kind, early, cap):
    batch, places, hidden, weight, labels, temperature = problem()
    upstream = torch.randn(2, labels.numel(), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    task = HeadTask(
        labels,
        temperature=temperature,
        logit_cap=cap,
        processors=processors(kind, batch, places),
        chunk=4,
        entropy_gradient=True,
        upstream=(lambda rows, *outputs: tuple(upstream[:, rows])) if early else None,
    )
    found = vocab_logprobs(*leaves, task)
    grads = torch.autograd.grad(found, leaves, tuple(upstream))
    values = expected(*leaves, batch, labels, kind, temperature, cap)[:2]
    oracles = torch.autograd.grad(values, leaves, tuple(upstream))
    for value, right in zip((*found, *grads), (*values, *oracles), strict=True):
        torch.testing.assert_close(value, right, rtol=1e-9, atol=1e-9)
    plain = vocab_logprobs(hidden, weight, HeadTask(labels, temperature=temperature, logit_cap=cap))[0]
    assert (found[0] - plain).abs().max() > 0.01


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_an_exact_kl_is_that_of_the_changed_distributions(direction):
    batch, places, hidden, weight, labels, temperature = problem()
    kind, ref = KINDS["all"], (hidden.flip(0), weight.flip(1))
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    options = dict(temperature=temperature, processors=processors(kind, batch, places), chunk=4)
    kl = vocab_logprobs(*leaves, HeadTask(labels, ref=RefHead(*ref), direction=direction, **options))[2]
    p, q = (expected(*model, batch, labels, kind, temperature)[2] for model in (leaves, ref))
    right = (p.exp() * (p - q)).sum(-1) if direction == "reverse" else (q.exp() * (q - p)).sum(-1)
    grads, oracles = (torch.autograd.grad(value.sum(), leaves) for value in (kl, right))
    for value, of in zip((kl, *grads), (right, *oracles), strict=True):
        torch.testing.assert_close(value, of, rtol=1e-9, atol=1e-9)


def test_samples_that_share_a_prompt_have_seen_it():
    kind, apart = KINDS["of rows"][:2], samples()[::2]
    shared = build_micro_batch(apart, PackingRules(100, share_prompts=True))
    assert shared.prefixes is not None
    found = []
    for batch in (build_micro_batch(apart), shared):
        places = batch.loss_mask.nonzero()[:, 0]
        logits = torch.randn(8, VOCABULARY, generator=torch.Generator().manual_seed(0))
        task = HeadTask(batch.labels[places])
        shard = task.shard(logits.t())
        processors(kind, batch, places).apply(logits, slice(0, 8), shard)
        found.append(logits)
    assert torch.equal(*found)


def sharded(name: str) -> float:
    """The largest error of values and gradients of this rank's shard."""
    rank, tp, kind = dist.get_rank(), dist.get_world_size(), KINDS[name]
    batch, places, hidden, weight, labels, temperature = problem(ranks=tp)
    height = weight.shape[0] // tp
    mine = slice(rank * height, (rank + 1) * height)
    leaves = hidden.clone().requires_grad_(), weight[mine].clone().requires_grad_()
    options = dict(temperature=temperature, vocab_size=VOCABULARY, chunk=4, processors=processors(kind, batch, places))
    logprobs, entropy = vocab_logprobs(*leaves, HeadTask(labels, group=dist.group.WORLD, **options))
    grad_hidden, grad_weight = torch.autograd.grad(logprobs, leaves, torch.ones_like(logprobs))
    dist.all_reduce(grad_hidden)
    whole = hidden.requires_grad_(), weight[:VOCABULARY].clone().requires_grad_()
    right, right_entropy, _ = expected(*whole, batch, labels, kind, temperature)
    oracle_hidden, oracle_weight = torch.autograd.grad(right.sum(), whole)
    own = oracle_weight[mine]
    pairs = [(logprobs, right), (entropy, right_entropy), (grad_hidden, oracle_hidden), (grad_weight[: len(own)], own)]
    return max((one - other).abs().max().item() for one, other in pairs if other.numel())


@pytest.mark.parametrize("name", ["bias", "all", "of rows", "allowed"])
@pytest.mark.parametrize("tp", [2, 3])
def test_over_shards_they_are_the_same(tp, name):
    assert max(run_ranks(sharded, tp, name)) < 1e-10
