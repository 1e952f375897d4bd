"""A trained vision tower: its gradients against transformers' autograd, and its steps over layouts."""

import re
import shutil
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from ranks import RankFailed, run_ranks
from safetensors.torch import load_file, save_file
from suites import usual
from test_images import LAYOUTS_OF, difference, folder_of, marked, rules_of, samples_of  # noqa: F401  (a fixture)
from tiny_policy import tiny_run
from tiny_vision import KINDS, logits_of

from megagrpo.data.packing.sample_packing import pack
from megagrpo.families.hf_config import load_hf_config
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.images.trained_tower import train_tower
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.reference import Reference
from megagrpo.proof.verify.verified_step import relative_error, whole_tensors
from megagrpo.records.checkpoints.checkpoint import Checkpointer
from megagrpo.train_types import LossInputs, LossOutput, TrainState
from megagrpo.weights.bridge.conversion import export_alone
from megagrpo.weights.bridge.hf_export import save_hf
from megagrpo.weights.bridge.load import load_hf


def policy_of(folder: Path, parallel: dict, trained: bool = True, **sections: dict) -> MegatronPolicy:
    """A policy with a trained tower, loaded."""
    data = dict(train=dict(source="none"), images=True)
    model = dict(freeze_vision_tower=not trained) | sections.pop("model", {})
    config = tiny_run(parallel, data=data, model=model, **dict(algorithm=dict(beta=0)) | sections)
    layout, hf_config = init_layout(config.parallel), load_hf_config(folder)
    hf_config = train_tower(hf_config) if trained else hf_config
    policy = MegatronPolicy(config, layout, hf_config)
    load_hf(policy.chunks, hf_config, folder, layout)
    policy.weights_changed()
    return policy


def batch_of(policy: MegatronPolicy, folder: Path, samples: list | None = None, **options):
    layout = policy.layout
    samples = samples_of(folder) if samples is None else samples
    return pack(samples, rules_of(policy.config, multiple_of=2, **options), layout.dp_rank, layout.dp_size)


def weighted(inputs: LossInputs) -> LossOutput:
    """The sum of the log-probs of response tokens, each times its sample's advantage."""
    m = inputs.micro_batch
    return LossOutput(-(m.advantages * inputs.policy_logprobs)[m.loss_mask].sum(), {})


def our_gradients(folder: Path, parallel: dict, model: dict, options: dict) -> dict:
    policy = policy_of(folder, parallel, model=model, rollout=dict(temperature=1.0))
    batch = batch_of(policy, folder, **options)
    policy.backward(batch, weighted, 1)
    found, *_ = whole_tensors(policy, policy.hf_config, policy.layout, attrgetter("main_grad"))
    policy.layout.close()
    return {name: gradient.numpy() for name, gradient in found.items()}


def their_gradients(folder: Path) -> dict:
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    for sample in samples_of(folder):
        logits = logits_of(model, sample.token_ids.tolist(), sample.inputs)
        logprobs = logits[:-1].log_softmax(-1).gather(1, sample.token_ids[1:, None])[:, 0]
        (-sample.advantage * logprobs[sample.response_mask[1:]].sum()).backward()
    return {name: p.grad.numpy() for name, p in model.named_parameters()}


def alone(name: str) -> str:
    """A tensor's name without those of the modules around the tower and the text model."""
    return re.sub(r"^((language_)?model\.)+", "", name).replace("vision_model.", "")


def changes_nothing(name: str) -> bool:
    """Whether a tensor of a tower has gradients of 0, which rounding changes: a bias of keys adds the same to all
    scores of a query."""
    return "vision_tower." in name and name.endswith(".k_proj.bias")


@pytest.mark.parametrize("kind", [*map(marked, KINDS)])
def test_gradients_of_all_tensors_equal_transformers(folder_of, kind):  # noqa: F811
    (theirs,) = run_ranks(their_gradients, 1, folder_of(kind))
    expected = {alone(name): torch.from_numpy(gradient) for name, gradient in theirs.items()}
    ways = [({}, {}), (dict(recompute="full"), dict(share_prompts=True))]
    for model, options in ways if kind == "qwen3_vl" else ways[1:]:
        (ours,) = run_ranks(our_gradients, 1, folder_of(kind), {}, model, options)
        found = {alone(name): torch.from_numpy(gradient) for name, gradient in ours.items()}
        for name, gradient in expected.items():
            if ".experts." in name or changes_nothing(name):  # released files have other names or shapes of experts
                continue
            # gradients of decays of Gated DeltaNet are small differences of large sums
            scale = max(gradient.norm().item(), 1.0 if ".linear_attn." in name else 0.0)
            assert (found[name] - gradient).norm() < 1e-5 * scale, name


@pytest.mark.full
@pytest.mark.parametrize("kind", usual(["qwen2_5_vl", "gemma3"], 0))
def test_a_text_model_in_fp8_trains_the_tower_too(folder_of, kind):  # noqa: F811
    (exact,), (rounded,) = (
        run_ranks(our_gradients, 1, folder_of(kind), {}, dict(fp8_recipe=recipe), {})
        for recipe in ("none", "tensorwise")
    )
    for tower in (True, False):
        names = [name for name in exact if ("vis" in name) == tower]
        expected, found = (
            torch.cat([torch.from_numpy(run[name]).flatten() for name in names]) for run in (exact, rounded)
        )
        assert 1e-3 < relative_error(found, expected) < 0.3, tower  # products of e4m3 and e5m2


def stepped(folder: Path, parallel: dict, sections: dict) -> tuple:
    """The whole model on rank 0 after two optimizer steps, the gradient norms, and the largest difference between
    ranks with the same part of a tensor."""
    policy = policy_of(folder, parallel, **sections)
    norms = []
    for _ in range(2):
        batch = batch_of(policy, folder)
        metrics = policy.train_step(batch, weighted, batch.num_tokens)
        norms.append(metrics["grad_norm"].value)
    weights, apart, _ = whole_tensors(policy, policy.hf_config, policy.layout, lambda p: p)
    policy.layout.close()
    return {name: tensor.float().numpy() for name, tensor in weights.items()}, norms, apart


STEP = dict(max_grad_norm=0.5, weight_decay=0.1, learning_rate=1e-3)
SHARDED = STEP | dict(distributed_optimizer=True, overlap_grad_reduce=True, ddp_bucket_size=4000)
REPLICAS = [
    (dict(), 2, dict(train=SHARDED)),
    (dict(tp=2, sequence_parallel=True), 4, dict(train=SHARDED)),
    (dict(pp=2), 2, dict(model=dict(recompute="full"))),
]


def layouts_of(kind: str) -> list[tuple]:
    """(parallel, ranks, sections) of layouts whose first stage has all blocks with features of the tower."""
    plain = [(parallel, ranks, {}) for parallel, ranks in LAYOUTS_OF[kind]] + REPLICAS
    if "qwen3_vl" not in kind:
        return plain
    staged = [case for case in plain if case[0].get("vpp", 1) == 1]
    return [(p | (dict(pipeline_layers=[3, 1]) if "pp" in p else {}), ranks, more) for p, ranks, more in staged]


# A tower cut by tensor parallelism beside replicas, virtual stages, and recomputation on two stages
SOME = {"qwen2_5_vl": [(dict(pp=2, vpp=2), 2, {})], "qwen3_vl": [REPLICAS[1]], "gemma3": [REPLICAS[2]]}


@pytest.mark.parametrize(
    ("kind", "layouts"),
    usual([*SOME.items(), *((kind, layouts_of(kind)) for kind in KINDS)], 1),
    ids=lambda value: value if isinstance(value, str) else str(len(value)),
)
def test_steps_are_the_same_in_every_layout(folder_of, kind, layouts):  # noqa: F811
    folder = folder_of(kind)
    ((expected, norms, _),) = run_ranks(stepped, 1, folder, {}, dict(train=STEP))
    source = load_file(folder / "model.safetensors")
    assert expected.keys() == source.keys()
    expected = {name: torch.from_numpy(tensor) for name, tensor in expected.items() if not changes_nothing(name)}
    assert not [name for name in expected if torch.equal(expected[name], source[name])]
    for parallel, ranks, sections in layouts:
        found, their_norms, apart = run_ranks(stepped, ranks, folder, parallel, dict(train=STEP) | sections)[0]
        assert apart == 0, parallel
        assert their_norms == pytest.approx(norms, rel=1e-4), parallel
        assert found.keys() == source.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(torch.from_numpy(found[name]), tensor, atol=2e-5, rtol=0)


def resumed(folder: Path, root: Path, parallel: dict, resume: bool, frozen: bool = False) -> dict:
    """The whole model on rank 0 after two steps: in one run that saves a checkpoint and an export between them, or
    resumed from that checkpoint."""
    policy = policy_of(folder, parallel, trained=not frozen, train=STEP | dict(distributed_optimizer=True))
    layout = policy.layout
    checkpointer = Checkpointer(root / "checkpoints", layout, policy, keep=2, model_folder=folder)
    batch = batch_of(policy, folder)
    if resume:
        checkpointer.load(root / "checkpoints" / "step_000001")
    else:
        policy.train_step(batch, weighted, batch.num_tokens)
        checkpointer.start(TrainState(step=1, weight_version=2, cursor=8), background=False)
        checkpointer.finish(wait=True)
        save_hf(policy.chunks, policy.hf_config, layout, root / "saved", folder)
    policy.train_step(batch, weighted, batch.num_tokens)
    weights, *_ = whole_tensors(policy, policy.hf_config, layout, lambda p: p)
    layout.close()
    return {name: tensor.float().numpy() for name, tensor in weights.items()}


def exported(checkpoint: Path, out: Path) -> None:
    export_alone(checkpoint, out)


@pytest.mark.full
def test_checkpoints_hold_the_tower_for_other_layouts_and_exports(folder_of, tmp_path):  # noqa: F811
    folder = folder_of("qwen3_vl")
    saves = dict(tp=2, sequence_parallel=True)
    expected = run_ranks(resumed, 2, folder, tmp_path, saves, False)[0]
    again = run_ranks(resumed, 2, folder, tmp_path, saves, True)[0]
    assert all((again[name] == tensor).all() for name, tensor in expected.items())
    staged = run_ranks(resumed, 2, folder, tmp_path, dict(pp=2, pipeline_layers=[3, 1]), True)[0]
    for name, tensor in staged.items():
        torch.testing.assert_close(torch.from_numpy(tensor), torch.from_numpy(expected[name]), atol=2e-5, rtol=0)
    with pytest.raises(
        RankFailed, match=r"trained vision tower, unlike this run; set model\.freeze_vision_tower to false"
    ):
        run_ranks(resumed, 1, folder, tmp_path, {}, True, True)
    run_ranks(exported, 1, tmp_path / "checkpoints" / "step_000001", tmp_path / "exported")
    saved, source = (tmp_path / "saved" / "model.safetensors").read_bytes(), load_file(folder / "model.safetensors")
    assert (tmp_path / "exported" / "model.safetensors").read_bytes() == saved
    for name, tensor in load_file(tmp_path / "saved" / "model.safetensors").items():
        assert tensor.dtype == source[name].dtype and not torch.equal(tensor, source[name])


def overlapped(folder: Path, ranks: int) -> dict:
    """The gradients of a third backward pass, reduced in small buckets while it runs. The first rank has all images."""
    from megagrpo.policy.optimizer.policy_optimizer import gather_gradients

    train = dict(overlap_grad_reduce=True, ddp_bucket_size=4000, distributed_optimizer=True) if ranks > 1 else {}
    policy = policy_of(folder, {}, train=train)
    samples = [s for s in samples_of(folder) if ranks == 1 or bool(s.inputs) == (policy.layout.dp_rank == 0)]
    batch = pack(samples, rules_of(policy.config), 0, 1)
    for _ in range(3):
        policy.backward(batch, weighted, 1)
    gather_gradients(policy.model)
    found, apart, _ = whole_tensors(policy, policy.hf_config, policy.layout, attrgetter("main_grad"))
    policy.layout.close()
    return {name: gradient.numpy() for name, gradient in found.items()} | {"apart": apart}


@pytest.mark.full
def test_an_overlapped_reduction_does_not_wait_for_ranks_without_images(folder_of):  # noqa: F811
    (expected,), (found, _) = (run_ranks(overlapped, ranks, folder_of("qwen3_vl"), ranks) for ranks in (1, 2))
    assert found.pop("apart") == 0 == expected.pop("apart")
    for name, gradient in expected.items():
        assert relative_error(torch.from_numpy(found[name]), torch.from_numpy(gradient)) < 1e-5, name


def reference_rows(folder: Path, reference_folder: Path) -> tuple:
    """Log-probs of a reference with another tower, after a step of the policy, and the packing."""
    model, algorithm = dict(reference_path=str(reference_folder)), dict(beta=0.1)
    policy = policy_of(folder, {}, model=model, algorithm=algorithm, rollout=dict(temperature=1.0))
    load_hf(policy.chunks, policy.hf_config, reference_folder, policy.layout)
    reference = Reference(policy)
    load_hf(policy.chunks, policy.hf_config, folder, policy.layout)
    policy.weights_changed()
    batch = batch_of(policy, folder)
    policy.train_step(batch, weighted, batch.num_tokens)
    policy.logprobs(batch)
    rows = reference.logprobs(batch)
    policy.layout.close()
    return [row.numpy() for row in rows], batch


def test_a_reference_has_its_own_tower(folder_of, tmp_path):  # noqa: F811
    folder, other = folder_of("qwen3_vl"), tmp_path / "reference"
    shutil.copytree(folder, other)
    changed = {name: 0.9 * tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(changed, other / "model.safetensors", metadata={"format": "pt"})
    assert difference(run_ranks(reference_rows, 1, folder, other), other, samples_of(folder)) < 1e-5
