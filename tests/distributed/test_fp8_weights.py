"""Weights stored in FP8: the same steps, bit for bit, as bf16 weights rounded for each product. All other code gets
dense weights."""

from pathlib import Path

import pytest
import torch
from checkpoint_now import save_now
from ranks import run_ranks
from test_fp8 import config, model
from tiny_policy import few_samples, whole_model

from megagrpo.algorithms.losses import make_loss
from megagrpo.config import ModelSection, ParallelSection, RunConfig
from megagrpo.data.packing.sample_packing import pack, packing_rules
from megagrpo.platform.parallel.layout import Layout, init_layout
from megagrpo.policy.device_checks import check_device
from megagrpo.policy.find_nan import bad_weight
from megagrpo.policy.fp8.dense_access import write_dense
from megagrpo.policy.fp8.fp8_settings import Fp8
from megagrpo.policy.fp8.masters import unrounded_values
from megagrpo.policy.fp8.products import CurrentScaling
from megagrpo.policy.fp8.rounding import E4M3, round_to
from megagrpo.policy.fp8.tensor import dense, is_fp8
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.reference import Reference
from megagrpo.proof.verify.shrink import plainly
from megagrpo.proof.verify.verified_step import fill_weights, take_step
from megagrpo.proof.verify.verify_compare import compare, distances, silent_tensors
from megagrpo.records.checkpoints.checkpoint import Checkpointer
from megagrpo.records.checkpoints.run_files import newest_checkpoint
from megagrpo.train_types import TrainState
from megagrpo.weights.bridge.megatron_io import load_model, model_state

CASES = {
    "one": (1, "qwen2_untied", {}, {}),
    "dp2": (2, "qwen2_untied", {}, {}),
    "tp2_sp": (2, "qwen3_tied", dict(tp=2, sequence_parallel=True), {}),
    "ep2": (2, "qwen3_moe", dict(ep=2), {}),
    "pp2": (2, "llama_tied", dict(pp=2), {}),
    "delta": (2, "qwen3_next", dict(tp=2, sequence_parallel=True), {}),
    "buckets": (2, "qwen2_untied", {}, dict(overlap_grad_reduce=True, ddp_bucket_size=1000)),
}
USUAL = (("ep2", "blockwise"),)


def settings(case: str, recipe: str, kept: bool) -> RunConfig:
    _, _, parallel, train = CASES[case]
    told = dict(precision="bf16", fp8_param=kept, bf16_layers=[-1] if case == "one" else [])
    return config(parallel, recipe, dict(distributed_optimizer=True, learning_rate=1e-2) | train, **told)


def start(run: RunConfig, shape: str, layout: Layout) -> tuple[MegatronPolicy, Reference]:
    hf_config = model(shape)
    policy = MegatronPolicy(run, layout, hf_config)
    fill_weights(policy, hf_config, layout)
    policy.weights_changed()
    return policy, Reference(policy)


def masters(policy: MegatronPolicy) -> list[torch.Tensor]:
    """Float32 masters that this rank holds whole. Ranks shard FP8 weights and others separately, so the shards
    differ."""
    found = [(p.numel(), getattr(p, "main_param", None)) for chunk in policy.chunks for p in chunk.parameters()]
    return [master.clone() for count, master in found if master is not None and master.numel() == count]


def step(policy: MegatronPolicy, reference: Reference) -> list[torch.Tensor]:
    """Log-probs of policy and reference before an optimizer step, and masters after it."""
    run, layout = policy.config, policy.layout
    batch = pack(few_samples(), packing_rules(run, policy.shares_prompts), layout.dp_rank, layout.dp_size)
    logprobs = policy.logprobs(batch)
    annotated = reference.annotate(batch)
    policy.train_step(annotated, make_loss(run.algorithm), batch.num_tokens)
    told = [*logprobs, *(m.terms.ref_logprobs for m in annotated.micro_batches)]
    return [rows for rows in told if rows is not None] + (masters(policy) if layout.dp_cp_size == 1 else [])


def rounded(plain: MegatronPolicy, kept: MegatronPolicy) -> list[torch.Tensor]:
    """The weights of `kept`; asserts that they equal the weights of `plain`, rounded where `kept` stores FP8."""
    scaling = CurrentScaling(Fp8.of(kept.config.model, kept.hf_config.num_layers))
    bf16, weights = ([p for chunk in policy.chunks for p in chunk.parameters()] for policy in (plain, kept))
    for exact, weight in zip(bf16, weights, strict=True):
        exact = exact.detach()
        assert torch.equal(
            dense(weight), scaling.round(exact, E4M3, 1, square=True).to(exact.dtype) if is_fp8(weight) else exact
        )
    return weights


def _steps(case: str, recipe: str) -> tuple[int, int]:
    """The number of FP8 weights and of all weights; asserts that three steps of both policies are equal."""
    layout = init_layout(ParallelSection(**CASES[case][2]))
    plain, kept = (start(settings(case, recipe, kept), CASES[case][1], layout) for kept in (False, True))
    for _ in range(3):
        expected, found = step(*plain), step(*kept)
        assert len(expected) == len(found)
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    weights = rounded(plain[0], kept[0])
    return sum(map(is_fp8, weights)), len(weights)


@pytest.mark.parametrize(
    ("case", "recipe"),
    [
        pytest.param(case, recipe, marks=[] if (case, recipe) in USUAL else [pytest.mark.full])
        for case in CASES
        for recipe in ("tensorwise", "blockwise")
    ],
)
def test_steps_are_those_of_bf16_weights_that_are_rounded_for_each_product(case, recipe):
    for in_fp8, everything in run_ranks(_steps, CASES[case][0], case, recipe):
        assert 0 < in_fp8 < everything


def _exchanged(case: str, recipe: str, folder: Path) -> None:
    """Runs with and without FP8 weights save after a step; each resumes from the other's checkpoint as from its own."""
    (folder / "config.json").write_text("{}")
    layout = init_layout(ParallelSection(**CASES[case][2]))
    expected, savers = {}, {}
    for kept in (False, True):
        policy, reference = start(settings(case, recipe, kept), CASES[case][1], layout)
        step(policy, reference)
        savers[kept] = Checkpointer(folder / f"saved{kept}", layout, policy, 1, folder)
        save_now(savers[kept], TrainState(step=1))
        expected[kept] = step(policy, reference), whole(policy)
    for kept in (False, True):
        for saved in (False, True):
            policy, reference = start(settings(case, recipe, kept), CASES[case][1], layout)
            Checkpointer(folder / f"saved{saved}", layout, policy, 1, folder).load(
                newest_checkpoint(savers[saved].folder)
            )
            found = step(policy, reference), whole(policy)
            for one, other in zip([*expected[kept][0], *expected[kept][1]], [*found[0], *found[1]], strict=True):
                assert torch.equal(one, other), (kept, saved)


def whole(policy: MegatronPolicy) -> list[torch.Tensor]:
    """The model's full tensors, on rank 0."""
    return [tensor.clone() for _, tensor in whole_model(policy)]


@pytest.mark.full
@pytest.mark.parametrize(("case", "recipe"), [("tp2_sp", "tensorwise"), ("ep2", "blockwise")])
def test_a_checkpoint_goes_on_with_either_kind_of_weights_bit_for_bit(case, recipe, tmp_path):
    run_ranks(_exchanged, CASES[case][0], case, recipe, tmp_path)


def _saved(case: str, recipe: str, folder: Path) -> None:
    """Save a checkpoint of a run after one step."""
    (folder / "config.json").write_text("{}")
    layout = init_layout(ParallelSection(**CASES[case][2]))
    policy, reference = start(settings(case, recipe, True), CASES[case][1], layout)
    step(policy, reference)
    save_now(Checkpointer(folder / "saved", layout, policy, 1, folder), TrainState(step=1))


def _loaded(case: str, recipe: str, shape: str, folder: Path) -> None:
    """Runs with and without FP8 weights load the checkpoint: both round their weights from the masters, not from the
    saved rounded weights."""
    layout = init_layout(ParallelSection(**CASES[case][2]))
    plain, kept = (start(settings(case, recipe, kept), shape, layout)[0] for kept in (False, True))
    for policy in (plain, kept):
        Checkpointer(folder / "saved", layout, policy, 1, folder).load(newest_checkpoint(folder / "saved"))
    assert any(map(is_fp8, rounded(plain, kept)))
    assert all(torch.equal(p.detach().flatten(), p.main_param.bfloat16()) for p in plain.chunks[0].parameters())


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["tensorwise", pytest.param("blockwise", marks=pytest.mark.full)])
def test_a_checkpoint_of_them_goes_into_another_layout(recipe, tmp_path):
    run_ranks(_saved, 2, "tp2_sp", recipe, tmp_path)
    run_ranks(_loaded, 1, "one", recipe, CASES["tp2_sp"][1], tmp_path)


def _written_and_read(folder: Path) -> None:
    """Weights written into a policy come back rounded from Megatron's save and from an export; its masters do not
    change."""
    from megatron.core import dist_checkpointing

    layout = init_layout(ParallelSection())
    policy, reference = start(settings("one", "tensorwise", True), CASES["one"][1], layout)
    named = dict(policy.chunks[0].named_parameters())
    weight = named["decoder.layers.1.mlp.linear_fc1.weight"]
    exact = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    write_dense(weight, exact)
    policy.weights_changed()
    assert torch.equal(weight.main_param.view(weight.shape), exact.float()) and not torch.equal(dense(weight), exact)
    assert 0 < (dense(weight) - exact).abs().max() < 2**-3 * exact.abs().max() and unrounded_values(weight) is None
    assert torch.equal(dense(weight), round_to(exact, E4M3, tuple(exact.shape)).bfloat16())
    assert all(torch.equal(weight, kept) is False for kept in reference.weights if kept.shape == weight.shape)
    before = whole(policy)
    (folder / "of_bf16").mkdir()
    (folder / "of_fp8").mkdir()
    dist_checkpointing.save(model_state(policy.chunks, layout), str(folder / "of_fp8"), async_strategy="mcore")
    policy.weights_changed()
    masters_of_rounded = weight.main_param.clone()
    assert torch.equal(masters_of_rounded.view(weight.shape).bfloat16(), dense(weight))
    write_dense(weight, exact)
    load_model(policy.chunks, folder / "of_fp8", layout)
    assert all(torch.equal(one, other) for one, other in zip(before, whole(policy), strict=True))
    plain, _ = start(settings("one", "tensorwise", False), CASES["one"][1], layout)
    dist_checkpointing.save(model_state(plain.chunks, layout), str(folder / "of_bf16"), async_strategy="mcore")
    load_model(policy.chunks, folder / "of_bf16", layout)
    policy.weights_changed()
    assert all(torch.equal(one, other) for one, other in zip(masters(plain), masters(policy), strict=True))
    with (
        pytest.raises(TypeError, match=r"aten.add_.Tensor cannot change an FP8 weight in place; use write_dense\(\)"),
        torch.no_grad(),
    ):
        weight.add_(1)
    bad = exact.clone()
    bad[3, 5] = torch.nan
    write_dense(weight, bad)
    assert bad_weight(policy.chunks, 0, 0).name == "decoder.layers.1.mlp.linear_fc1.weight"
    assert dense(weight).isnan().sum() == 1


def test_what_is_written_to_them_is_rounded_and_their_masters_are_not(tmp_path):
    run_ranks(_written_and_read, 1, tmp_path)


@pytest.mark.full
def test_megagrpo_verify_holds_a_layout_with_them_against_one_process_without():
    run = settings("tp2_sp", "blockwise", True)
    single = [plainly(run), plainly(run.model_copy(update=dict(model=ModelSection(path="tiny", precision="fp32"))))]
    rounded, exact = (run_ranks(take_step, 1, one, model("qwen3_tied"), few_samples())[0] for one in single)
    found = run_ranks(take_step, 2, run, model("qwen3_tied"), few_samples())[0]
    assert (
        silent_tensors(found) == [] and [d for d in compare(found, exact, rounded, coarse=True) if not d.passed] == []
    )
    # the rounding of FP8
    assert max(error for (kind, _), error in distances(found, exact).items() if kind == "next weight") > 0.02


def test_fp8_weights_of_a_policy_in_float32_are_refused():
    run = settings("one", "blockwise", True)
    run = run.model_copy(update=dict(model=run.model.model_copy(update=dict(precision="fp32"))))
    with pytest.raises(
        ValueError,
        match=r"model\.fp8_param: weights in float32 have no masters to be rounded from; set model\.precision",
    ):
        check_device(run, model("qwen2_untied"))
