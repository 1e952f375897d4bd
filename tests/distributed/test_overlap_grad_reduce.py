"""Gradients reduced during the backward pass equal the usual gradients for any bucket size; a NaN in them is
detected."""

import math

import pytest
import torch
from checkpoint_now import save_now
from ranks import run_ranks
from tiny_policy import few_samples, tiny_model, tiny_run

from megagrpo.algorithms.losses import make_loss
from megagrpo.data.packing.sample_packing import pack, packing_rules, padded
from megagrpo.families.hf_config import HfConfig
from megagrpo.platform.parallel.layout import Layout, init_layout
from megagrpo.policy.find_nan import NonFiniteError
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.proof.verify.verified_step import fill_weights, whole_tensors
from megagrpo.records.checkpoints.checkpoint import Checkpointer
from megagrpo.records.checkpoints.run_files import newest_checkpoint
from megagrpo.records.rows.step_metrics import values_of
from megagrpo.train_types import TrainState

BUCKETS = dict(overlap_grad_reduce=True, ddp_bucket_size=3000)  # several in the small models
CASES = {  # model, ranks, parallel, distributed optimizer
    "dp2": ("llama_tied", 2, {}, False),
    "dp2_sharded": ("llama_tied", 2, {}, True),
    "pp2_dp2": ("llama_tied", 4, dict(pp=2), True),
    "pp2_vpp2_dp2": ("qwen3_untied", 4, dict(pp=2, vpp=2), True),
    "tp2_cp2": ("qwen2_untied", 4, dict(tp=2, cp=2, sequence_parallel=True), False),
    "ep2_dp2": ("qwen3_moe", 2, dict(ep=2), True),
    "experts_dp2": ("mixtral", 2, {}, True),
}
USUAL = ("dp2_sharded",)


def config(parallel: dict, **train):
    """A run of several micro-batches, each as long as the longest sample."""
    whole = tiny_run(parallel, train=train, algorithm=dict(beta=0.0))
    tokens = padded(whole.max_model_len, whole.micro_batch_align)
    return whole.model_copy(update=dict(train=whole.train.model_copy(update=dict(max_tokens_per_micro_batch=tokens))))


class Training:
    """A policy with given weights, and steps of it on given samples."""

    def __init__(self, settings, model: str | HfConfig, layout: Layout | None = None):
        self.layout = layout or init_layout(settings.parallel)
        self.hf_config = tiny_model(model) if isinstance(model, str) else model
        self.policy = MegatronPolicy(settings, self.layout, self.hf_config)
        fill_weights(self.policy, self.hf_config, self.layout)
        self.policy.weights_changed()
        rules = packing_rules(settings, self.policy.shares_prompts)
        samples = few_samples()
        parts = (samples, samples[: len(samples) // 2])
        self.batches = [pack(part, rules, self.layout.dp_rank, self.layout.dp_size) for part in parts]
        self.loss, self.steps = make_loss(settings.algorithm), 0
        assert len(self.batches[0].micro_batches) > len(self.batches[1].micro_batches)

    def step(self) -> dict[str, float]:
        """Take a step; every other step has fewer micro-batches."""
        batch = self.batches[self.steps % 2]
        self.steps += 1
        return values_of(self.policy.train_step(batch, self.loss, batch.num_tokens))

    def weights(self) -> dict[str, torch.Tensor]:
        return whole_tensors(self.policy, self.hf_config, self.layout, lambda p: p.data)[0]

    def under_way(self) -> list[bool]:
        """For every bucket, whether its all-reduce has begun."""
        return [
            group.grad_reduce_handle is not None
            for chunk in self.policy.model
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups
        ]


def _three_steps(settings, model: str) -> tuple[dict, list[dict], list[bool]]:
    """Weights and metrics after three steps, and the buckets in reduction when the third backward pass ended."""
    training, seen = Training(settings, model), []
    finalize = training.policy._finalize_gradients

    def look_and_finalize(*args, **kwargs):
        seen[:] = training.under_way()
        finalize(*args, **kwargs)

    for chunk in training.policy.chunks:
        chunk.config.finalize_model_grads_func = look_and_finalize
    metrics = [training.step() for _ in range(3)]
    return training.weights(), metrics, seen


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[] if name in USUAL else pytest.mark.full) for name in CASES]
)
def test_steps_are_those_without_overlap_and_sums_begin_before_the_backward_pass_ends(case):
    model, ranks, parallel, sharded = CASES[case]
    found = run_ranks(_three_steps, ranks, config(parallel, distributed_optimizer=sharded, **BUCKETS), model)
    expected = run_ranks(
        _three_steps, ranks, config(parallel, distributed_optimizer=sharded, overlap_grad_reduce=False), model
    )
    for (weights, metrics, under_way), (plain_weights, plain_metrics, plain) in zip(found, expected, strict=True):
        for row, plain_row in zip(
            metrics, plain_metrics, strict=True
        ):  # ranks own other parts of the gradient, and its norm is a sum over the parts
            assert row == plain_row | dict(grad_norm=pytest.approx(plain_row["grad_norm"], rel=1e-6))
        # a sum of two replicas does not depend on the bucket borders, and nothing is clipped
        assert weights.keys() == plain_weights.keys() and all(
            torch.equal(weights[name], tensor) for name, tensor in plain_weights.items()
        )
        assert all(under_way) and not any(plain)
    assert len(found[0][2]) > 2


def _restart(folder, first, then, model: str):
    """Weights after two steps and after a third, with and without a restart in between that changes options."""
    (folder / "config.json").write_text("{}")
    before = Training(first, model)
    before.step(), before.step()
    save_now(Checkpointer(folder / "saved", before.layout, before.policy, 1, folder), TrainState(step=2))
    before.step()
    after = Training(then, model, before.layout)
    saved = Checkpointer(folder / "saved", after.layout, after.policy, 1, folder)
    after.steps = saved.load(newest_checkpoint(saved.folder)).step
    after.step()
    return before.weights(), after.weights()


@pytest.mark.full
def test_a_checkpoint_goes_on_with_other_buckets(tmp_path):
    buckets, one = (
        config({}, distributed_optimizer=True, **BUCKETS),
        config({}, distributed_optimizer=True, overlap_grad_reduce=False),
    )
    for name, first, then in (("buckets", buckets, one), ("one", one, buckets)):
        (tmp_path / name).mkdir()
        for unbroken, resumed in run_ranks(_restart, 2, tmp_path / name, first, then, "llama_tied"):
            assert all(torch.equal(resumed[key], tensor) for key, tensor in unbroken.items())


def _nan_on_one_rank() -> tuple[str, bool]:
    """The message of a step with a NaN in one rank's gradient, whether nothing changed, and whether the next step is
    good."""
    training = Training(config({}, **BUCKETS), "llama_tied")
    training.step()
    before = training.weights()
    parameter = next(p for p in training.policy.chunks[0].decoder.parameters() if p.requires_grad)
    spoil = parameter.register_hook(lambda g: g * (math.nan if training.layout.dp_rank == 1 else 1))
    with pytest.raises(NonFiniteError) as raised:
        training.step()
    spoil.remove()
    unchanged = all(torch.equal(before[name], tensor) for name, tensor in training.weights().items())
    return str(raised.value), unchanged and math.isfinite(training.step()["grad_norm"])


def test_a_nan_is_found_in_the_sum():
    said = run_ranks(_nan_on_one_rank, 2)
    assert all(
        good and "NaN or infinity in gradient summed over ranks decoder.layers.0" in text for text, good in said
    ), said
