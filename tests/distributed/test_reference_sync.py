"""A reference that follows the policy: the same mixture in every layout, saved in a checkpoint and loaded in another
layout."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from checkpoint_now import save_now
from ranks import run_ranks
from suites import usual
from tiny_policy import few_samples, tiny_run
from torch.distributed.checkpoint import FileSystemReader

from megagrpo.algorithms.losses import make_loss
from megagrpo.algorithms.reductions import denominator
from megagrpo.data.packing.sample_packing import pack, packing_rules
from megagrpo.families.hf_config import load_hf_config
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.reference import Reference
from megagrpo.proof.verify.shrink import VOCABULARY
from megagrpo.records.checkpoints.checkpoint import Checkpointer
from megagrpo.records.checkpoints.run_files import newest_checkpoint
from megagrpo.train_types import TrainState
from megagrpo.weights.blocks.parameter_blocks import adapter_blocks, blocks
from megagrpo.weights.bridge.adapter_files import fill_adapters
from megagrpo.weights.bridge.conversion import export_hf
from megagrpo.weights.bridge.load import load_hf

TRL = json.loads((Path(__file__).parents[1] / "vectors" / "trl_misc.json").read_text())["sync_ref_model"]
SIZES = dict(hidden_size=96, num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=2, intermediate_size=64)
ALPHA = 0.3


def test_the_mixture_is_trls():
    policy = torch.nn.Linear(2, 2, bias=False)
    policy.weight.data = torch.tensor(TRL["ref0"])
    reference = Reference(SimpleNamespace(chunks=[policy], config=tiny_run()))
    policy.weight.data = torch.tensor(TRL["policy"])
    for alpha, expected in zip(TRL["alphas"], TRL["ref_after"], strict=True):
        reference.mix_in(alpha)
        with reference.in_place():
            torch.testing.assert_close(policy.weight.data, torch.tensor(expected))
    assert torch.equal(policy.weight.data, torch.tensor(TRL["policy"]))


def test_in_bfloat16_the_mixture_is_rounded_once():
    policy = torch.nn.Linear(512, 64, bias=False, dtype=torch.bfloat16)
    reference, before = Reference(SimpleNamespace(chunks=[policy], config=tiny_run())), policy.weight.data.double()
    policy.weight.data = policy.weight.data.clone().normal_()
    reference.mix_in(ALPHA)
    with reference.in_place():
        found = policy.weight.data.clone()
    exact = (1 - ALPHA) * before + ALPHA * policy.weight.data.double()
    assert (found != exact.bfloat16()).float().mean() < 0.02  # ties; double rounding changes every fifth element


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Random tiny models: one with tied embeddings, which two pipeline stages both hold, and one with experts."""
    folder = tmp_path_factory.mktemp("models")
    run_ranks(_make_models, 1, folder)
    return folder


def _make_models(folder: Path) -> None:
    torch.manual_seed(0)
    common = dict(SIZES, vocab_size=VOCABULARY, initializer_range=0.1, max_position_embeddings=64)
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, mlp_only_layers=[0, 1], head_dim=16)
    for name, config in (
        ("tied", transformers.LlamaConfig(**common, tie_word_embeddings=True)),
        ("experts", transformers.Qwen3MoeConfig(**common | experts)),
    ):
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)


def moved_and_saved(
    parallel: dict, model: Path, checkpoints: Path, alpha: float = ALPHA, lora: dict | None = None
) -> tuple[dict, dict]:
    """This rank's blocks of policy and reference after a step, a move of the reference by `alpha`, and a checkpoint of
    both."""
    layout, hf_config, policy, reference, checkpointer = _build(parallel, model, checkpoints, lora)
    batch = pack(few_samples(), packing_rules(policy.config, policy.shares_prompts), layout.dp_rank, layout.dp_size)
    divisor = denominator(batch, "sequence_means", 1)
    policy.train_step(reference.annotate(batch), make_loss(policy.config.algorithm), divisor)
    if alpha:
        reference.mix_in(alpha)
    save_now(checkpointer, TrainState(step=1))
    held = _held(policy, hf_config, layout), _of_reference(policy, reference, hf_config, layout)
    layout.close()
    return held


def loaded(
    parallel: dict, model: Path, checkpoints: Path, lora: dict | None = None, moved: bool = True
) -> tuple[dict, dict]:
    """The blocks of `moved_and_saved`, loaded in this layout."""
    layout, hf_config, policy, reference, checkpointer = _build(parallel, model, checkpoints, lora)
    checkpointer.load(newest_checkpoint(checkpointer.folder))
    assert reference.moved == moved  # then the next checkpoint holds it too
    held = _held(policy, hf_config, layout), _of_reference(policy, reference, hf_config, layout)
    layout.close()
    return held


def _build(parallel: dict, model: Path, checkpoints: Path, lora: dict | None):
    train = dict(learning_rate=1e-2, adam_epsilon=1e-3)
    config = tiny_run(parallel, train=train, algorithm=dict(beta=0.1), lora=lora or {})
    layout, hf_config = init_layout(config.parallel), load_hf_config(model)
    policy = MegatronPolicy(config, layout, hf_config)
    load_hf(policy.chunks, hf_config, model, layout)
    fill_adapters(policy.chunks, hf_config, layout, config.lora, seed=1)
    policy.weights_changed()
    reference = Reference(policy)
    return layout, hf_config, policy, reference, Checkpointer(checkpoints, layout, policy, 1, model, reference)


def _of_reference(policy, reference, hf_config, layout) -> dict:
    with reference.in_place():
        return _held(policy, hf_config, layout)


def _held(policy, hf_config, layout) -> dict:
    held = {}
    adapters = list(adapter_blocks(policy.chunks, hf_config, layout))
    for _, parameter, found in adapters or blocks(policy.chunks, hf_config, layout):
        held |= {(b.name, b.shape, b.box): b.read(parameter.detach()).numpy().copy() for b in found}
    return held


def whole(ranks: list[dict]) -> dict[str, torch.Tensor]:
    full = {}
    for (name, shape, box), values in [item for held in ranks for item in held.items()]:
        full.setdefault(name, torch.full(shape, torch.nan))[tuple(map(slice, *box))] = torch.from_numpy(values)
    return full


ONE, DP2, TP2, PP2, VPP = ({}, 1), ({}, 2), (dict(tp=2), 2), (dict(pp=2), 2), (dict(pp=2, vpp=2), 2)
CP2, EP2, TP2_ETP1 = (dict(cp=2), 2), (dict(ep=2), 2), (dict(tp=2, etp=1, sequence_parallel=True), 2)


@pytest.mark.parametrize(
    ("kind", "saved", "restored"),
    usual(
        [
            ("tied", PP2, ONE),
            ("tied", ONE, VPP),
            ("tied", TP2, DP2),
            ("tied", DP2, TP2),
            ("tied", CP2, PP2),
            ("experts", EP2, TP2_ETP1),
        ],
        0,
    ),
    ids=str,
)
def test_a_moved_reference_is_its_mixture_and_comes_back_in_another_layout(kind, saved, restored, models, tmp_path):
    start = weights(models / kind)
    before = [
        whole(part)
        for part in zip(*run_ranks(moved_and_saved, saved[1], saved[0], models / kind, tmp_path), strict=True)
    ]
    after = [
        whole(part) for part in zip(*run_ranks(loaded, restored[1], restored[0], models / kind, tmp_path), strict=True)
    ]
    assert before[0].keys() == start.keys()
    for name, first in start.items():
        policy, reference = before[0][name], before[1][name]
        assert not torch.equal(policy, first)
        torch.testing.assert_close(reference, (1 - ALPHA) * first + ALPHA * policy, rtol=1e-6, atol=1e-7)
        assert torch.equal(after[0][name], policy) and torch.equal(after[1][name], reference), name


@pytest.mark.parametrize(
    ("kind", "saved", "restored"), usual([("tied", TP2, PP2), ("experts", EP2, TP2_ETP1)], 1), ids=str
)
def test_so_does_one_that_has_become_the_policys_adapters(kind, saved, restored, models, tmp_path):
    lora = dict(rank=3) | (dict(target_parameters=["experts.down_proj"]) if kind == "experts" else {})
    of_policy, of_reference = (
        whole(part)
        for part in zip(
            *run_ranks(moved_and_saved, saved[1], saved[0], models / kind, tmp_path, 1.0, lora), strict=True
        )
    )
    policy, reference = (
        whole(part)
        for part in zip(*run_ranks(loaded, restored[1], restored[0], models / kind, tmp_path, lora), strict=True)
    )
    assert policy.keys() == reference.keys() == of_policy.keys() and all(".lora_" in name for name in policy)
    assert any(tensor.any() for name, tensor in reference.items() if "lora_B" in name)
    for name, tensor in of_policy.items():
        assert all(torch.equal(tensor, other[name]) for other in (of_reference, policy, reference)), name
    saved_tensors = FileSystemReader(tmp_path / "step_000001").read_metadata().state_dict_metadata.values()
    numbers = sum(tensor.size.numel() for tensor in saved_tensors if hasattr(tensor, "size"))
    # policy, reference and two moments
    assert numbers == 4 * sum(tensor.numel() for tensor in of_policy.values())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def kl_before_and_after(estimator: str, model: Path) -> list[float]:
    """The metric of three steps: the first, the next one, and one after the reference has become the policy."""
    config = tiny_run(
        train=dict(learning_rate=1e-2, adam_epsilon=1e-3), algorithm=dict(beta=0.1, kl_estimator=estimator)
    )
    layout, hf_config = init_layout(config.parallel), load_hf_config(model)
    policy = MegatronPolicy(config, layout, hf_config)
    load_hf(policy.chunks, hf_config, model, layout)
    policy.weights_changed()
    reference, found = Reference(policy), []
    batch = pack(few_samples(), packing_rules(config, policy.shares_prompts))
    for mixed in (False, False, True):
        if mixed:
            reference.mix_in(1.0)
        found.append(
            policy.train_step(
                reference.annotate(batch), make_loss(config.algorithm), denominator(batch, "sequence_means", 1)
            )["kl"].value
        )
    layout.close()
    return found


@pytest.mark.parametrize("estimator", usual(["k3", "full_reverse"], 0))
def test_a_refreshed_reference_is_the_policy(estimator, models):
    first, second, refreshed = run_ranks(kl_before_and_after, 1, estimator, models / "tied")[0]
    assert abs(first) < 1e-6 and second > 1e-4 and abs(refreshed) < 1e-6


def test_a_reference_that_has_not_moved_takes_no_room_in_a_checkpoint(models, tmp_path):
    ((_, still),) = run_ranks(moved_and_saved, 1, {}, models / "tied", tmp_path / "still", 0.0)
    run_ranks(moved_and_saved, 1, {}, models / "tied", tmp_path / "moved")
    ((_, found),) = run_ranks(loaded, 1, {}, models / "tied", tmp_path / "still", None, False)
    assert all(torch.equal(whole([found])[name], tensor) for name, tensor in whole([still]).items())
    sizes = [sum(file.stat().st_size for file in (tmp_path / name).rglob("*.distcp")) for name in ("still", "moved")]
    assert sizes[1] - sizes[0] > 0.9 * sum(values.nbytes for values in still.values())


def _export(checkpoint: Path, model: Path, out: Path) -> None:
    export_hf(checkpoint, out, str(model), init_layout(tiny_run().parallel))


def test_what_is_exported_from_a_checkpoint_with_a_reference_is_the_policy(models, tmp_path):
    ((policy, _),) = run_ranks(moved_and_saved, 1, {}, models / "tied", tmp_path / "checkpoints")
    run_ranks(_export, 1, tmp_path / "checkpoints" / "step_000001", models / "tied", tmp_path / "exported")
    exported = weights(tmp_path / "exported")
    assert all(torch.equal(exported[name], tensor) for name, tensor in whole([policy]).items())
