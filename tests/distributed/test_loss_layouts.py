"""Every loss and its options: a layout's step equals one process's step, including quantities of the whole step.

`test_options_by_layouts.py` tests the layouts; here a few of them run with every way to compute a loss.
"""

import functools
from dataclasses import replace

import pytest
import torch
from ranks import run_ranks
from suites import usual
from tiny_policy import few_samples, tiny_model, tiny_run

from megagrpo.algorithms.losses import make_loss
from megagrpo.data.packing.readings import with_readings, with_teachers
from megagrpo.data.packing.sample_packing import SampleShapes, build_batch, packing_rules, plan_packing
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.teacher import build_teachers
from megagrpo.proof.verify.shrink import plainly
from megagrpo.proof.verify.verified_step import fill_weights, take_step
from megagrpo.proof.verify.verify_compare import compare, silent_tensors
from megagrpo.records.rows.step_metrics import values_of

MODEL = "llama_tied"
LOSSES = {
    "grpo": dict(loss_type="grpo"),
    "grpo delta": dict(loss_type="grpo", delta=1.1, epsilon=0.1, epsilon_high=0.3),
    "gspo": dict(loss_type="grpo", importance_sampling_level="sequence", epsilon=0.02, epsilon_high=0.05),
    "gspo token kl": dict(
        loss_type="dapo", importance_sampling_level="sequence_token", beta=0.1, use_bias_correction_kl=True
    ),
    "bnpo": dict(loss_type="bnpo"),
    "dapo": dict(loss_type="dapo"),
    "dr_grpo": dict(loss_type="dr_grpo"),
    "luspo": dict(loss_type="luspo"),
    "cispo": dict(loss_type="cispo", epsilon_high=1.2),
    "sapo": dict(loss_type="sapo"),
    "vespo": dict(loss_type="vespo"),
    "gmpo": dict(loss_type="gmpo", epsilon=0.2),
    "fipo": dict(loss_type="fipo", delta=1.2),
    "off-policy mask": dict(loss_type="grpo", off_policy_mask_threshold=0.0, importance_correction="token_truncate"),
    "token correction": dict(loss_type="dapo", importance_correction="token_mask", importance_correction_max=1.05),
    "token rejection": dict(loss_type="dapo", importance_correction="token_reject", importance_correction_max=1.2),
    "sequence correction": dict(
        loss_type="sapo", importance_correction="sequence_truncate", importance_correction_max=1.05
    ),
    "geometric correction": dict(
        loss_type="luspo", importance_correction="geometric_mask", importance_correction_min=0.8
    ),
    "vespo correction": dict(loss_type="vespo", importance_correction="token_mask", importance_correction_max=1.2),
    "top entropy": dict(loss_type="dapo", top_entropy_quantile=0.3, beta=0.1),
    "entropy bonus": dict(loss_type="grpo", entropy_coef=0.5),
    "entropy bonus on top": dict(loss_type="dr_grpo", entropy_coef=0.5, top_entropy_quantile=0.5),
    "entropy bonus, exact KL": dict(loss_type="bnpo", entropy_coef=0.5, beta=0.1, kl_estimator="full_reverse"),
    "entropy bonus, gspo": dict(loss_type="grpo", entropy_coef=0.5, importance_sampling_level="sequence"),
}
# Losses whose gradient at a token depends on more than that token.
FAR = [
    "gspo",
    "vespo correction",
    "gmpo",
    "fipo",
    "off-policy mask",
    "token rejection",
    "entropy bonus on top",
]
LAYOUTS = {
    "dp2": (2, {}, dict(distributed_optimizer=True, share_prompts=False)),  # groups are split over the ranks
    "cp2": (2, dict(cp=2), dict(share_prompts=True)),
    "tp2 dp2": (4, dict(tp=2, sequence_parallel=True), dict(share_prompts=True)),
    "pp2 cp2": (4, dict(pp=2, cp=2), dict(share_prompts=False)),
}


# Quantities that ranks must exchange before their first token; every suite runs these.
WHOLE_STEP = ["entropy bonus", "top entropy"]


def _steps(names, parallel, train):
    """One step for each loss, in the same world; with default options unless `train` sets others."""
    outcomes = {}
    for name in names:
        options = dict(distributed_optimizer=False) | (train or {})
        config = tiny_run(parallel, algorithm=dict(beta=0.0) | LOSSES[name], train=options)
        outcomes[name] = take_step(config if train else plainly(config), tiny_model(MODEL), few_samples())
    return outcomes


@functools.cache
def one_process(*names):
    return run_ranks(_steps, 1, names, {}, None)[0]


@functools.cache
def in_layout(layout, *names):
    ranks, parallel, train = LAYOUTS[layout]
    return run_ranks(_steps, ranks, names, parallel, train)[0]


def _check(name, found, expected):
    assert silent_tensors(expected[name]) == []
    assert [d for d in compare(found[name], expected[name]) if not d.passed] == []


@pytest.mark.parametrize("name", usual(WHOLE_STEP, 0, 1))
def test_a_loss_that_depends_on_the_whole_step_is_the_same_over_data_parallel_ranks(name):
    _check(name, in_layout("dp2", *WHOLE_STEP), one_process(*WHOLE_STEP))


@pytest.mark.full
@pytest.mark.parametrize("name", FAR)
def test_a_loss_that_looks_beyond_its_token_is_the_same_over_context_parallel_ranks(name):
    _check(name, in_layout("cp2", *FAR), one_process(*FAR))


@pytest.mark.full
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "dp2"])
def test_a_step_with_this_loss_equals_that_of_one_process(layout, name):
    _check(name, in_layout(layout, *LOSSES), one_process(*LOSSES))


def _step_of_nothing(name):
    """Loss and largest gradient of a step whose tokens are all masked."""
    config = tiny_run({}, algorithm=dict(beta=0.0) | LOSSES[name], train=dict(distributed_optimizer=False))
    samples = [replace(s, response_mask=torch.zeros_like(s.response_mask)) for s in few_samples()]
    outcome = take_step(config, tiny_model(MODEL), samples)
    return outcome and (
        outcome.metrics["loss"],
        max(float(gradient.abs().max()) for gradient in outcome.gradients.values()),
    )


def _taught_by_itself(prompt):
    """Loss, gradient norm and divergences of a policy that teaches itself on samples without advantages: after their own
    prompt, or one token more of it."""
    overs = ("vocabulary", 5, "sampled")
    teachers = [dict(path="policy", prompt=prompt, over=over) for over in overs]
    config = tiny_run(dict(cp=2), algorithm=dict(beta=0.0, teacher=teachers), train=dict(share_prompts=True))
    layout, shape = init_layout(config.parallel), tiny_model(MODEL)
    policy = MegatronPolicy(config, layout, shape)
    fill_weights(policy, shape, layout)
    policy.weights_changed()
    read = []
    for sample in few_samples():
        start = int(sample.response_mask.int().argmax())
        ids = [*([7] if prompt != "{prompt}" else []), *sample.token_ids[:start].tolist()]
        plain = replace(sample, advantage=0.0)
        read.append(
            with_teachers(plain, dict.fromkeys(config.algorithm.teachers, ids), sample.token_ids.numel() - start)
        )
    rules = packing_rules(config, policy.shares_prompts)
    plan = plan_packing(SampleShapes.of(read, rules), rules, layout.dp_size)
    batch = build_batch(plan, layout.dp_rank, dict(enumerate(read)), rules)
    batch = with_readings(batch, plan, layout.dp_rank, dict(enumerate(read)), rules)
    for teacher in build_teachers(config, policy, None, [None] * 3):
        batch = teacher.annotate(batch, step=1)
    metrics = values_of(policy.backward(batch, make_loss(config.algorithm), batch.num_tokens))
    taught = [metrics[f"teacher/{name}/divergence"] for name in config.algorithm.teachers]
    return [metrics["loss"], values_of(policy.update())["grad_norm"], *taught]


def test_a_policy_that_teaches_itself_after_the_same_prompt_changes_nothing():
    assert run_ranks(_taught_by_itself, 2, "{prompt}")[0] == [0.0] * 5
    assert all(value for value in run_ranks(_taught_by_itself, 2, "{hint}")[0])


@pytest.mark.parametrize("name", usual(["entropy bonus on top", "vespo correction"], 0))
def test_a_step_without_loss_tokens_has_loss_and_gradient_0(name):
    assert run_ranks(_step_of_nothing, 2, name)[0] == (0.0, 0.0)
