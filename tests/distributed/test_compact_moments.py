"""Moments in fewer bits in a policy: the step is the same, and a run resumes from a checkpoint bit for bit."""

from unittest import mock

import pytest
import torch
from checkpoint_now import save_now
from ranks import run_ranks
from suites import usual
from tiny_policy import few_samples, tiny_model, tiny_run

from megagrpo.algorithms.losses import make_loss
from megagrpo.data.packing.sample_packing import pack, packing_rules
from megagrpo.platform.device.compact_adam import CompactAdam
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.optimizer import policy_optimizer as optimizer_module
from megagrpo.proof.verify.shrink import plainly
from megagrpo.proof.verify.verified_step import fill_weights, take_step, whole_tensors
from megagrpo.proof.verify.verify_compare import compare
from megagrpo.records.checkpoints.checkpoint import Checkpointer
from megagrpo.records.checkpoints.run_files import newest_checkpoint
from megagrpo.train_types import TrainState


def config(dtype: str, sharded: bool, precision: str = "fp32"):
    train = dict(optimizer_state_dtype=dtype, distributed_optimizer=sharded, share_prompts=False)
    return tiny_run({}, train=train, model=dict(precision=precision), algorithm=dict(beta=0.0))


def _train(folder, settings, steps: int, restart_after: int | None):
    layout, hf_config = init_layout(settings.parallel), tiny_model("llama_tied")
    policy = MegatronPolicy(settings, layout, hf_config)
    fill_weights(policy, hf_config, layout)
    policy.weights_changed()
    batch = pack(few_samples(), packing_rules(settings, policy.shares_prompts), layout.dp_rank, layout.dp_size)
    for step in range(steps):
        policy.train_step(batch, make_loss(settings.algorithm), batch.num_tokens)
        if step == restart_after:
            (folder / "config.json").write_text("{}")
            saver = Checkpointer(folder / "saved", layout, policy, 1, folder)
            save_now(saver, TrainState(step=1))
            policy = MegatronPolicy(settings, layout, hf_config)
            Checkpointer(folder / "saved", layout, policy, 1, folder).load(newest_checkpoint(saver.folder))
    parts = getattr(policy.optimizer, "chained_optimizers", [policy.optimizer])
    moments = {t.dtype for part in parts for state in part.optimizer.state.values() for t in state.values()}
    return whole_tensors(policy, hf_config, layout, lambda p: p.data)[0], moments


@pytest.mark.parametrize(("dtype", "sharded", "precision"), usual([("fp8", True, "bf16"), ("bf16", False, "fp32")], 0))
def test_a_run_that_stops_and_goes_on_has_the_same_weights(dtype, sharded, precision, tmp_path):
    settings = config(dtype, sharded, precision)
    whole, moments = run_ranks(_train, 2, tmp_path, settings, 3, None)[0]
    resumed, _ = run_ranks(_train, 2, tmp_path, settings, 3, 1)[0]
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())
    assert torch.float8_e4m3fn in moments if dtype == "fp8" else moments == {torch.bfloat16}


def test_the_first_step_is_that_of_float32_moments():
    (found,) = run_ranks(take_step, 1, config("fp8", False), tiny_model("llama_tied"), few_samples())
    (expected,) = run_ranks(take_step, 1, plainly(config("fp32", False)), tiny_model("llama_tied"), few_samples())
    assert [d for d in compare(found, expected) if not d.passed] == []


def _steps_as_on_a_gpu(folder, settings):
    """Weights and moment dtypes after three steps with a fake GPU for the optimizer, and the options of the Adam that
    was built."""
    options, original = [], CompactAdam.__init__

    def noting(self, *args, **kwargs):
        options.append(kwargs)
        original(self, *args, **kwargs)

    pretended = mock.Mock(wraps=optimizer_module.device, has_gpu=lambda: True)
    with mock.patch.object(optimizer_module, "device", pretended), mock.patch.object(CompactAdam, "__init__", noting):
        return _train(folder, settings, 3, None), options


def test_moments_that_wait_in_the_hosts_memory_take_the_same_steps(tmp_path):
    """The steps are equal bit for bit. Without a GPU there is only host memory, so the test also checks the options
    passed to Adam."""
    offloading = config("fp32", False)
    offloading = offloading.model_copy(
        update=dict(train=offloading.train.model_copy(update=dict(optimizer_offload=True)))
    )
    ((found, moments), options), *_ = run_ranks(_steps_as_on_a_gpu, 1, tmp_path, offloading)
    (expected, _), *_ = run_ranks(_train, 1, tmp_path, config("fp32", False), 3, None)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert moments == {torch.float32} and [(made["offload"], made["dtype"]) for made in options] == [
        (True, torch.float32)
    ]


def _offload() -> str:
    settings = config("fp32", True)
    settings = settings.model_copy(update=dict(train=settings.train.model_copy(update=dict(optimizer_offload=True))))
    with pytest.raises(ValueError, match="true needs a GPU, and this machine has none; set it to false") as refused:
        MegatronPolicy(settings, init_layout(settings.parallel), tiny_model("llama_tied"))
    return str(refused.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_there_is_nothing_to_offload():
    assert run_ranks(_offload, 1)[0].startswith("train.optimizer_offload:")
