"""Truncated responses: their tokens leave the loss, but their rewards and their count among the sequences stay."""

import json
from pathlib import Path

import torch

from megagrpo.algorithms.advantages import group_advantages, to_samples
from megagrpo.algorithms.reductions import denominator
from megagrpo.config.sections.loss_table import LOSSES
from megagrpo.data.packing.sample_packing import PackingRules, pack
from megagrpo.data.packing.step_samples import StepSamples
from megagrpo.types import Prompt, Rollout, ScoredRollout
from tests.unit.for_each import for_each

CASES = json.loads((Path(__file__).parents[2] / "vectors" / "trl_advantage.json").read_text())["cases"]
PROMPT = (3, 1, 4)


def scored_rollouts(inputs):
    """The rollouts of a vector; the prompts of its groups differ in their first token."""
    ends = (inputs["eos_token_id"], inputs["pad_token_id"])
    made = []
    for i, (ids, (reward,)) in enumerate(zip(inputs["completion_ids"], inputs["rewards_per_func"], strict=True)):
        group = i // inputs["num_generations"]
        prompt = Prompt(group, (100 + group, *PROMPT), "")
        finish_reason = "stop" if ids[-1] in ends else "length"
        made.append(
            ScoredRollout(Rollout(prompt, tuple(ids), (-1.0,) * len(ids), finish_reason, 1, ""), {"f0": reward}, reward)
        )
    return made


@for_each("num_ranks", [1, 2])
@for_each("share_prompts", [False, True])
@for_each("case", [c for c in CASES if "completion_mask" in c])
def test_masks_and_counts_equal_trls(case, share_prompts, num_ranks):
    inputs = case["inputs"]
    scored = scored_rollouts(inputs)
    advantages = group_advantages(StepSamples.of(scored).rewards(inputs["num_generations"]), inputs["scale_rewards"])
    torch.testing.assert_close(
        advantages.flatten(), torch.tensor(case["advantages"], dtype=torch.float64), rtol=1e-5, atol=1e-6
    )
    rules = PackingRules(
        max_tokens=20, share_prompts=share_prompts, mask_truncated=inputs["mask_truncated_completions"]
    )
    batches = [pack(to_samples(scored, advantages), rules, rank, num_ranks) for rank in range(num_ranks)]
    assert {(b.num_tokens, b.num_sequences) for b in batches} == {(case["num_items_in_batch"], len(scored))}
    found = torch.zeros(len(scored), dtype=torch.int64)
    for micro_batch in (m for b in batches for m in b.micro_batches):
        owners = micro_batch.samples.repeat_interleave(micro_batch.cu_seqlens.diff().long())
        found += owners[micro_batch.loss_mask].bincount(minlength=len(scored))
    assert found.tolist() == [sum(row) for row in case["completion_mask"]]


def test_a_cut_response_divides_by_sequence_but_not_by_token():
    inputs = next(c for c in CASES if c["name"] == "mask_truncated/on")["inputs"]
    scored = scored_rollouts(inputs)
    samples = to_samples(scored, torch.ones(2, 4))
    batch = pack(samples, PackingRules(max_tokens=100, mask_truncated=True))
    by_type = {loss_type: denominator(batch, LOSSES[loss_type].average, 5) for loss_type in ("dapo", "grpo", "dr_grpo")}
    assert by_type == {"dapo": 20, "grpo": 8, "dr_grpo": 40}
    assert denominator(pack(samples, PackingRules(max_tokens=100)), "tokens", 5) == 29


def test_a_step_of_nothing_but_cut_responses_has_no_loss_token():
    inputs = next(c for c in CASES if c["name"] == "mask_truncated/on")["inputs"]
    cut = [s for s in to_samples(scored_rollouts(inputs), torch.ones(2, 4)) if s.truncated]
    batch = pack(cut, PackingRules(max_tokens=100, mask_truncated=True))
    assert len(cut) == 2 and batch.num_tokens == 0 and denominator(batch, "tokens", 5) == 1
    assert not any(m.loss_mask.any() for m in batch.micro_batches)
