"""Which log-probs a batch gets before its optimizer steps."""

from types import SimpleNamespace

import pytest
import torch
from tiny_policy import tiny_run

from megagrpo.data.packing.sample_packing import PackingRules, pack
from megagrpo.platform.process.phases import Phases
from megagrpo.proof.verify.shrink import random_samples
from megagrpo.records.rows.recorder import Recorder
from megagrpo.train_types import TrainState
from megagrpo.trainer.policy_update import Learning


@pytest.mark.parametrize(
    ("algorithm", "has_old"),
    [({}, False), (dict(steps_per_generation=2), True), (dict(num_iterations=2), True)],
    ids=str,
)
def test_a_step_of_several_updates_clips_against_the_policy_before_the_first(algorithm, has_old):
    batch = pack(random_samples(), PackingRules(max_tokens=1000))
    rows = [torch.full((m.num_tokens,), -2.0) for m in batch.micro_batches]
    config = tiny_run()
    # tiny_run has one slice
    config = config.model_copy(update=dict(algorithm=config.algorithm.model_copy(update=algorithm)))
    policy = SimpleNamespace(logprobs=lambda batch: rows)
    learning = Learning(config, policy, None, None, TrainState(), Recorder(), Phases(), print)
    (found,) = {m.terms.old_logprobs is not None for m in learning.with_logprobs(batch).micro_batches}
    assert found == has_old
