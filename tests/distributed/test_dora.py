"""DoRA against PEFT's, and over ranks: the norms of rows are those of the whole weight in every layout."""

from __future__ import annotations

import contextlib
import functools
import json
from functools import partial

import pytest
import torch
from checkpoint_now import save_now
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from suites import usual
from test_build_and_bridge import run_tool
from test_few_kv_heads import tiny_model as few_kv_heads
from test_lora_experts import LATENT_NAMES, V3
from test_lora_peft import LORA, _read_with_peft, assert_as_peft, assert_resumes, make_with_peft, prepare
from test_lora_sync import _push
from test_stored_weights import model as model_of_blocks
from test_stored_weights import stored
from tiny_policy import Case, few_samples, tiny_model, tiny_run

from megagrpo.algorithms.losses import make_loss
from megagrpo.config import LoraSection
from megagrpo.data.packing.sample_packing import pack, packing_rules
from megagrpo.families.hf_config import load_hf_config
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.device_checks import check_device
from megagrpo.policy.lora.dora import start_magnitudes
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.reference import Reference
from megagrpo.proof.verify.shrink import plainly, random_tensor
from megagrpo.proof.verify.verified_step import Outcome, relative_error, take_step, whole_tensors
from megagrpo.proof.verify.verify_compare import compare, silent_tensors
from megagrpo.records.checkpoints.checkpoint import Checkpointer
from megagrpo.records.checkpoints.run_files import newest_checkpoint
from megagrpo.train_types import TrainState
from megagrpo.weights.blocks.parameter_blocks import Merged, adapter_blocks, merged_blocks
from megagrpo.weights.bridge.adapter_files import fill_adapters
from megagrpo.weights.bridge.load import load_hf

DORA = dict(use_dora=True)
TP2_SP = dict(tp=2, sequence_parallel=True)
SOME = DORA | dict(target_modules=["k_proj", "o_proj", "up_proj"])
LATENT = DORA | dict(target_modules=LATENT_NAMES)

# ------------------------------------------------------------------------------------------------------------ PEFT


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    import peft  # noqa: F401 - once here, not in every fork

    root = tmp_path_factory.mktemp("dora")
    return root, *run_ranks(partial(make_with_peft, **DORA), 1, root)[0]


@pytest.mark.parametrize("parallel", usual([{}, dict(tp=2), TP2_SP, dict(pp=2, vpp=2)], 2), ids=str)
def test_gradients_merged_weights_and_files_are_those_of_peft(parallel, made, tmp_path):
    assert sum("magnitude" in name for name in made[1]) == 7 * 4
    assert_as_peft(parallel, made, tmp_path, DORA)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "shape", "selection"),
    usual([("Phi3", None, DORA), ("Qwen2", None, SOME), ("DeepseekV3", V3, LATENT)], 0),
    ids=str,
)
def test_so_are_those_of_fused_of_some_and_of_latent_projections(kind, shape, selection, tmp_path):
    root = tmp_path / "peft"
    found = run_ranks(partial(make_with_peft, **selection), 1, root, kind, shape, 0.1)[0]
    assert_as_peft(TP2_SP, (root, *found), tmp_path, selection)


def test_the_tool_merges_as_peft_and_the_engine_gets_the_same_bits(made, tmp_path):
    root, _, expected, _ = made
    pipeline = dict(tp=2, pp=2)
    synced = run_ranks(_push, 4, root, pipeline, tmp_path / "shm", tmp_path / "export", DORA)[0]
    arguments = ("merge", root / "adapter", tmp_path / "merged", "--model", root / "model", "--tp", 2)
    assert run_ranks(run_tool, 2, *arguments) == [0, 0]
    exported, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("export", "merged"))
    assert synced.keys() == exported.keys() == merged.keys()
    for name, tensor in merged.items():
        assert torch.equal(torch.from_numpy(synced[name]), exported[name].float()), name
        assert torch.equal(exported[name], tensor.bfloat16()), name
        assert relative_error(tensor, expected[name]) < 1e-6, name


def test_merging_into_a_bfloat16_model_rounds_once(made, tmp_path):
    """PEFT merges in bfloat16: the norm, the factor and the product are each rounded there."""
    root = made[0]
    base = {name: tensor.bfloat16() for name, tensor in load_file(root / "model/model.safetensors").items()}
    (tmp_path / "model").mkdir()
    save_file(base, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    raw = json.loads((root / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps(raw | {"dtype": "bfloat16"}))
    arguments = ("merge", root / "adapter", tmp_path / "out", "--model", tmp_path / "model", "--tp", 2)
    assert run_ranks(run_tool, 2, *arguments) == [0, 0]
    merged = load_file(tmp_path / "out/model.safetensors")
    adapter = load_file(root / "adapter/adapter_model.safetensors")
    adapted = {name.removesuffix("lora_magnitude_vector") for name in adapter if name.endswith("vector")}
    assert len(adapted) == 7 * raw["num_hidden_layers"]
    for prefix in adapted:
        a, b = (adapter[f"{prefix}lora_{matrix}.weight"].double() for matrix in "AB")
        name = f"{prefix.removeprefix('base_model.model.')}weight"
        whole = base[name].double() + LORA["alpha"] / LORA["rank"] ** 0.5 * b @ a
        expected = (adapter[f"{prefix}lora_magnitude_vector"].double() / whole.norm(dim=1))[:, None] * whole
        assert ((merged[name].double() - expected).abs() <= expected.abs() * 2**-8 + 1e-6).all(), name
        assert (merged[name] == expected.bfloat16()).double().mean() > 0.999, name


@pytest.mark.full
def test_a_run_continues_in_another_layout_and_peft_reads_its_file(made, tmp_path):
    assert_resumes(made[0], TP2_SP, dict(pp=2), tmp_path, DORA)
    (folder,) = tmp_path.glob("step_*/adapter")
    assert json.loads((folder / "adapter_config.json").read_text())["use_dora"] is True
    assert not torch.equal(run_ranks(_read_with_peft, 1, made[0], folder)[0], made[3])
    assert torch.equal(run_ranks(_read_with_peft, 1, made[0], made[0] / "adapter")[0], made[3])


def _fresh(root, parallel, precision):
    config, layout, hf_config, policy, batch = (prepare if precision == "fp32" else _in_bfloat16)(
        root, parallel, **DORA
    )
    reference = Reference(policy)
    tensors = whole_tensors(policy, hf_config, layout, lambda p: p.data)[0]
    rows = [policy.logprobs(batch)]
    factors = [m.adapter.factor() for c in policy.chunks for m in c.modules() if hasattr(m, "adapter")]
    batch = batch.with_terms(old_logprobs=rows[0])
    policy.train_step(batch, make_loss(config.algorithm), batch.num_tokens)
    rows += [policy.logprobs(batch), reference.logprobs(batch)]
    said = [(torch.equal(a, c), torch.equal(a, b)) for a, b, c in zip(*rows, strict=True) if a is not None]
    dtypes = {p.dtype for _, p, _ in adapter_blocks(policy.chunks, hf_config, layout) if p.dim() == 1}
    return tensors, all((factor == 1).all() for factor in factors), said, dtypes


@pytest.mark.full
@pytest.mark.parametrize(
    ("parallel", "precision"),
    usual([(parallel, precision) for parallel in ({}, TP2_SP, dict(pp=2)) for precision in ("fp32", "bf16")], 3),
    ids=str,
)
def test_a_fresh_adapter_adds_nothing_and_has_the_norms_of_the_model(parallel, precision, made):
    base = load_file(made[0] / "model/model.safetensors")
    tensors, ones, said, dtypes = run_ranks(_fresh, 2 if parallel else 1, made[0], parallel, precision)[0]
    magnitudes = {name: value for name, value in tensors.items() if name.endswith("lora_magnitude_vector")}
    assert len(magnitudes) == 7 * 4 and ones and dtypes == {torch.float32}
    assert all(still and not moved for still, moved in said)
    for name, value in magnitudes.items():
        weight = base[name.removeprefix("base_model.model.").replace("lora_magnitude_vector", "weight")]
        weight = weight.bfloat16() if precision == "bf16" else weight
        assert relative_error(value, weight.double().norm(dim=1)) < 1e-6, name


def _with_rows_of_zeros(root):
    """Whether a step on a model with rows of zeros is finite, and whether these rows are almost 0 in merged weights."""
    config, layout, hf_config, policy, batch = prepare(root, dict(tp=2), **DORA)
    linears = [m for chunk in policy.chunks for m in chunk.modules() if hasattr(m, "adapter")]
    with torch.no_grad():
        for linear in linears:
            linear.weight[1] = 0
    start_magnitudes(policy.chunks)
    metrics = policy.train_step(batch, make_loss(config.algorithm), batch.num_tokens)
    finite = all(p.isfinite().all() for chunk in policy.chunks for p in chunk.parameters())
    weights = (weight for _, weight, _ in merged_blocks(policy.chunks, hf_config, layout))
    merged = [weight.detach() for weight in weights if isinstance(weight, Merged)]
    zeros = [weight[1].abs().max() < 1e-30 < weight[0].abs().max() for weight in merged]
    return finite and metrics["grad_norm"].value > 0, sum(zeros) == len(linears)


def test_a_row_of_zeros_makes_no_nan(made):
    """Llama-3.1-8B's o_proj has such rows."""
    assert run_ranks(_with_rows_of_zeros, 2, made[0]) == [(True, True)] * 2


# ----------------------------------------------------------------------------------------------------------- over ranks

SHARDED = dict(distributed_optimizer=True)
ALL = dict(rank=3) | DORA
CASES = [
    (Case("tp3", 3, dict(tp=3)), "llama_tied", ALL),
    (Case("tp2_sp_cp2", 4, dict(tp=2, cp=2, sequence_parallel=True), SHARDED), "qwen2_untied", ALL),
    (Case("pp2_vpp2", 2, dict(pp=2, vpp=2)), "llama_tied", ALL),
    (Case("tp2_sp_pp2", 4, dict(tp=2, pp=2, sequence_parallel=True)), "phi3", ALL),
    (Case("pp2_dp2", 4, dict(pp=2), SHARDED), "qwen3_tied", ALL | dict(target_modules=["q_proj", "down_proj"])),
    (Case("tp4", 4, dict(tp=4)), "few_kv_heads", ALL),
    (Case("tp4_sp", 4, dict(tp=4, sequence_parallel=True)), "few_kv_heads", ALL),
    (Case("tp2_sp_ep2", 2, dict(tp=2, ep=2, etp=1, sequence_parallel=True)), "qwen3_moe", ALL),
    (Case("tp2_sp", 2, TP2_SP, SHARDED), "nf4", ALL),
]


def of_run(parallel: dict, model: str, lora: dict, recompute: str, train: dict | None = None):
    storage = "nf4" if model == "nf4" else "none"
    chosen = dict(recompute=recompute, base_storage=storage)
    return tiny_run(parallel, lora=lora, model=chosen, train=dict(share_prompts=False) | (train or {}))


def shape_of(model: str):
    if model == "nf4":
        return model_of_blocks()
    return few_kv_heads("qwen2_untied") if model == "few_kv_heads" else tiny_model(model)


@functools.cache
def one_process(model: str, lora: str) -> Outcome:
    settings = plainly(of_run({}, model, eval(lora), "none"))
    (found,) = run_ranks(take_step, 1, settings, shape_of(model), few_samples())
    assert silent_tensors(found) == []
    return found


@pytest.mark.parametrize(
    ("case", "model", "lora"),
    [pytest.param(*case, id=f"{case[0]}-{case[1]}", marks=pytest.mark.full) for case in CASES],
)
def test_a_step_equals_that_of_one_process(case, model, lora):
    recompute = "full" if case.name in ("tp2_sp", "tp2_sp_pp2") else "none"
    settings = of_run(case.parallel, model, lora, recompute, case.train)
    found = run_ranks(take_step, case.ranks, settings, shape_of(model), few_samples())[0]
    assert [d for d in compare(found, one_process(model, repr(lora))) if not d.passed] == []
    assert found.disagreement == 0 and any("magnitude" in name for name in found.gradients)


@pytest.mark.full
def test_the_norms_of_stored_weights_are_those_of_the_rounded_weights():
    def rounded(name: str, shape: tuple) -> torch.Tensor:
        tensor = random_tensor(name, shape, 0.8)
        return stored(tensor, "nf4").detach() if name.endswith("_proj.weight") and "lora" not in name else tensor

    settings = of_run({}, "dense", ALL, "none")
    (found,) = run_ranks(take_step, 1, settings, shape_of("nf4"), few_samples(), rounded)
    assert [d for d in compare(found, one_process("nf4", repr(ALL))) if not d.passed] == []


def _in_bfloat16(root, parallel, **lora):
    """A policy with adapters in bfloat16, and a batch of random samples."""
    train = dict(distributed_optimizer=True)
    config = tiny_run(parallel, lora=dict(rank=2), model=dict(precision="bf16"), train=train, algorithm=dict(beta=0.0))
    config = config.model_copy(update=dict(lora=LoraSection(**LORA | DORA | lora)))  # tiny_run makes the adapters small
    layout, hf_config = init_layout(config.parallel), load_hf_config(root / "model")
    policy = MegatronPolicy(config, layout, hf_config)
    load_hf(policy.chunks, hf_config, root / "model", layout)
    fill_adapters(policy.chunks, hf_config, layout, config.lora, seed=5)
    policy.weights_changed()
    batch = pack(few_samples(), packing_rules(config, policy.shares_prompts), layout.dp_rank, layout.dp_size)
    return config, layout, hf_config, policy, batch


def _train(root, folder, resume):
    config, layout, hf_config, policy, batch = _in_bfloat16(root, {}, adapter_path=str(root / "adapter"))
    batch = batch.with_terms(old_logprobs=policy.logprobs(batch))
    saver = Checkpointer(folder, layout, policy, 2, root / "model")
    if resume:
        assert saver.load(newest_checkpoint(saver.folder)) == TrainState(step=1)
    for step in range(resume, 2):
        policy.train_step(batch, make_loss(config.algorithm), batch.num_tokens)
        if step == 0:
            save_now(saver, TrainState(step=1))
    return whole_tensors(policy, hf_config, layout, lambda p: p.data)[0]


@pytest.mark.full
def test_a_bfloat16_run_resumes_exactly(made, tmp_path):
    """Magnitudes are float32 beside bfloat16 matrices, each in its own buffer of the distributed optimizer."""
    unbroken, resumed = (run_ranks(_train, 2, made[0], tmp_path, resume)[0] for resume in (False, True))
    assert unbroken.keys() == resumed.keys() and all(torch.equal(resumed[name], unbroken[name]) for name in unbroken)
    (file,) = tmp_path.glob("step_*/adapter/adapter_model.safetensors")
    dtypes = {(name.rpartition(".lora_")[2][0], tensor.dtype) for name, tensor in load_file(file).items()}
    assert dtypes == {("A", torch.bfloat16), ("B", torch.bfloat16), ("m", torch.float32)}
    first = {name: value for name, value in load_file(made[0] / "adapter/adapter_model.safetensors").items()}
    assert all(not torch.equal(unbroken[name], value.double()) for name, value in first.items() if "magnitude" in name)


@pytest.mark.parametrize("saved", [True, False])
def test_magnitudes_in_bf16_need_the_distributed_optimizer_to_be_saved(saved):
    sections = dict(model=dict(precision="bf16"), lora=dict(rank=2, use_dora=True))
    config = tiny_run(**sections, train=dict(distributed_optimizer=saved))
    problem = pytest.raises(ValueError, match=r"lora\.use_dora: .* set train\.distributed_optimizer to true")
    with contextlib.nullcontext() if saved else problem:
        assert check_device(config, tiny_model("qwen2_untied")) == torch.bfloat16
