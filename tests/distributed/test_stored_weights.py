"""Frozen weights in FP8 and NF4: exact against naive dequantization, the same in every layout, and no dense copy is
kept."""

import functools

import pytest
import torch
from ranks import run_ranks
from suites import usual
from tiny_policy import SHAPES, Case, few_samples, tiny_run

from megagrpo.algorithms.losses import make_loss
from megagrpo.config import ParallelSection
from megagrpo.data.packing.sample_packing import pack, packing_rules
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.lora.quantized_base import NF4_VALUES, STORED_BLOCK, StoredWeight
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.proof.verify.shrink import plainly, random_tensor, shrink_model
from megagrpo.proof.verify.verified_step import Outcome, fill_weights, take_step
from megagrpo.proof.verify.verify_compare import compare, silent_tensors
from megagrpo.weights.blocks.parameter_blocks import blocks, merged_blocks

STORAGES = ("fp8", "nf4")


def naive(weight: torch.Tensor, storage: str) -> torch.Tensor:
    """Round each block of 64 to the nearest of all possible values, in float64, one block at a time."""
    if storage == "fp8":
        table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
        table = table[table.isfinite()] / 448
    else:
        table = torch.tensor(NF4_VALUES).double()
    rows = weight.double().reshape(-1, STORED_BLOCK)
    found = [row.abs().max() * table[(row[:, None] / row.abs().max() - table).abs().argmin(1)] for row in rows]
    return torch.stack(found).view(weight.shape)


def stored(weight: torch.Tensor, storage: str) -> StoredWeight:
    weight.tensor_model_parallel, weight.partition_dim = False, 0
    made = StoredWeight(weight, storage)
    made.store(weight)
    return made


@pytest.mark.parametrize("storage", STORAGES)
def test_what_is_stored_is_the_nearest_that_can_be_and_storing_it_again_changes_nothing(storage):
    torch.manual_seed(0)
    weight = torch.randn(24, 192) * torch.logspace(-4, 2, 24)[:, None]
    weight[3, :64] = 0
    made = stored(weight, storage)
    dense = made.detach()
    expected = torch.where(weight == 0, 0, naive(weight, storage).nan_to_num())
    torch.testing.assert_close(dense.double(), expected, rtol=1e-6, atol=0)
    made.store(dense)
    torch.testing.assert_close(made.detach(), dense, rtol=1e-6, atol=0)
    error = ((dense - weight).norm() / weight.norm()).item()
    assert error < {"fp8": 0.03, "nf4": 0.11}[storage]
    held = made.codes.nbytes + made.scales.nbytes
    assert held == weight.numel() * {"fp8": 1 + 4 / 64, "nf4": 0.5 + 4 / 64}[storage]
    assert stored(weight.bfloat16(), storage).detach().dtype == torch.bfloat16


def test_rows_that_blocks_do_not_fit_are_refused():
    with pytest.raises(
        ValueError, match=r"model\.base_storage: nf4 needs rows of a multiple of 64 elements on each rank, not 96"
    ):
        stored(torch.randn(2, 96), "nf4")


# ----------------------------------------------------------------------------------------------------------- over ranks

CASES = [
    Case("tp2_sp", 2, dict(tp=2, sequence_parallel=True)),
    Case("tp2_pp2", 4, dict(tp=2, pp=2)),
    Case("cp2", 2, dict(cp=2), dict(distributed_optimizer=True)),
]
LARGEST = ParallelSection(tp=2, pp=2)


MIXED = dict(target_parameters=["experts.gate_up_proj", "experts.down_proj"])


def config(parallel: dict, storage: str, train: dict | None = None, recompute: str = "none", lora: dict | None = None):
    model = dict(base_storage=storage, recompute=recompute)
    return tiny_run(
        parallel, lora=dict(rank=2) | (lora or {}), model=model, train=dict(share_prompts=False) | (train or {})
    )


@functools.cache
def one_process(storage: str, shape: str = "qwen2_untied") -> Outcome:
    settings = config({}, storage, lora=MIXED if shape == "qwen3_moe" else {})
    (found,) = run_ranks(take_step, 1, plainly(settings), model(shape), few_samples())
    assert silent_tensors(found) == []
    return found


def model(shape: str = "qwen2_untied"):
    return shrink_model(SHAPES[shape], LARGEST, unit=STORED_BLOCK)


@pytest.mark.parametrize(
    ("case", "storage"),
    usual([(case, storage) for storage in STORAGES for case in CASES]),
    ids=str,
)
def test_a_step_on_stored_weights_equals_that_of_one_process(case, storage):
    recompute = "full" if case.name == "tp2_pp2" else "none"
    settings = config(case.parallel, storage, case.train, recompute)
    found = run_ranks(take_step, case.ranks, settings, model(), few_samples())[0]
    assert [d for d in compare(found, one_process(storage)) if not d.passed] == [] and found.disagreement == 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "storage"),
    usual(
        [
            (
                Case("tp2_ep2", 2, dict(tp=2, ep=2, etp=1, sequence_parallel=True), dict(distributed_optimizer=True)),
                "nf4",
            ),
            (Case("tp2_etp2", 2, dict(tp=2, etp=2, sequence_parallel=True)), "fp8"),
        ],
        1,
    ),
    ids=str,
)
def test_so_does_one_of_experts_with_adapters(case, storage):
    settings = config(case.parallel, storage, case.train, lora=MIXED)
    found = run_ranks(take_step, case.ranks, settings, model("qwen3_moe"), few_samples())[0]
    assert [d for d in compare(found, one_process(storage, "qwen3_moe")) if not d.passed] == []
    assert found.disagreement == 0 and any(".mlp.experts." in name for name in found.gradients)


@pytest.mark.parametrize("storage", usual(STORAGES, 1))
def test_a_step_on_stored_weights_equals_one_on_dense_weights_that_were_rounded_before(storage):
    def rounded(name: str, shape: tuple) -> torch.Tensor:
        tensor = random_tensor(name, shape, 0.8)
        inside = name.endswith("_proj.weight") and "lora" not in name
        return stored(tensor, storage).detach() if inside else tensor

    for shape, lora in (("qwen2_untied", {}), ("qwen3_moe", MIXED)):
        settings = config({}, "none", lora=lora)
        (found,) = run_ranks(take_step, 1, settings, model(shape), few_samples(), rounded)
        assert [d for d in compare(found, one_process(storage, shape)) if not d.passed] == [], shape


def _measure(storage: str) -> tuple[int, int, int, bool]:
    """Bytes of the blocks' linears; the number of shapes of their weights among the tensors saved for backward; the
    number of weights that the engine gets with adapters added, and whether these belong to linears."""
    settings = config({}, storage)
    layout = init_layout(settings.parallel)
    policy = MegatronPolicy(settings, layout, model())
    fill_weights(policy, model(), layout)
    policy.weights_changed()
    tensors = [pair for chunk in policy.chunks for pair in (*chunk.named_parameters(), *chunk.named_buffers())]
    held = sum(tensor.nbytes for name, tensor in tensors if ".linear_" in name and "adapter" not in name)
    weights = {
        param.shape
        for name, param, _ in blocks(policy.chunks, model(), layout)
        if ".linear_" in name and name.endswith("weight")
    }
    kept = []
    batch = pack(few_samples(), packing_rules(settings, policy.shares_prompts), 0, 1)

    def note(tensor):
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        policy.backward(batch, make_loss(settings.algorithm), batch.num_tokens)
    dense = {name: param for name, param, _ in blocks(policy.chunks, model(), layout)}
    sent = {name: param.detach() for name, param, _ in merged_blocks(policy.chunks, model(), layout)}
    changed = {name for name in sent if not torch.equal(sent[name], dense[name].detach())}
    return held, len(weights & set(kept)), len(changed), all(".linear_" in name for name in changed)


@pytest.mark.parametrize(("storage", "share"), usual([("fp8", (1 + 4 / 64) / 4), ("nf4", (0.5 + 4 / 64) / 4)], 1))
def test_no_dense_weight_is_held_between_the_passes(storage, share):
    ((held, kept, _, _),) = run_ranks(_measure, 1, storage)
    ((dense, kept_dense, changed, linears),) = run_ranks(_measure, 1, "none")
    assert kept == 0 < kept_dense and held < 1.02 * share * dense
    assert changed == 4 * model().num_layers and linears
