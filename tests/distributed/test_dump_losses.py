"""Every loss, loss option and kind of advantage, computed by the trainer on two ranks and audited: plain float64
agrees.

Each case takes two optimizer steps on one batch, so the policy differs from the one that sampled.
"""

import functools
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from dumped_steps import FUNCTIONS, dump_step, make_model, taught_apart, two_layers
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from test_loss_layouts import LOSSES
from tiny_policy import tiny_run

from megagrpo.platform.parallel.layout import init_layout
from megagrpo.proof.audit.audit_checks import check_step
from megagrpo.proof.audit.saved import load_step

ADVANTAGES = {
    "rloo": dict(advantage_estimator="rloo"),
    "rloo unscaled": dict(advantage_estimator="rloo", scale_rewards="none"),
    "batch": dict(scale_rewards="batch"),
    "reinforce++": dict(advantage_estimator="reinforce_plus_plus", scale_rewards="batch"),
    "reinforce++ baseline": dict(advantage_estimator="reinforce_plus_plus_baseline", scale_rewards="batch"),
    "gdpo": dict(multi_objective_aggregation="normalize_then_sum"),
}
MORE = {
    "everything computed": dict(loss_type="grpo", skip_zero_advantage=False),
    "adaptive entropy": dict(use_adaptive_entropy=True, entropy_coef=0.1, entropy_target=9.0),
    "sequence ratio in the KL": dict(
        importance_sampling_level="sequence", beta=0.5, kl_estimator="k1", use_bias_correction_kl=True
    ),
    "fipo, two sides": dict(
        loss_type="fipo", fipo_clip_high_only=False, fipo_decay_rate=2.0, fipo_safety_threshold=1.01
    ),
    "vespo, other powers": dict(
        loss_type="vespo", vespo_k_pos=1, vespo_lambda_pos=1, vespo_k_neg=2, vespo_lambda_neg=0.5
    ),
    "sapo, other sharpness": dict(loss_type="sapo", sapo_temperature_pos=2.0, sapo_temperature_neg=0.5),
    "teachers, exact KL": dict(
        beta=0.5,
        kl_estimator="full_reverse",
        teacher=[
            dict(path="teacher", divergence="jensen_shannon", mix=0.3, weight={1: 2.0, 2: 0.0}),
            dict(path="model", divergence="skewed_reverse", mix=0.2),
            dict(path="teacher", divergence="forward", over=5, weight=0.7),
            dict(path="teacher", over="sampled", weight=0.3),
        ],
    ),
    "teachers that read other prompts": dict(
        loss_type="dapo",
        beta=0.0,
        teacher=[
            dict(path="policy", prompt="{hint}", divergence="jensen_shannon", weight=2.0),
            dict(path="one", where={"kind": "a"}, divergence="forward", over=5),
            dict(path="policy", over="sampled", weight=0.5),
        ],
    ),
    "critic": dict(
        advantage_estimator="gae",
        beta=0.5,
        kl_in_reward=True,
        kl_estimator="k1",
        mask_truncated_completions=True,
        critic=dict(gamma=0.97, gae_lambda=0.9, critic_lambda=1.0, learning_rate=0.1, value_clip=0.05),
    ),
    "dapo, truncated responses masked": dict(loss_type="dapo", mask_truncated_completions=True),
}
OPTIONS = LOSSES | ADVANTAGES | MORE
QUICK = [
    "dapo, truncated responses masked",
    "gspo",
    "off-policy mask",
    "teachers, exact KL",
    "teachers that read other prompts",
    "critic",
]  # these run in every suite; `full` runs all


def steps(name):
    """The steps of a case; in the second the policy differs from the reference."""
    return (1, 2) if name.startswith("critic") else (1,)


def _dump_all(root, names):
    layout = None
    for name in names:
        teachers = [
            teacher | ({} if teacher["path"] == "policy" else dict(path=str(root / teacher["path"])))
            for teacher in OPTIONS[name].get("teacher", ())
        ]
        config = tiny_run(
            algorithm=dict(beta=0.0, num_iterations=2) | OPTIONS[name] | dict(teacher=teachers),
            debug=dict(dump_steps=steps(name)),
            train=dict(distributed_optimizer=True, weight_decay=0.1, max_grad_norm=0.5),
            rewards=dict(functions=FUNCTIONS),
            model=dict(tokenizer="/nowhere"),
        )
        layout = layout or init_layout(config.parallel)
        change = taught_apart if name == "teachers that read other prompts" else list
        dump_step(config, layout, root / "model", root / name, steps(name), change=change)


def _audit_all(root, names):
    return {name: list(check_step(load_step(root / name, steps(name)[-1]))) for name in names}


@functools.cache
def audits(*names):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        run_ranks(make_model, 1, root / "model", two_layers())
        padded = replace(two_layers(), raw=two_layers().raw | dict(vocab_size=two_layers().vocab_size + 7))
        run_ranks(make_model, 1, root / "teacher", padded, 1)
        (root / "one").symlink_to(root / "teacher")
        run_ranks(_dump_all, 2, root, names)
        return run_ranks(_audit_all, 1, root, names)[0]


def _agrees(checks):
    assert [check for check in checks if not check.passed] == []
    assert sum(check.quantity.startswith(("loss,", "grad_norm,")) for check in checks) == 4


@pytest.mark.parametrize("name", QUICK)
def test_a_step_with_this_option_agrees_with_float64(name):
    _agrees(audits(*QUICK)[name])


METRICS = (
    *("sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max"),
    *("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "off_policy_mask/kept", "learning_rate"),
    *(f"sampling/importance_sampling_ratio/{which}" for which in ("mean", "min", "max")),
)
WEIGHT, FIRST, SECOND, GRADIENT, NEXT_WEIGHT = range(5)  # columns of optimizer_K.safetensors
CHANGED = {  # element of one tensor, column, optimizer step -> the check that must fail
    (3, WEIGHT, 2): "weights in the optimizer, optimizer step 2",
    (4, NEXT_WEIGHT, 1): "weights of the next update, optimizer step 1",
    (5, FIRST, 2): "first moment of the next update, optimizer step 1",
    (6, SECOND, 2): "second moment of the next update, optimizer step 1",
    (7, GRADIENT, 2): "clipped gradient, optimizer step 2",
    (8, NEXT_WEIGHT, 2): "weights after the update, optimizer step 2",
}


def _tampered(root, name):
    """The failing checks after a change of every metric above and some elements of the optimizer."""
    folder = root / name / "dumps" / "step_000001"
    contents = json.loads((folder / "step.json").read_text())
    for metric in METRICS:
        contents["updates"][1]["metrics"][metric] += 0.01
    (folder / "step.json").write_text(json.dumps(contents))
    for element, column, number in CHANGED:
        file = folder / f"optimizer_{number}.safetensors"
        tables = load_file(file)
        tables["values.model.layers.1.mlp.down_proj.weight"][element, column] *= 1.5
        save_file(tables, file)
    return {check.quantity for check in check_step(load_step(root / name, 1)) if not check.passed}


def test_changed_metrics_and_optimizer_states_are_named(tmp_path):
    run_ranks(make_model, 1, tmp_path / "model", two_layers())
    run_ranks(_dump_all, 2, tmp_path, ["off-policy mask"])
    differs = run_ranks(_tampered, 1, tmp_path, "off-policy mask")[0]
    assert differs >= {f"{metric}, optimizer step 2" for metric in METRICS} | set(CHANGED.values())


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in QUICK])
def test_a_step_with_any_option_agrees_with_float64(name):
    _agrees(audits(*OPTIONS)[name])


@pytest.mark.full
def test_every_option_changes_what_the_second_optimizer_step_computes():
    """The loss and the gradient norm in the trainer's dump."""
    found = {}
    for name, checks in audits(*OPTIONS).items():
        values = {check.quantity: check.dumped for check in checks}
        both = (round(values["loss, optimizer step 2"], 7), round(values["grad_norm, optimizer step 2"], 6))
        # another name of a loss, and an option that only saves time
        same = {"dapo": "bnpo", "everything computed": "grpo"}.get(name)
        assert both == pytest.approx(found[same], abs=2e-6) if same else both not in found.values(), name
        found[name] = both
