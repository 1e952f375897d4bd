"""The same seed and layout give the same bits after several steps, also in other processes."""

import hashlib
import os

import pytest
import torch
from ranks import run_ranks
from tiny_policy import Case, few_samples, tiny_model

from megagrpo.algorithms.losses import make_loss
from megagrpo.algorithms.reductions import denominator
from megagrpo.data.packing.sample_packing import pack, packing_rules
from megagrpo.platform import device
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.reference import Reference
from megagrpo.proof.verify.verified_step import fill_weights
from megagrpo.records.rows.step_metrics import values_of

STEPS = 3
CASES = [
    Case("one_rank", 1, {}),
    Case("tp2_dp2_sequence_parallel", 4, dict(tp=2, sequence_parallel=True), train=dict(distributed_optimizer=True)),
    Case("pp2", 2, dict(pp=2)),
]


def _steps(case, deterministic=False):
    """Metrics of every step, and a hash of this rank's weights after each."""
    if deterministic:
        device.make_deterministic()
    settings, hf = case.config(), tiny_model("llama_tied")
    layout = init_layout(settings.parallel)
    policy = MegatronPolicy(settings, layout, hf)
    fill_weights(policy, hf, layout)
    policy.weights_changed()
    reference = Reference(policy)
    seen = []
    for _ in range(STEPS):
        batch = reference.annotate(
            pack(few_samples(), packing_rules(settings, policy.shares_prompts), layout.dp_rank, layout.dp_size)
        )
        metrics = values_of(
            policy.train_step(batch, make_loss(settings.algorithm), denominator(batch, "sequence_means", 16))
        )
        weights = b"".join(p.detach().numpy().tobytes() for chunk in policy.chunks for p in chunk.parameters())
        seen.append((metrics, hashlib.sha256(weights).hexdigest()))
    modes = torch.are_deterministic_algorithms_enabled(), {chunk.config.deterministic_mode for chunk in policy.chunks}
    return (
        seen,
        modes,
        {
            name: os.environ.get(name)
            for name in ("NCCL_ALGO", "CUBLAS_WORKSPACE_CONFIG", "NVTE_ALLOW_NONDETERMINISTIC_ALGO")
        },
    )


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_steps_give_the_same_bits(case):
    one, other = ([seen for seen, *_ in run_ranks(_steps, case.ranks, case)] for _ in range(2))
    assert one == other
    hashes = {digest for _, digest in one[0]}
    assert len(hashes) == STEPS  # the weights changed in every step


def test_asking_for_determinism_reaches_torch_megatron_and_the_libraries():
    plain, asked = (run_ranks(_steps, 1, CASES[0], deterministic)[0] for deterministic in (False, True))
    assert plain[1:] == ((False, {False}), dict.fromkeys(asked[2]))
    assert asked[1:] == (
        (True, {True}),
        dict(NCCL_ALGO="Ring", CUBLAS_WORKSPACE_CONFIG=":4096:8", NVTE_ALLOW_NONDETERMINISTIC_ALGO="0"),
    )
    for (found, _), (expected, _) in zip(asked[0], plain[0], strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_what_the_user_chose_stays():
    env = dict(NCCL_ALGO="Tree", CUBLAS_WORKSPACE_CONFIG=":16:8")
    assert run_ranks(_steps, 1, CASES[0], True, env=env)[0][2] == env | {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
