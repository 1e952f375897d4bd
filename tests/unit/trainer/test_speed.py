"""Rates and memory of a step."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megagrpo.config import load_config
from megagrpo.families.hf_config import parse_hf_config
from megagrpo.planner.costs.flops import step_flops
from megagrpo.records.rows.recorder import Update
from megagrpo.train_types import ComputedTokens, TrainBatch
from megagrpo.trainer.recording import Speed, make_speed
from tests.unit.records.test_metrics import CONFIG

LLAMA = dict(
    **dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=64, intermediate_size=160)
    | dict(num_hidden_layers=2),
    **dict(
        num_attention_heads=4, num_key_value_heads=2, vocab_size=512, max_position_embeddings=256, rms_norm_eps=1e-6
    ),
)
TIMES = {"time/step": 10.0, "time/generate": 4.0, "time/train": 2.0}


def speed(*overrides: str, world_size: int = 2) -> Speed:
    layout = SimpleNamespace(world_size=world_size, all_reduce=lambda own, reduction: torch.maximum(own, 2 * own))
    config = load_config(CONFIG, overrides)
    policy = SimpleNamespace(layout=layout, hf_config=parse_hf_config(LLAMA), dtype=torch.float32)
    return make_speed(policy, config.rollout, config.run.peak_tflops, config.lora.enabled)


def test_rates_are_tokens_per_second_of_the_step_and_of_generation():
    metrics = speed().metrics(1000, 400, TIMES)
    assert metrics["tokens_per_second"] == 100 and metrics["tokens_per_second_per_gpu"] == 50
    assert metrics["generated_tokens_per_second"] == 100 and "mfu" not in metrics
    assert "generated_tokens_per_second" not in speed().metrics(1000, 400, {"time/step": 10.0})
    ahead = ["rollout.max_staleness=1", "rollout.placement=dedicated", "algorithm.importance_correction=token_truncate"]
    ahead += ["algorithm.importance_correction_max=2.0"]
    assert speed(*ahead).metrics(1000, 400, TIMES)["generated_tokens_per_second"] == 40


def test_mfu_is_the_share_of_the_given_peak_during_training_and_starts_again_each_step():
    made, tokens = speed("run.peak_tflops=0.5"), ComputedTokens(np.array([[0, 50], [0, 30]]), 40)
    for _ in range(2):
        made.after_update(Update(TrainBatch((), 0, 0, computed=tokens), None, 1))
    flops = 2 * step_flops(made.hf_config, tokens.spans, tokens.num_loss)
    assert made.metrics(1000, 400, TIMES)["mfu"] == pytest.approx(flops / (2.0 * 2 * 0.5e12))
    assert made.metrics(1000, 400, TIMES)["mfu"] == 0
    assert "mfu" not in made.metrics(1000, 400, {"time/step": 10.0})


def test_memory_is_of_this_rank_the_fullest_rank_and_the_host():
    metrics = speed().metrics(1000, 400, TIMES)
    assert 0 < metrics["memory/resident_gb"] <= metrics["memory_gb"] * 1.01
    assert metrics["memory/resident_max_gb"] == pytest.approx(2 * metrics["memory/resident_gb"])
    assert metrics["memory/host_gb"] > metrics["memory/resident_gb"] / 2
