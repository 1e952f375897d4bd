"""One group larger than a micro-batch, on more data-parallel ranks than prompts: the gradient equals the gradient of
the whole group to float64 precision."""

import math

import pytest
import torch
from ranks import run_ranks
from suites import usual
from test_exact_gradients import config, in_float64, ranks, row_of, worst_gradient
from tiny_policy import tiny_model

from megagrpo.algorithms.advantages import advantages_of, to_samples
from megagrpo.config import RunConfig
from megagrpo.data.packing.sample_packing import pack, packing_rules
from megagrpo.data.packing.step_samples import StepSamples
from megagrpo.proof.verify.shrink import VOCABULARY, plainly
from megagrpo.train_types import TrainSample
from megagrpo.types import Prompt, Rollout, ScoredRollout

GROUP = 10
MODEL = "llama_tied"


def one_group(made: RunConfig) -> list[TrainSample]:
    """Ten responses to one prompt, with advantages of the whole group; one response has no reward and one was
    truncated."""
    generator = torch.Generator().manual_seed(3)

    def tokens(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, VOCABULARY, (n,), generator=generator).tolist())

    prompt = Prompt(0, tokens(5), "")
    scored = []
    for i in range(GROUP):
        ids, reward = tokens(2 + i), math.nan if i == 4 else math.sin(i)
        finish_reason = "length" if i == GROUP - 1 else "stop"
        rollout = Rollout(prompt, ids, tuple(-4.5 - 0.01 * (20 * i + j) for j in range(len(ids))), finish_reason, 1, "")
        scored.append(ScoredRollout(rollout, {"f": None if i == 4 else reward}, reward))
    samples = StepSamples.of(scored)
    tables = samples.rewards(GROUP), samples.rewards_by_function(GROUP)
    return to_samples(scored, advantages_of(*tables, made.algorithm, ()))


def small(row: dict, loss: str, mask_truncated: bool, max_tokens: int) -> RunConfig:
    made = config(row, loss)
    algorithm = made.algorithm.model_copy(update=dict(mask_truncated_completions=mask_truncated))
    return made.model_copy(
        update=dict(
            algorithm=algorithm, train=made.train.model_copy(update=dict(max_tokens_per_micro_batch=max_tokens))
        )
    )


@pytest.mark.parametrize(
    ("loss", "mask_truncated"), usual([("grpo", True), ("dapo", False), ("grpo", False), ("dapo", True)], 0)
)
def test_a_group_may_exceed_a_micro_batch_and_the_share_of_a_rank(loss, mask_truncated):
    whole = plainly(small(row_of(MODEL), loss, mask_truncated, max_tokens=1000))
    samples = one_group(whole)
    alone = pack(samples, packing_rules(whole, share_prompts=False))
    assert len(alone.micro_batches) == 1 and alone.num_sequences == GROUP
    expected = run_ranks(in_float64, 1, whole, tiny_model(MODEL), samples)[0]
    row = row_of(MODEL, dp=3)
    spread = small(row, loss, mask_truncated, max_tokens=20)
    parts = [pack(samples, packing_rules(spread, share_prompts=False), rank, 3) for rank in range(3)]
    # each rank has several, and each contains a part of the group
    assert all(len(part.micro_batches) > 1 for part in parts)
    assert all(part.num_tokens == alone.num_tokens and part.num_sequences == GROUP for part in parts)
    found = run_ranks(in_float64, ranks(row), spread, tiny_model(MODEL), samples)[0]
    assert worst_gradient(found, expected) < (1e-13, "")
