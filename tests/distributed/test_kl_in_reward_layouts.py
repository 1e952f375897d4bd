"""The KL in rewards covers whole responses: every layout computes the same KL and trains on the same advantages."""

from dataclasses import replace

import pytest
import torch
from ranks import run_ranks
from suites import usual
from tiny_policy import Case, few_samples, tiny_model, tiny_run

from megagrpo.data.packing.sample_packing import pack, packing_rules, slices
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.reference import kl_by_sample
from megagrpo.proof.verify.verified_step import prepare
from megagrpo.train_types import TrainSample

ALGORITHM = dict(beta=0.1, kl_in_reward=True, kl_estimator="k1", steps_per_generation=2)
CASES = [
    Case("dp2", 2, {}),
    Case("tp2", 2, dict(tp=2, sequence_parallel=True)),
    Case("pp2", 2, dict(pp=2)),
    Case("cp2", 2, dict(cp=2)),
    Case("pp2 dp2", 4, dict(pp=2)),
]


def numbered_samples() -> list[TrainSample]:
    return [replace(sample, index=i) for i, sample in enumerate(few_samples())]


def found(parallel: dict) -> tuple[list[float], list[tuple]]:
    """(the KL of each sample, (sample, its advantages in the batch) of this rank), for samples in two slices."""
    config = tiny_run(parallel, algorithm=ALGORITHM)
    layout = init_layout(config.parallel)
    samples = numbered_samples()
    policy, _, _ = prepare(config, tiny_model("llama_tied"), layout, samples)
    rules = packing_rules(config, policy.shares_prompts)
    parts = [[samples[i] for i in part] for part in slices(len(samples), 2, seed=3)]
    batches = [pack(part, rules, layout.dp_rank, layout.dp_size) for part in parts]
    batches = [b.with_terms(old_logprobs=policy.logprobs(b)) for b in batches]
    moved = [[None if row is None else 0.5 * row + 0.1 for row in policy.logprobs(b)] for b in batches]
    kl = kl_by_sample([b.with_terms(ref_logprobs=rows) for b, rows in zip(batches, moved, strict=True)], layout)
    held = []
    for m in [m for b in batches for m in b.with_advantages(torch.arange(1.0, len(samples) + 1)).micro_batches]:
        of_token = m.samples.repeat_interleave(m.cu_seqlens.diff().long())
        held += [(i, m.advantages[of_token == i].unique().tolist()) for i in of_token.unique().tolist()]
    layout.close()
    return kl.tolist(), held


@pytest.fixture(scope="module")
def one() -> list[float]:
    return run_ranks(found, 1, {})[0][0]


def naive() -> list[float]:
    """The oracle: each sample alone in its micro-batch."""
    config = tiny_run({}, algorithm=ALGORITHM, train=dict(share_prompts=False))
    layout, samples, sums = init_layout(config.parallel), numbered_samples(), []
    policy, _, _ = prepare(config, tiny_model("llama_tied"), layout, samples)
    for sample in samples:
        batch = pack([sample], packing_rules(config, False))
        rows = policy.logprobs(batch)[0][batch.micro_batches[0].loss_mask]
        sums.append(sum(0.5 * x - 0.1 for x in rows.tolist()))
    layout.close()
    return sums


def test_the_kl_of_a_response_is_the_sum_over_its_tokens(one):
    assert len(set(one)) > 4
    assert one == pytest.approx(run_ranks(naive, 1)[0], rel=1e-5)


@pytest.mark.parametrize("case", usual(CASES, 4), ids=str)
def test_every_rank_knows_the_kl_of_every_sample_and_its_own_samples_carry_their_advantages(case, one):
    results = run_ranks(found, case.ranks, case.parallel)
    for kl, held in results:
        assert kl == pytest.approx(one, rel=1e-5)
        assert held and all(advantages == [i + 1 if i >= 0 else 0] for i, advantages in held)
    assert {i for _, held in results for i, _ in held} - {-1} == set(range(len(one)))
