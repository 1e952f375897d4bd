import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from megagrpo.data.packing.step_samples import StepSamples
from megagrpo.records.rows.recorder import TrainedRollouts
from megagrpo.records.rows.token_log import TOKENS_FILE, TokenLog, chosen_samples, values_of_samples
from megagrpo.train_types import LossInputs, LossOutput, MicroBatch
from megagrpo.types import Dialogue, Prompt, Rollout, ScoredRollout
from tests.unit.proof.report.synthetic import OneRank, Texts

GROUP = 2


def micro_batch(samples: list[int], lengths: list[int], prompt: int = 2) -> MicroBatch:
    """Sequences with `prompt` tokens before their loss tokens; -1 is padding."""
    borders = torch.tensor([0, *lengths]).cumsum(0).int()
    total = int(borders[-1])
    mask = torch.tensor(
        [sample >= 0 and i >= prompt for sample, n in zip(samples, lengths, strict=True) for i in range(n)]
    )
    row = torch.zeros(total)
    index = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return MicroBatch(row.long(), row.long(), row.long(), borders, mask, row, row, torch.tensor(samples), index)


def inputs(batch: MicroBatch, first: float = 0.0) -> LossInputs:
    numbers = first - torch.arange(batch.num_tokens) / 16
    return LossInputs(numbers.requires_grad_(), -numbers.detach(), batch)


def scored(count: int, length: int = 3, **changes) -> list[ScoredRollout]:
    rollouts = [
        Rollout(Prompt(i // GROUP, (1,), "q"), tuple(range(length)), (-0.12345,) * length, "stop", 1, "a", **changes)
        for i in range(count)
    ]
    return [ScoredRollout(rollout, {}, 0.0) for rollout in rollouts]


def loss(given: LossInputs) -> LossOutput:
    return LossOutput(given.policy_logprobs.sum(), {})


def log(tmp_path, groups: int = 1) -> TokenLog:
    made = TokenLog(OneRank(), Texts(), groups, GROUP, print)  # type: ignore[arg-type]
    made.open(tmp_path, 0)
    return made


def trained(advantages: list[float]) -> TrainedRollouts:
    return TrainedRollouts(1, StepSamples.of(scored(len(advantages))), advantages)


def lines(tmp_path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / TOKENS_FILE).read_text().splitlines()]


def test_the_groups_with_the_largest_range_of_advantages_are_chosen():
    advantages, pairs = [0.1, -0.1, 1.0, -1.0, 0.0, 0.0, 2.0, -0.5, math.nan, 5.0], np.repeat(np.arange(5), 2)
    assert chosen_samples(advantages, pairs, 1) == [6, 7] and chosen_samples(advantages, pairs, 2) == [2, 3, 6, 7]
    assert chosen_samples(advantages, pairs, 9) == list(range(8)) and chosen_samples(advantages, pairs, 0) == []
    assert chosen_samples([0.0] * 4, pairs[:4], 1) == [0, 1] and chosen_samples([], pairs[:0], 1) == []


def test_a_line_holds_the_rounded_numbers_of_each_loss_token(tmp_path):
    tokens, batch = log(tmp_path), micro_batch([3, 2, -1], [5, 5, 2])
    tokens.begin(trained([0.0, 0.0, 1.0, -1.0]))
    recorded = tokens.wrap_loss(loss)
    recorded(inputs(batch, first=-9))  # computed in advance
    assert recorded(inputs(batch)).numerator.item() == loss(inputs(batch)).numerator.item()
    tokens.after_update(None)
    tokens.finish(TrainedRollouts(7, StepSamples.of(scored(4)), []))
    first, second = lines(tmp_path)
    assert first == {
        "step": 7, "sample": 2, "prompt_id": 1, "tokens": [" sum", " sums", " suming"], "rollout_logprobs": [-0.123] * 3,
        "trainer_logprobs": [-0.438, -0.5, -0.562], "entropy": [0.438, 0.5, 0.562],
    }  # fmt: skip
    assert second["sample"] == 3 and second["trainer_logprobs"] == [-0.125, -0.188, -0.25]


def test_old_log_probs_count_and_a_second_pass_over_a_sample_does_not(tmp_path):
    tokens, batch = log(tmp_path), micro_batch([0, 1], [5, 5])
    tokens.begin(trained([1.0, -1.0]))
    for first in (0.0, -5.0):
        tokens.wrap_loss(loss)(inputs(batch.with_terms(old_logprobs=torch.full((10,), -0.75)), first))
        tokens.after_update(None)
    tokens.finish(TrainedRollouts(1, StepSamples.of(scored(2)), []))
    assert [row["trainer_logprobs"] for row in lines(tmp_path)] == [[-0.75] * 3] * 2
    assert [row["entropy"][0] for row in lines(tmp_path)] == [0.125, 0.438]


def test_a_prompt_shared_by_samples_has_no_values_of_samples_its_own():
    columns = [
        torch.arange(8.0),
        torch.zeros(8),
        torch.tensor([False] * 4 + [True] * 4),
        torch.tensor([0, 4, 6, 8]),
        torch.tensor([5, 5, 6]),
    ]
    assert values_of_samples(columns, {5, 6}) == {5: ([4, 5], [0, 0]), 6: ([6, 7], [0, 0])}
    assert values_of_samples(columns, {6}) == {6: ([6, 7], [0, 0])} and values_of_samples(columns, set()) == {}


def test_tokens_that_the_policy_did_not_write_or_that_were_not_trained_are_null(tmp_path):
    tokens = log(tmp_path)
    tokens.begin(trained([1.0, -1.0]))
    tokens._values = {0: ([-0.5, -0.25], [0.1, 0.2])}
    dialogue = Dialogue(written=(True, False, True), messages=(), turns=(), ended="done")
    tokens.finish(TrainedRollouts(1, StepSamples.of(scored(2, dialogue=dialogue)), []))
    first, second = lines(tmp_path)
    assert first["trainer_logprobs"] == [-0.5, None, -0.25] and first["entropy"] == [0.1, None, 0.2]
    assert second["trainer_logprobs"] == second["entropy"] == [None] * 3


def test_without_groups_or_on_other_tensor_parallel_ranks_the_loss_is_untouched(tmp_path):
    tokens = log(tmp_path, groups=0)
    tokens.begin(trained([1.0, -1.0]))
    assert tokens.wrap_loss(loss) is loss
    tokens.after_update(None)
    tokens.finish(TrainedRollouts(1, StepSamples.of(scored(2)), []))
    assert not (tmp_path / TOKENS_FILE).exists()
    other = log(tmp_path)
    other.layout.tp_rank = 1  # type: ignore[union-attr, misc]
    other.begin(trained([1.0, -1.0]))
    assert other.wrap_loss(loss) is loss


def test_a_resumed_run_drops_the_tokens_after_its_checkpoint(tmp_path):
    tokens = log(tmp_path)
    for step in (1, 2, 3):
        tokens.begin(trained([1.0, -1.0]))
        tokens.finish(TrainedRollouts(step, StepSamples.of(scored(2)), []))
    tokens.close()
    TokenLog(OneRank(), Texts(), 1, GROUP).open(tmp_path, 2)  # type: ignore[arg-type]
    assert [row["step"] for row in lines(tmp_path)] == [1, 1, 2, 2]


@pytest.mark.parametrize("fault", ["open", "write"])
def test_a_full_disk_is_a_warning_and_training_continues(tmp_path, fault):
    said: list[str] = []
    tokens = TokenLog(OneRank(), Texts(), 1, GROUP, said.append)  # type: ignore[arg-type]
    if fault == "open":
        tokens.open(tmp_path / "missing", 0)
    else:
        tokens.open(tmp_path, 0)
        tokens._file._file = open("/dev/full", "ab", buffering=0)  # type: ignore[union-attr]
    tokens.begin(trained([1.0, -1.0]))
    tokens.finish(TrainedRollouts(1, StepSamples.of(scored(2)), []))
    tokens.finish(TrainedRollouts(2, StepSamples.of(scored(2)), []))
    assert len(said) == 1 and said[0].startswith(
        f"warning: {TOKENS_FILE} failed and may be incomplete; training continues. "
    )


def test_a_line_has_the_advantage_of_each_token_that_the_policy_wrote(tmp_path):
    dialogue = Dialogue([True, False, True], (), (), "done")
    own = (np.array([0.5, 9.0, -0.25], np.float32),)
    group = [replace(s, token_advantages=own) for s in scored(2, dialogue=dialogue)]
    tokens = log(tmp_path)
    tokens.begin(TrainedRollouts(1, StepSamples.of(group), [1.0, -1.0]))
    tokens.finish(TrainedRollouts(1, StepSamples.of(group), [1.0, -1.0]))
    assert [line["advantages"] for line in lines(tmp_path)] == [[1.5, None, 0.75], [-0.5, None, -1.25]]
