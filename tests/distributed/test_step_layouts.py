"""Whole steps of the trainer in several layouts, dumped and audited: several optimizer steps on slices of the rollouts,
a KL in the reward, a moved reference, a truncated sampler. The rollouts are fixed; the trainer does the rest."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from dumped_steps import FUNCTIONS, make_model, rollouts
from ranks import run_ranks
from tiny_policy import Case, tiny_model, tiny_run
from trainer_alone import trainer_alone

from megagrpo.__main__ import main
from megagrpo.families.hf_config import load_hf_config
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.reference import Reference
from megagrpo.records.rows.dump import StepDumps
from megagrpo.records.rows.token_log import TOKENS_FILE, TokenLog
from megagrpo.weights.bridge.load import load_hf

SECTIONS = dict(
    algorithm=dict(
        beta=0.2, kl_in_reward=True, kl_estimator="k1", loss_type="dapo",
        steps_per_generation=2, num_iterations=2, sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.5,
    ),
    rollout=dict(temperature=0.8, top_p=0.9, min_p=0.01),
    rewards=dict(functions=FUNCTIONS),
    model=dict(path="tiny", precision="fp32", tokenizer="/nowhere"),
    debug=dict(dump_steps=[1, 2]),
)  # fmt: skip
LAYOUTS = [Case("tp2 dp2", 4, dict(tp=2, sequence_parallel=True)), Case("cp2 pp2", 4, dict(cp=2, pp=2))]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "llama"
    run_ranks(make_model, 1, folder, tiny_model("llama_tied"))
    return folder


def two_steps(
    parallel: dict, model: Path, run: Path, profiled: Sequence[int] = (), logged_groups: int = 2
) -> list[dict]:
    """The metrics of two steps, dumped into `run`, some of them `profiled`."""
    config = tiny_run(parallel, **SECTIONS, run=dict(profile=dict(steps=list(profiled))))
    # Small runs take one optimizer step; this one takes all configured steps.
    config = config.model_copy(update=dict(algorithm=config.algorithm.model_copy(update=SECTIONS["algorithm"])))
    layout, hf_config = init_layout(config.parallel), load_hf_config(model)
    policy = MegatronPolicy(config, layout, hf_config)
    load_hf(policy.chunks, hf_config, model, layout)
    policy.weights_changed()
    reference, metrics = Reference(policy), []
    dumps = StepDumps(policy, run / "dumps", model, lambda text: None, reference)
    tokens = TokenLog(layout, None, logged_groups, config.rollout.num_generations)
    if layout.world_rank == 0:
        tokens.open(run, 0)
    trainer = trainer_alone(config, policy, reference, run, [tokens, dumps])
    for step in (1, 2):
        with trainer.records.profiler.step(step):
            metrics.append(trainer.step())
        trainer.state.step = step
    layout.close()
    return metrics


@pytest.fixture(scope="module")
def one_folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("one")


@pytest.fixture(scope="module")
def one(model, one_folder) -> list[dict]:
    return run_ranks(two_steps, 1, {}, model, one_folder)[0]


def logged(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / TOKENS_FILE).read_text().splitlines()]


@pytest.mark.full
@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_every_layout_takes_the_steps_of_one_process_and_float64_agrees(case, one, one_folder, model, tmp_path, capfd):
    every_rank = run_ranks(two_steps, case.ranks, case.parallel, model, tmp_path)
    for row, expected in zip(logged(tmp_path), logged(one_folder), strict=True):
        assert (row["step"], row["sample"]) == (expected["step"], expected["sample"])
        for name in ("trainer_logprobs", "entropy"):
            pairs = zip(row[name], expected[name], strict=True)
            assert all(one is other is None or one == pytest.approx(other, abs=5e-3) for one, other in pairs)
    for metrics in every_rank:
        for found, expected in zip(metrics, one, strict=True):
            assert found["kl"] == pytest.approx(expected["kl"], rel=1e-3, abs=1e-5)
            assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
            assert found["loss"] == pytest.approx(expected["loss"], abs=1e-4)
    for step in (1, 2):
        assert run_ranks(_audit, 1, tmp_path, step) == [0], capfd.readouterr().out
    assert (tmp_path / "dumps" / "step_000002" / "reference" / "model.safetensors").exists()


def test_logged_tokens_hold_the_log_probs_and_entropies_of_the_first_pass_over_their_sample(one, one_folder):
    from safetensors.torch import load_file

    rows, scored = [row for row in logged(one_folder) if row["step"] == 1], rollouts()
    # 3 and 4 repeat these
    updates = [load_file(one_folder / "dumps" / "step_000001" / f"update_{k}.safetensors") for k in (1, 2)]
    assert len(rows) == len({row["sample"] for row in rows}) > 3
    for row in rows:
        written = scored[row["sample"]].rollout.written
        (of_sample,) = [update for update in updates if (update["sample"] == row["sample"]).any()] or [None]
        for name, column in (("trainer_logprobs", "old_logprobs"), ("entropy", "entropy")):
            dumped = [] if of_sample is None else of_sample[column][of_sample["sample"] == row["sample"]].tolist()
            assert [value for value in row[name] if value is not None] == pytest.approx(dumped, abs=5.1e-4)
            assert [value is not None for value in row[name]] == (list(written) if dumped else [False] * len(written))


@pytest.mark.full
def test_logging_tokens_changes_no_bit_of_a_step(one, model, tmp_path):
    assert run_ranks(two_steps, 1, {}, model, tmp_path, (), 0)[0] == one
    assert not (tmp_path / TOKENS_FILE).exists()


def _audit(run: Path, step: int) -> int:
    return main(["audit", str(run), "--step", str(step)])


def test_the_kl_is_in_the_rewards_from_the_second_step_on(one):
    assert one[0]["kl"] == 0 and abs(one[1]["kl"]) > 1e-3


@pytest.mark.full
def test_a_profile_changes_no_bit_of_the_metrics_and_names_the_phases(one, model, tmp_path):
    (profiled,) = run_ranks(two_steps, 1, {}, model, tmp_path, [2])
    assert profiled == one
    (trace,) = (tmp_path / "profile").glob("*.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert {"step 2", "logprobs", "train", "optimizer"} <= {event["name"] for event in events}
