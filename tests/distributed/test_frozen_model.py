"""What a frozen model returns: the k largest log-probs over a sharded vocabulary, and the reference in layouts."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from suites import usual
from tiny_policy import Case, few_samples, tiny_model, tiny_run

from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.lm_head.task import HeadTask
from megagrpo.policy.lm_head.top_logprobs import top_logprobs
from megagrpo.policy.reference import Reference
from megagrpo.proof.verify.verified_step import prepare

K = 6


def sharded(vocab_size: int, k: int) -> tuple[float, bool]:
    """The error of this rank's log-probs, and whether its ids are those of the full softmax in float64."""
    rank, tp = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    height = -(-vocab_size // tp)
    hidden = torch.randn(11, 12, generator=generator, dtype=torch.float64)
    weight = torch.randn(height * tp, 12, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, vocab_size, (11,), generator=generator)
    task = HeadTask(labels, group=dist.group.WORLD, temperature=0.7, vocab_size=vocab_size, chunk=4)
    top = top_logprobs(hidden, weight[rank * height : (rank + 1) * height], k, task)
    expected = (hidden @ weight[:vocab_size].t() / 0.7).log_softmax(-1).topk(k, dim=-1)
    return (top.logprobs - expected.values).abs().max().item(), torch.equal(top.token_ids, expected.indices)


# In the third case a rank holds fewer than k tokens, and in the last one a rank holds only padding.
@pytest.mark.parametrize(("tp", "vocab_size", "k"), [(2, 37, 1), (2, 37, 6), (2, 37, 30), (3, 4, 3)])
def test_the_largest_log_probs_over_shards_are_those_of_a_full_softmax(tp, vocab_size, k):
    for error, same_ids in run_ranks(sharded, tp, vocab_size, k):
        assert error < 1e-12 and same_ids


def scores(parallel: dict):
    """The reference's rows over all micro-batches: log-probs, entropies, top log-probs and ids by sample and position,
    and whether the labels' log-probs are among the top ones where their ids are. None outside the last stage."""
    config = tiny_run(parallel, rollout=dict(temperature=0.8), algorithm=dict(beta=0.1))
    policy, batch, _ = prepare(config, tiny_model("qwen2_untied"), init_layout(config.parallel), few_samples())
    reference = Reference(policy)
    rows = reference.logprobs(batch), policy.entropies(batch), reference.top_logprobs(batch, K)
    if rows[0][0] is None:
        assert all(row is None for of_kind in rows for row in of_kind)
        return None
    found = {}
    for m, logprobs, entropy, top in zip(batch.micro_batches, *rows, strict=True):
        assert top.logprobs.shape == top.token_ids.shape == (m.num_tokens, K)
        assert not top.logprobs[~m.loss_mask].any() and not top.token_ids[~m.loss_mask].any()
        hit = (top.token_ids == m.labels[:, None]) & m.loss_mask[:, None]
        torch.testing.assert_close((top.logprobs * hit).sum(1)[hit.any(1)], logprobs[hit.any(1)])
        samples = m.samples[m.sequence_index]
        for t in m.loss_mask.nonzero()[:, 0].tolist():
            key = int(samples[t]), int(m.position_ids[t])
            found[key] = logprobs[t].item(), entropy[t].item(), top.logprobs[t].tolist(), top.token_ids[t].tolist()
    return policy.layout.dp_rank, found


@pytest.fixture(scope="module")
def one():
    return run_ranks(scores, 1, {})[0][1]


@pytest.mark.parametrize(
    "case",
    usual([Case("tp2", 2, dict(tp=2, sequence_parallel=True)), Case("cp2 pp2", 4, dict(cp=2, pp=2))], 0),
    ids=str,
)
def test_the_reference_scores_every_token_alike_in_every_layout(case, one):
    results = [result for result in run_ranks(scores, case.ranks, case.parallel) if result is not None]
    assert results
    for _, found in results:
        assert found.keys() == one.keys()
        for key, (logprob, entropy, values, ids) in found.items():
            assert (logprob, entropy, *values) == pytest.approx((*one[key][:2], *one[key][2]), abs=1e-4)
            assert ids == one[key][3]


def test_the_log_probs_and_entropies_are_those_of_the_full_distribution():
    ((by_head, by_model),) = run_ranks(whole_distribution, 1)
    assert by_model == pytest.approx(by_head, abs=1e-4)


def whole_distribution() -> tuple[list[float], list[float]]:
    """Log-probs, entropies and top log-probs of the loss tokens, from plain float64 and from the reference."""
    config = tiny_run({}, rollout=dict(temperature=0.8), algorithm=dict(beta=0.1))
    policy, batch, _ = prepare(config, tiny_model("qwen2_untied"), init_layout(config.parallel), few_samples())
    reference, by_head, by_model = Reference(policy), [], []
    rows = reference.logprobs(batch), policy.entropies(batch), reference.top_logprobs(batch, K)
    for m, head, logprobs, entropy, top in zip(batch.micro_batches, reference.heads(batch), *rows, strict=True):
        logits = head.hidden.double() @ head.weight[: policy.hf_config.vocab_size].double().t() / 0.8
        log_p, mask = logits.log_softmax(-1), m.loss_mask
        by_head += log_p.gather(1, m.labels[mask][:, None])[:, 0].tolist() + (-log_p.exp() * log_p).sum(-1).tolist()
        by_head += log_p.topk(K).values.flatten().tolist()
        by_model += logprobs[mask].tolist() + entropy[mask].tolist() + top.logprobs[mask].flatten().tolist()
    return by_head, by_model
