"""Steps with trajectories of several samples, computed by the trainer on two ranks and audited: plain float64, which
averages over a trajectory's tokens wherever they are, agrees."""

import json

import dumped_steps
import pytest
from dumped_steps import (
    FUNCTIONS,
    PARTS,
    ROLES,
    dump_step,
    make_model,
    two_layers,
    with_branches,
    with_parts,
    with_roles,
    with_token_rewards,
    with_turns,
)
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from suites import usual
from tiny_policy import tiny_run

from megagrpo.algorithms.advantages import to_samples
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.proof.audit.audit_checks import check_step
from megagrpo.proof.audit.saved import load_step

OPTIONS = {
    "grpo": dict(loss_type="grpo", mask_truncated_completions=True),
    "own": {},
    "dr_grpo": dict(loss_type="dr_grpo", importance_sampling_level="sequence"),
}
TURNS = {
    "turn": dict(advantage_by="turn", loss_type="dapo", turn_advantage_weight=0.5),
    "state": dict(advantage_by="state", loss_type="grpo", turn_discount=0.8),
    "vespo": dict(advantage_by="state", loss_type="vespo", scale_rewards="none"),
    "fipo": dict(advantage_by="turn", loss_type="fipo", fipo_safety_threshold=1.01),
    "sapo": dict(advantage_by="turn", loss_type="sapo"),
    "own, turns": dict(advantage_by="turn"),
}
PER_PART = {
    "token": dict(advantage_by="token", loss_type="dapo", token_advantage_weight=0.5),
    "token, unscaled": dict(advantage_by="token", loss_type="cispo", epsilon_high=5.0, scale_rewards="none"),
    "turn, by function": dict(advantage_by="turn", loss_type="grpo"),
    "sums": dict(loss_type="dapo"),
    "token alone": dict(advantage_by="token", loss_type="dapo"),
    "process": dict(advantage_by="process", loss_type="dapo", token_advantage_weight=0.5),
    "process alone": dict(advantage_by="process", loss_type="grpo", scale_rewards="none"),
    "own, token": dict(advantage_by="token"),
}
BY_ROLE = {
    "roles": dict(loss_type="grpo", mask_truncated_completions=True),
    "roles, batch": dict(loss_type="dapo", advantage_estimator="rloo", scale_rewards="batch"),
    "roles, normalized": dict(loss_type="dr_grpo", multi_objective_aggregation="normalize_then_sum"),
    "own, roles": {},
}
NOTHING = dict(weight=0.0)
USUAL = ["grpo", "turn", "state", "token", "sums", "process", "own, turns", "roles"]
OTHERS = [name for name in OPTIONS | TURNS | PER_PART | BY_ROLE if name not in USUAL]

OWN = """
import torch


def mine(groups, algorithm):
    rewards = groups.by_function["chance"].nan_to_num() + 0.01 * groups.lengths - 0.5 * groups.truncated
    rewards = torch.where(groups.rewards.isnan(), 0.0, rewards - rewards.mean())
    if groups.turns is None:
        return rewards
    turns = groups.turns
    of_turns = torch.from_numpy(turns.rewards).nan_to_num() - 0.25 * torch.from_numpy(turns.numbers)
    return rewards.flatten()[torch.from_numpy(turns.trajectories)] + of_turns
"""


def _dump(root, names):
    layout = None
    algorithms = OPTIONS | TURNS | PER_PART | BY_ROLE
    for name in names:
        own = dict(advantage_estimator=f"{root / 'own.py'}:mine") if name.startswith("own") else {}
        change = with_parts if name in PER_PART else with_turns if name in TURNS else with_branches
        functions = FUNCTIONS + PARTS if name in PER_PART else FUNCTIONS
        turns = dict(scheduler="math_tip_trick")
        if name in BY_ROLE:
            change, turns = with_roles, dict(agent=dict(function="nowhere:agent", roles=ROLES))
        if name.endswith("alone"):
            change, functions = with_token_rewards, [f if f.get("per") == "token" else f | NOTHING for f in functions]
        config = tiny_run(
            **({} if name in OPTIONS else dict(multi_turn=turns)),
            algorithm=dict(beta=0.0, num_iterations=2) | own | algorithms[name],
            debug=dict(dump_steps=[1]),
            rewards=dict(functions=functions),
            model=dict(tokenizer="/nowhere"),
        )
        layout = layout or init_layout(config.parallel)
        said = dump_step(config, layout, root / "model", root / name, change=change)
        assert said == [f"dump {root / name / 'dumps' / 'step_000001'}"]


def _dump_wrong_masks(root):
    """Dump a step of a trainer that trains on one token of an environment, and leaves out one of the policy."""

    def wrong(scored, advantages):
        first, second, *others = to_samples(scored, advantages)
        foreign = (~first.response_mask[len(scored[0].rollout.prompt.token_ids) :]).nonzero()[-1, 0]
        first.response_mask[len(scored[0].rollout.prompt.token_ids) + foreign] = True
        second.response_mask[second.response_mask.nonzero()[-1]] = False
        return [first, second, *others]

    config = tiny_run(
        multi_turn=dict(scheduler="math_tip_trick"),
        algorithm=dict(advantage_by="turn"),
        debug=dict(dump_steps=[1]),
        rewards=dict(functions=FUNCTIONS),
        model=dict(tokenizer="/nowhere"),
    )
    dumped_steps.to_samples = wrong
    dump_step(config, init_layout(config.parallel), root / "model", root / "wrong", change=with_turns)
    masks = [check for check in _audit(root / "wrong") if check.quantity.startswith("masks")]
    return [(check.passed, check.difference, check.place) for check in masks]


def _audit(folder):
    return list(check_step(load_step(folder, 1)))


def _forgotten(folder):
    """The failing checks after the last branch has been marked as written by the policy as a whole."""
    file = folder / "dumps" / "step_000001" / "samples.safetensors"
    tables = load_file(file)
    last = tables["borders"][-2]
    tables["written"][last:] = True
    save_file(tables, file)
    return {check.quantity for check in _audit(folder) if not check.passed}


def _moved(folder):
    """The failing checks after a turn's end and another turn's advantage have been changed in the dump."""
    file = folder / "dumps" / "step_000001" / "step.json"
    contents = json.loads(file.read_text())
    contents["samples"][0]["dialogue"]["turns"][0]["stop"] += 1
    contents["samples"][2]["turn_advantages"][0] += 0.1
    file.write_text(json.dumps(contents))
    return {check.quantity: check.recomputed for check in _audit(folder) if not check.passed}


def _rewarded(folder):
    """The failing checks after a token's reward and a function's reward of a turn have been changed in the dump."""
    file = folder / "dumps" / "step_000001" / "samples.safetensors"
    tables = load_file(file)
    place = (~tables["token_rewards"].isnan()).nonzero()[0]
    tables["token_rewards"][place] += 0.5
    save_file(tables, file)
    contents = json.loads((file.parent / "step.json").read_text())
    by_turn = [s["rewards_by_turn"]["steps"] for s in contents["samples"] if "rewards_by_turn" in s]
    turns = next(row for row in by_turn if any(row))
    number = next(i for i, reward in enumerate(turns) if reward)
    turns[number] += 0.25
    (file.parent / "step.json").write_text(json.dumps(contents))
    return {check.quantity: check.difference for check in _audit(folder) if not check.passed}


def _audit_all(root, names):
    return {name: _audit(root / name) for name in names}


@pytest.mark.full
@pytest.mark.parametrize("names", usual([USUAL, OTHERS], 0), ids=["usual", "others"])
def test_branched_trajectories_agree_with_float64(names, tmp_path):
    run_ranks(make_model, 1, tmp_path / "model", two_layers())
    (tmp_path / "own.py").write_text(OWN)
    run_ranks(_dump, 2, tmp_path, names)
    for name, checks in run_ranks(_audit_all, 1, tmp_path, names)[0].items():
        assert [check for check in checks if not check.passed] == [], name
        assert sum(check.quantity.startswith(("loss,", "grad_norm,")) for check in checks) == 4, name
    if names != USUAL:
        return
    contents = json.loads((tmp_path / "grpo" / "dumps" / "step_000001" / "step.json").read_text())
    trajectories = [sample["trajectory"] for sample in contents["samples"]]
    num = len(set(trajectories))
    assert trajectories[:num] == list(range(num)) and len(trajectories) > num
    assert contents["updates"][0]["denominator"] == num
    sample = json.loads((tmp_path / "state" / "dumps" / "step_000001" / "step.json").read_text())["samples"][1]
    assert len(set(sample["turn_advantages"])) > 1, "the turns of a trajectory have different advantages"
    failed = run_ranks(_forgotten, 1, tmp_path / "grpo")[0]
    assert "masks, optimizer step 1" in failed
    failed = run_ranks(_moved, 1, tmp_path / "turn")[0]
    assert {"tokens", "turn advantages"} <= failed.keys()
    ((passed, wrong, where),) = run_ranks(_dump_wrong_masks, 1, tmp_path)[0]
    assert (passed, wrong) == (False, 2) and where.startswith("sample 1 token"), "the missing token is named"
    failed = run_ranks(_rewarded, 1, tmp_path / "token")[0]
    assert {"rewards", "advantages in the batch, optimizer step 1"} <= failed.keys()
