"""Valid combinations of optimizers, and of ways to sum gradients."""

import importlib.util

import pytest

from megagrpo.config import TrainSection
from megagrpo.policy.optimizer.policy_optimizer import build_optimizer
from tests.unit.config.test_config import SMALLEST, problems, write

MUON = ["train.optimizer=muon", "train.distributed_optimizer=false"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (MUON[:1], "train.distributed_optimizer: true shards matrices, but train.optimizer muon needs whole matrices"),
        ([*MUON, "lora.rank=8"], "train.optimizer: muon does not support adapters (lora.rank > 0); choose adam"),
        (
            [*MUON, "train.optimizer_state_dtype=fp8"],
            "train.optimizer_state_dtype: train.optimizer muon keeps its momentum in fp32",
        ),
        (
            [*MUON, "train.optimizer_offload=true"],
            "train.optimizer_state_dtype: train.optimizer muon keeps its momentum in fp32",
        ),
        (
            ["train.overlap_grad_reduce=false", "train.ddp_bucket_size=9"],
            "train.ddp_bucket_size: 9 only applies with train.overlap_grad_",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, overrides, message):
    _, problem = problems(write(tmp_path, SMALLEST), *overrides)
    assert problem.startswith(message)


def test_muon_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="muon needs a package that is not installed; pip install emerging-optimizers"):
        build_optimizer([], TrainSection(optimizer="muon", distributed_optimizer=False), None)
