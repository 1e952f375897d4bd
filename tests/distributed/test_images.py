"""Images in the policy: log-probs against transformers' whole model, and gradients over layouts."""

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from ranks import RankFailed, run_ranks
from safetensors.torch import load_file, save_file
from suites import usual
from tiny_policy import tiny_run, whole_model
from tiny_vision import KINDS, asked, full_logits, is_text, write_model

from megagrpo.algorithms.losses import make_loss
from megagrpo.data.packing.sample_packing import PackingRules, pack
from megagrpo.families.hf_config import load_hf_config
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.reference import Reference
from megagrpo.proof.verify.shrink import random_tensor
from megagrpo.train_types import TrainSample
from megagrpo.trainer.policy_update import check_tower, load_tower
from megagrpo.weights.blocks.parameter_blocks import adapter_blocks, fill
from megagrpo.weights.bridge.adapter_files import fill_adapters, save_adapter
from megagrpo.weights.bridge.hf_export import find_sources
from megagrpo.weights.bridge.load import load_hf


@pytest.fixture(scope="module")
def folder_of():
    """Function from a kind to the folder of its model."""
    with tempfile.TemporaryDirectory() as root:

        def written(kind: str) -> Path:
            folder = Path(root) / kind
            if not folder.exists():
                write_model(folder, kind=kind, num_hidden_layers=4)
            return folder

        yield written


def samples_of(folder: Path, image_token: bool = False) -> list[TrainSample]:
    """Two responses to each question, which may begin with an image token."""
    samples, generator, image_id = [], torch.Generator().manual_seed(3), load_hf_config(folder).vision.image_token
    for _, ids, inputs in asked(folder):
        for _ in range(2):
            response = torch.randint(0, 40, (int(torch.randint(3, 9, (), generator=generator)),), generator=generator)
            response[0] = image_id if image_token else response[0]
            tokens = torch.cat([torch.tensor(ids), response])
            mask = torch.arange(len(tokens)) >= len(ids)
            logprobs, advantage = torch.zeros(len(tokens)), float(torch.randn((), generator=generator))
            samples.append(TrainSample(tokens, mask, logprobs, advantage, len(samples), inputs=inputs))
    return samples


LORA = dict(rank=4, alpha=6.0)


def rules_of(config, **options) -> PackingRules:
    """Rules with which every layout has several micro-batches."""
    parallel = config.parallel
    aligned = dict(align=config.micro_batch_align, sequence_align=parallel.sequence_align)
    return PackingRules(max_tokens=240, at_least=parallel.pp, **aligned, **options)


def rows_of(folder: Path, parallel: dict, share: bool, image_token: bool, adapter: Path | None) -> tuple:
    """Log-probs [T] of the micro-batches' labels on the last stage, and the packing. With `adapter` the policy gets
    adapters, which are saved there."""
    lora = LORA if adapter else {}
    config = tiny_run(parallel, data=dict(train=dict(source="none"), images=True), algorithm=dict(beta=0), lora=lora)
    config = config.model_copy(update=dict(rollout=config.rollout.model_copy(update=dict(temperature=1.0))))
    layout, hf_config = init_layout(config.parallel), load_hf_config(folder)
    policy = MegatronPolicy(config, layout, hf_config)
    load_hf(policy.chunks, hf_config, folder, layout)
    load_tower(policy, folder)
    if adapter:
        found = list(adapter_blocks(policy.chunks, hf_config, layout))
        for _, parameter, of_it in found:
            fill(parameter, of_it, lambda block: 0.3 * random_tensor(block.name, block.shape)[block.slices])
        sources = find_sources(found, layout)
        save_adapter(found, layout, sources, adapter, config.lora, str(folder), torch.float32)
    policy.weights_changed()
    rules = rules_of(config, share_prompts=share and policy.shares_prompts)
    batch = pack(samples_of(folder, image_token), rules, layout.dp_rank, layout.dp_size)
    rows = policy.logprobs(batch)
    layout.close()
    return [None if row is None else row.numpy() for row in rows], batch


def largest_difference(
    folder: Path,
    parallel: dict,
    ranks: int,
    share: bool = False,
    image_token: bool = False,
    adapter: Path | None = None,
) -> float:
    results = run_ranks(rows_of, ranks, folder, parallel, share, image_token, adapter)
    return difference(results, folder, samples_of(folder, image_token), adapter)


def difference(results: list[tuple], folder: Path, samples: list[TrainSample], adapter: Path | None = None) -> float:
    """The largest difference of a log-prob of the ranks' `results` from transformers'; every loss token has one."""
    logits = full_logits(folder, [(s.token_ids.tolist(), s.inputs) for s in samples], adapter=adapter)
    expected = [
        one[:-1].log_softmax(-1).gather(1, s.token_ids[1:, None])[:, 0] for one, s in zip(logits, samples, strict=True)
    ]
    worst, seen = 0.0, set()
    for rows, batch in results:
        for row, m in zip(rows, batch.micro_batches, strict=True):
            for at in m.loss_mask.nonzero()[:, 0].tolist() if row is not None else []:
                sample, place = int(m.samples[m.sequence_index[at]]), int(m.position_ids[at])
                worst = max(worst, abs(float(row[at]) - float(expected[sample][place])))
                seen.add((sample, place))
    assert len(seen) == sum(int(s.response_mask.sum()) for s in samples)
    return worst


LAYOUTS = [
    (dict(tp=2), 2),
    (dict(tp=2, sequence_parallel=True), 2),
    (dict(pp=2), 2),
    (dict(pp=2, vpp=2), 2),
    (dict(cp=2), 2),
    (dict(cp=2, tp=2, sequence_parallel=True), 4),
]
OF_EXPERTS = [*LAYOUTS[1:], (dict(ep=2), 2)]  # tensor parallelism of experts needs sequence parallelism
LAYOUTS_OF = {kind: OF_EXPERTS if "moe" in kind else LAYOUTS for kind in KINDS}


@pytest.mark.parametrize(
    ("kind", "share"),
    usual([(kind, share) for kind in KINDS for share in (False, True)], *range(1, 2 * len(KINDS), 2), 4),
)
def test_logprobs_of_packed_samples_with_images_equal_transformers(folder_of, kind, share):
    assert largest_difference(folder_of(kind), {}, 1, share) < 1e-5


def marked(kind: str, *values) -> object:
    """Parameters of a test, of the full suite but for three kinds."""
    return pytest.param(kind, *values, marks=() if kind in ("qwen2_5_vl", "qwen3_vl", "gemma3") else pytest.mark.full)


# Each of three kinds in one layout, the second one in the default suite; `test_options_by_layouts.py` has one kind in many.
ONE_EACH = [("qwen2_5_vl", (dict(pp=2, vpp=2), 2)), ("qwen3_vl", (dict(cp=2), 2)), ("gemma3", LAYOUTS[1])]
EVERY_LAYOUT = [(kind, layout) for kind in KINDS for layout in LAYOUTS_OF[kind] if (kind, layout) not in ONE_EACH]


@pytest.mark.parametrize(("kind", "layout"), usual(ONE_EACH + EVERY_LAYOUT, 1))
def test_layouts_compute_the_same_logprobs(folder_of, kind, layout):
    assert largest_difference(folder_of(kind), *layout, share=True) < 1e-5


@pytest.mark.parametrize("kind", usual(KINDS, 2))
def test_adapters_of_the_language_model_equal_pefts(folder_of, kind, tmp_path):
    assert largest_difference(folder_of(kind), {}, 1, share=True, adapter=tmp_path / "adapter") < 1e-5


def reference_rows(folder: Path, reference_folder: Path) -> tuple:
    """Log-probs of the reference, whose weights differ from the policy's, and the packing."""
    data = dict(train=dict(source="none"), images=True)
    config = tiny_run({}, data=data, model=dict(reference_path=str(reference_folder)), rollout=dict(temperature=1.0))
    layout, hf_config = init_layout(config.parallel), load_hf_config(folder)
    policy = MegatronPolicy(config, layout, hf_config)
    load_hf(policy.chunks, hf_config, reference_folder, layout)
    reference = Reference(policy)
    load_hf(policy.chunks, hf_config, folder, layout)
    load_tower(policy, folder)
    check_tower(policy, reference_folder)
    policy.weights_changed()
    batch = pack(samples_of(folder), PackingRules(max_tokens=200, share_prompts=True), 0, 1)
    rows = reference.logprobs(batch)
    layout.close()
    return [row.numpy() for row in rows], batch


@pytest.mark.parametrize("kind", usual(["qwen3_vl", "gemma3"], 0))
def test_a_reference_with_the_policys_tower_sees_images_and_another_is_refused(folder_of, kind, tmp_path):
    folder = folder_of(kind)
    for name, changes in (("reference", is_text), ("other", lambda name: not is_text(name))):
        shutil.copytree(folder, tmp_path / name)
        tensors = load_file(folder / "model.safetensors")
        changed = {key: 0.9 * tensor if changes(key) else tensor for key, tensor in tensors.items()}
        save_file(changed, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
    results = run_ranks(reference_rows, 1, folder, tmp_path / "reference")
    assert difference(results, tmp_path / "reference", samples_of(folder)) < 1e-5
    with pytest.raises(
        RankFailed, match=r"model.reference_path: (model.visual|vision_tower).* differs from the policy's, whose tower"
    ):
        run_ranks(reference_rows, 1, folder, tmp_path / "other")


def stepped(folder: Path, parallel: dict, recompute: str, lora: dict | None = None) -> tuple:
    """The whole model on rank 0 after an optimizer step, and whether the tower's weights are as before."""
    config = tiny_run(
        parallel,
        data=dict(train=dict(source="none"), images=True),
        algorithm=dict(beta=0),
        model=dict(recompute=recompute),
        lora=lora or {},
    )
    layout, hf_config = init_layout(config.parallel), load_hf_config(folder)
    policy = MegatronPolicy(config, layout, hf_config)
    load_hf(policy.chunks, hf_config, folder, layout)
    load_tower(policy, folder)
    fill_adapters(policy.chunks, hf_config, layout, config.lora, seed=1)
    policy.weights_changed()
    tower = policy.inputs.tower
    before = [p.clone() for p in tower.parameters()] if tower else []
    rules = rules_of(config, multiple_of=2)
    batch = pack(samples_of(folder), rules, layout.dp_rank, layout.dp_size)
    policy.train_step(batch, make_loss(config.algorithm), batch.num_tokens)
    kept = all(torch.equal(a, b) for a, b in zip(before, tower.parameters() if tower else [], strict=True))
    model = {name: tensor.numpy() for name, tensor in whole_model(policy)}
    layout.close()
    return model, kept


@pytest.mark.parametrize("kind", usual(KINDS, 2))
def test_a_step_moves_the_language_model_and_leaves_the_tower(folder_of, kind):
    folder = folder_of(kind)
    ((stepped_model, kept),) = run_ranks(stepped, 1, folder, {}, "none")
    source = load_file(folder / "model.safetensors")
    assert kept and stepped_model.keys() == {name for name in source if is_text(name)}
    for name, tensor in stepped_model.items():
        assert not torch.equal(torch.from_numpy(tensor), source[name]), name


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_the_same_in_every_layout(folder_of, kind):
    folder = folder_of(kind)
    ((expected, _),) = run_ranks(stepped, 1, folder, {}, "none")
    two_replicas, recomputed = ({}, 2, "none"), (dict(pp=2), 2, "full")
    for parallel, ranks, recompute in [*((*layout, "none") for layout in LAYOUTS_OF[kind]), two_replicas, recomputed]:
        for model, kept in run_ranks(stepped, ranks, folder, parallel, recompute):
            assert kept
            for name, tensor in model.items():
                torch.testing.assert_close(
                    torch.from_numpy(tensor), torch.from_numpy(expected[name]), atol=2e-5, rtol=0
                )


def embedding_gradient(folder: Path) -> torch.Tensor:
    """The gradient of the embeddings."""
    config = tiny_run({}, data=dict(train=dict(source="none"), images=True), algorithm=dict(beta=0))
    layout, hf_config = init_layout(config.parallel), load_hf_config(folder)
    policy = MegatronPolicy(config, layout, hf_config)
    load_hf(policy.chunks, hf_config, folder, layout)
    load_tower(policy, folder)
    policy.weights_changed()
    batch = pack(samples_of(folder), PackingRules(max_tokens=200), 0, 1)
    policy.backward(batch, make_loss(config.algorithm), batch.num_tokens)
    gradient = policy.chunks[0].embedding.word_embeddings.weight.main_grad.clone()
    layout.close()
    return gradient.numpy()


def test_the_embedding_of_the_image_token_gets_no_gradient_from_images(tmp_path):
    write_model(tmp_path, tie_word_embeddings=False)
    (gradient,) = run_ranks(embedding_gradient, 1, tmp_path)
    image_token = load_hf_config(tmp_path).vision.image_token
    assert abs(gradient[image_token]).max() == 0 and abs(gradient[image_token - 1]).max() > 0


@pytest.mark.parametrize("kind", usual(KINDS, 2))
def test_a_sampled_image_token_is_text(folder_of, kind):
    """transformers' own model takes it for an image and fails; the places of a prompt's images decide here."""
    assert largest_difference(folder_of(kind), {}, 1, image_token=True) < 1e-5


def towers_outputs(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of an image in bfloat16, by our tower and transformers'."""
    from transformers import AutoModelForImageTextToText

    config = tiny_run({}, data=dict(train=dict(source="none"), images=True), algorithm=dict(beta=0))
    config = config.model_copy(update=dict(model=config.model.model_copy(update=dict(precision="bf16"))))
    layout = init_layout(config.parallel)
    policy = MegatronPolicy(config, layout, load_hf_config(folder))
    load_tower(policy, folder)
    theirs = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16).model.eval()
    inputs = samples_of(folder)[0].inputs
    pixels, grids = inputs["pixel_values"].to(torch.bfloat16), torch.as_tensor(inputs["image_grid_thw"])
    with torch.no_grad():
        features = theirs.get_image_features(pixels, **({"image_grid_thw": grids} if pixels.dim() == 2 else {}))
        expected = features.pooler_output
        expected = expected if isinstance(expected, torch.Tensor) else torch.cat(expected)
        rows = policy.inputs.tower(pixels, grid_thw=grids).pooler_output.float(), expected.flatten(0, -2).float()
    layout.close()
    return rows[0].numpy(), rows[1].numpy()


@pytest.mark.parametrize("kind", [*map(marked, KINDS)])
def test_a_tower_in_bfloat16_computes_as_transformers_does(folder_of, kind):
    ((ours, theirs),) = run_ranks(towers_outputs, 1, folder_of(kind))
    assert (ours == theirs).all()
