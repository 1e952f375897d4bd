"""KL in the reward, where the reference is loaded from and updated to, and several optimizer steps per step: the files
that runs leave."""

import functools
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e import world

MOVING = [
    "algorithm.beta=0.1",
    "algorithm.sync_ref_model=true",
    "algorithm.ref_model_sync_steps=2",
    "algorithm.ref_model_mixup_alpha=0.5",
]


def succeeded(run):
    assert run.code == 0, run.err
    return run


@functools.cache
def other_model():
    """A folder with the model of the world and changed weights."""
    folder = world.folder() / "other_model"
    shutil.copytree(world.folder() / "model", folder)
    generator = torch.Generator().manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    moved = {name: w + 0.02 * torch.randn(w.shape, generator=generator) for name, w in weights.items()}
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """Two dumped steps of two iterations of two optimizer steps. The KL is in the reward; its reference is another
    checkpoint and moves after step one."""
    in_reward = [
        "algorithm.beta=0.1",
        "algorithm.kl_in_reward=true",
        "algorithm.kl_estimator=k1",
        f"model.reference_path={other_model()}",
    ]
    slices = [
        "algorithm.steps_per_generation=2",
        "algorithm.num_iterations=2",
        "train.warmup_ratio=0.9",
        "algorithm.epsilon=0.05",
    ]
    moving = ["algorithm.sync_ref_model=true", "algorithm.ref_model_sync_steps=1"]
    epochs = ["run.max_steps=null", "run.num_train_epochs=0.3", "debug.dump_steps=[1,2]"]
    return succeeded(world.train(tmp_path_factory.mktemp("everything"), *in_reward, *slices, *moving, *epochs))


@pytest.mark.full
@pytest.mark.parametrize("step", [1, 2])
def test_the_audit_agrees_with_slices_a_kl_in_the_reward_and_a_reference_that_moves(everything, step):
    code, said = world.audit(everything.folder, "--step", step, "--json")
    found = json.loads(said)
    assert code == 0 and found["passed"], said
    checks = {check["quantity"]: check for check in found["checks"]}
    assert checks["samples"]["count"] == 2 * 16
    for update in range(1, 5):
        assert (
            checks[f"reference log-probs, optimizer step {update}"]["count"] > 0
            and f"mean kl, optimizer step {update}" not in checks
        )
    assert (everything.folder / "dumps" / f"step_{step:06d}" / "reference").exists() == (step == 2)


def test_the_audit_notices_a_sample_that_is_trained_twice_and_advantages_without_the_kl(everything, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(everything.folder, copy)
    file = copy / "dumps" / "step_000001" / "step.json"
    contents = json.loads(file.read_text())
    contents["updates"][0]["samples"][0] = contents["updates"][1]["samples"][0]
    contents["config"]["algorithm"]["beta"] = 0.2
    file.write_text(json.dumps(contents))
    code, said = world.audit(copy, "--step", 1, "--json")
    checks = {check["quantity"]: check for check in json.loads(said)["checks"]}
    assert code == 1 and not checks["samples"]["passed"] and not checks["advantages"]["passed"]


def test_learning_rate_and_warmup_count_optimizer_steps(everything):
    """Two steps for 0.3 epochs of 24 prompts; a warm-up over 0.9 of their eight optimizer steps, both rounded up."""
    assert [line["learning_rate"] for line in everything.metrics] == pytest.approx([1e-3 * 4 / 8, 1e-3])
    assert "2 steps: run.num_train_epochs 0.3 x 24 prompts / rollout.prompts_per_step 4" in everything.out


def test_metrics_of_a_step_are_means_over_its_optimizer_steps(everything):
    contents = json.loads((everything.folder / "dumps" / "step_000001" / "step.json").read_text())
    updates, line = contents["updates"], everything.metrics[0]
    for name in ("loss", "grad_norm", "entropy", "clip_ratio/region_mean", "token_mult_prob_error"):
        assert line[name] == pytest.approx(sum(update["metrics"][name] for update in updates) / 4), name
    largest = "sampling/sampling_logp_difference/max"
    assert line[largest] == max(update["metrics"][largest] for update in updates)
    assert updates[0]["metrics"]["clip_ratio/region_mean"] == 0 < line["clip_ratio/region_mean"]


@pytest.mark.full
def test_the_second_optimizer_step_of_one_iteration_has_moved_from_the_policy_that_generated(tmp_path):
    run = succeeded(
        world.train(tmp_path, "algorithm.steps_per_generation=2", "algorithm.epsilon=1e-4", "run.max_steps=1")
    )
    assert run.metrics[0]["clip_ratio/region_mean"] > 0.05 and run.metrics[0]["learning_rate"] == pytest.approx(1e-3)


def test_the_kl_of_a_step_is_its_mean_over_responses_and_rewards_are_reported_without(everything):
    rows = [row for row in everything.completions if row["step"] == 1]
    assert everything.metrics[0]["reward"] == pytest.approx(sum(row["reward"] for row in rows) / len(rows))
    dump = everything.folder / "dumps" / "step_000001"
    tokens = [load_file(dump / f"update_{i}.safetensors") for i in (1, 2)]
    total = sum((of["old_logprobs"] - of["ref_logprobs"]).sum().item() for of in tokens)
    assert everything.metrics[0]["kl"] == pytest.approx(total / len(rows), rel=1e-5) and abs(total) > 1


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Five steps without interruption; the reference moves after the second and the fourth."""
    return succeeded(world.train(tmp_path_factory.mktemp("whole"), *MOVING, "run.max_steps=5"))


@pytest.mark.full
def test_a_moved_reference_survives_a_resume(whole, tmp_path):
    succeeded(world.train(tmp_path, *MOVING, "run.max_steps=3"))
    resumed = succeeded(world.train(tmp_path, *MOVING, "run.max_steps=5", "--resume"))
    assert [line["kl"] for line in resumed.metrics] == [line["kl"] for line in whole.metrics]
    expected, found = world.plain_tensors(whole.newest), world.plain_tensors(resumed.newest)
    assert any(name.startswith("reference.") for name in expected) and expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_the_kl_falls_when_the_reference_follows(whole):
    kl = [line["kl"] for line in whole.metrics]
    assert abs(kl[0]) < 1e-6 < kl[1] and kl[2] < kl[1]


@pytest.mark.full
def test_another_checkpoint_as_reference_gives_a_kl_from_the_first_step_on(tmp_path):
    run = succeeded(
        world.train(tmp_path, "algorithm.beta=0.1", f"model.reference_path={other_model()}", "run.max_steps=1")
    )
    assert run.metrics[0]["kl"] > 0.01


@pytest.mark.full
def test_the_audit_agrees_with_another_checkpoint_as_reference_of_adapters(tmp_path):
    words = ["algorithm.beta=0.1", f"model.reference_path={other_model()}", "lora.rank=4", "train.learning_rate=5e-3"]
    run = succeeded(world.train(tmp_path, *words, "run.max_steps=2", "debug.dump_steps=[1,2]"))
    for step in (1, 2):
        code, said = world.audit(run.folder, "--step", step, "--json")
        found = json.loads(said)
        assert code == 0 and found["passed"], said
        assert not (run.folder / "dumps" / f"step_{step:06d}" / "reference").exists()
    assert run.metrics[0]["kl"] > 0.01


def test_a_reference_of_another_architecture_or_vocabulary_is_refused_by_what_differs(tmp_path):
    for name, key, value, said in (
        ("config.json", "num_hidden_layers", 3, "num_layers: 2, 3"),
        ("config.json", "rms_norm_eps", 1e-3, "norm_eps: 1e-06, 0.001"),
        ("tokenizer_config.json", None, None, "token 0: "),
    ):
        folder = tmp_path / f"{key}"
        shutil.copytree(other_model(), folder)
        if key:
            contents = json.loads((folder / name).read_text())
            (folder / name).write_text(json.dumps(contents | {key: value}))
        else:
            tokenizer = json.loads((folder / "tokenizer.json").read_text())
            vocabulary = tokenizer["model"]["vocab"]
            one, two = sorted(vocabulary, key=vocabulary.get)[:2]
            vocabulary[one], vocabulary[two] = 1, 0
            (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        run = world.train(tmp_path / "run", "algorithm.beta=0.1", f"model.reference_path={folder}")
        assert run.code == 2 and "model.reference_path:" in run.err and said in run.err, run.err
    run = world.train(tmp_path / "run", "algorithm.beta=0.1", "model.reference_path=/nowhere")
    assert run.code == 2 and "model.reference_path: /nowhere does not exist" in run.err
