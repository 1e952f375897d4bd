"""Delayed scaling without a GPU: a policy's scales in training equal a naive oracle that only sees the operands of
linears. They are the same on all ranks of a stage under any recomputation, and a run resumes with them."""

import json
from collections import defaultdict

import pytest
import torch
from checkpoint_now import save_now
from ranks import run_ranks
from test_fp8 import CASES, config, model
from tiny_policy import Case

from megagrpo.algorithms.losses import make_loss
from megagrpo.config import RunConfig
from megagrpo.data.packing.sample_packing import pack, packing_rules
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.fp8.delayed_scaling import GRADIENT, INPUT, WEIGHT, DelayedScaling
from megagrpo.policy.fp8.fp8_settings import History
from megagrpo.policy.fp8.products import Product, Quantised
from megagrpo.policy.fp8.rounding import E4M3, E5M2, scaled
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.proof.verify.shrink import random_samples
from megagrpo.proof.verify.verified_step import fill_weights
from megagrpo.records.checkpoints.checkpoint import Checkpointer
from megagrpo.records.checkpoints.run_files import newest_checkpoint
from megagrpo.train_types import TrainState

MOST = {INPUT: 448.0, WEIGHT: 448.0, GRADIENT: 57344.0}
PARTS = (INPUT, WEIGHT, GRADIENT)


def settings(parallel: dict | None = None, train: dict | None = None, tokens: int = 64, **keys) -> RunConfig:
    """A run in which a rank has several micro-batches."""
    made = config(parallel or {}, "delayed", train, **keys)
    return made.model_copy(update=dict(train=made.train.model_copy(update=dict(max_tokens_per_micro_batch=tokens))))


def policy_of(made: RunConfig, shape: str) -> MegatronPolicy:
    layout, hf_config = init_layout(made.parallel), model(shape)
    policy = MegatronPolicy(made, layout, hf_config)
    fill_weights(policy, hf_config, layout)
    policy.weights_changed()
    return policy


def train(policy: MegatronPolicy, seed: int) -> float:
    """A step in the order of a run: log-probs first, then one update."""
    batch = pack(
        random_samples(seed),
        packing_rules(policy.config, policy.shares_prompts),
        policy.layout.dp_rank,
        policy.layout.dp_size,
    )
    assert len(batch.micro_batches) > 1
    batch = batch.with_terms(old_logprobs=policy.logprobs(batch)) if policy.layout.parallel.pp == 1 else batch
    return policy.train_step(batch, make_loss(policy.config.algorithm), batch.num_tokens)["loss"].value


# ----------------------------------------------------------------------------------------------------------- the oracle


class Naive:
    """The scale of one operand: all magnitudes since the last update count as one, and the history adds length - 1
    earlier ones."""

    def __init__(self, most: float, history: History):
        self.scale, self.most, self.history = 1.0, most, history
        self.before, self.now = [], 0.0

    def meets(self, magnitude: float) -> None:
        self.now = max(self.now, magnitude)

    def changes(self) -> None:
        largest = max([self.now, *self.before[-(self.history.length - 1) :]]) if self.history.length > 1 else self.now
        largest = self.now if self.history.algo == "most_recent" else largest
        if largest > 0:
            self.scale = self.most / largest / 2**self.history.margin
        self.before.append(self.now)
        self.now = 0.0


HISTORIES = [History(1024, "max", 0), History(3, "max", 1), History(1, "max", 0), History(4, "most_recent", 0)]


@pytest.mark.parametrize("history", HISTORIES, ids=str)
def test_a_scale_follows_from_what_was_met_before_and_never_from_what_is_there(history):
    scaling = DelayedScaling(2, history, E5M2, torch.distributed.group.WORLD)
    naive = {(i, part): Naive(MOST[part], history) for i in range(2) for part in PARTS}
    generator, group = torch.Generator().manual_seed(0), torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=group, rank=0, world_size=1)
    try:
        for step in range(8):
            for index, part in naive:
                for _ in range(2):
                    x = torch.randn(4, 4, generator=generator) * 10 ** (step % 3) * (step != 4)
                    assert scaled(x, E4M3, scaling.scale[index, part]).isfinite().all()
                    scaling.note(index, part, x)
                    naive[index, part].meets(x.abs().max().item())
            scaling.update([INPUT, WEIGHT])
            scaling.update([GRADIENT])
            for (index, part), expected in naive.items():
                expected.changes()
                assert scaling.scale[index, part].item() == pytest.approx(expected.scale, rel=1e-6), (step, index, part)
    finally:
        torch.distributed.destroy_process_group()


def test_numbers_too_large_for_a_scale_become_the_largest_that_there_are():
    x = torch.tensor([1.0, -300.0, 0.3, float("nan")])
    found = scaled(x, E4M3, torch.tensor(4.0))
    assert found[:3].tolist() == [1.0, -112.0, 0.3125] and found[3].isnan()


def test_what_is_not_finite_changes_no_scale():
    scaling = DelayedScaling(1, History(1), E5M2, None)
    scaling.note(0, INPUT, torch.tensor([2.0, float("nan")]))
    assert scaling.amaxes[0, 0, INPUT] == 0
    scaling.note(0, INPUT, torch.tensor([2.0, float("-inf")]))
    assert scaling.amaxes[0, 0, INPUT] == torch.inf


# ---------------------------------------------------------------------------------------------------------- in a policy


def _watched(made: RunConfig, history: History) -> list[str]:
    """Differences between a policy in training and `Naive` for each operand of its linears. One rank."""
    policy = policy_of(made, "qwen2_untied")
    linears = [m for m in policy.chunks[0].modules() if isinstance(m, Quantised)]
    scaling, decoder = policy._scaling, policy.chunks[0].decoder
    naive = {(i, part): Naive(MOST[part], history) for i in range(len(linears)) for part in PARTS}
    fresh, rounded, wrong, seen, product = set(), {}, [], defaultdict(int), Product.apply

    def watched(x, weight, operands, group):
        i = operands.index
        seen[i] += 1
        used = {INPUT: operands.input_scale.item(), WEIGHT: operands.weight_scale.item()}
        if i in fresh:  # a weight is quantized once for all micro-batches
            fresh.discard(i)
            rounded[i] = naive[i, WEIGHT].scale
            naive[i, WEIGHT].meets(weight.detach().abs().max().item())
        naive[i, INPUT].meets(x.detach().abs().max().item())
        for part, expected in ((INPUT, naive[i, INPUT].scale), (WEIGHT, rounded[i])):
            wrong.extend([f"{i}, {part}: {used[part]}, not {expected}"] * (abs(used[part] / expected - 1) > 1e-6))
        y = product(x, weight, operands, group)
        if y.requires_grad:
            y.register_hook(lambda grad: naive[i, GRADIENT].meets(grad.abs().max().item()))
        return y

    def leaves(module, inputs, output):
        if torch.is_grad_enabled():
            for i in range(len(linears)):
                naive[i, INPUT].changes()
                naive[i, WEIGHT].changes()
            output.register_hook(lambda grad: order.append("backward"))

    def backward_was(module, grad_input, grad_output):
        for i in range(len(linears)):
            naive[i, GRADIENT].changes()

    order = []
    decoder.register_forward_hook(leaves)
    policy.chunks[0].embedding.register_full_backward_hook(backward_was)
    begin = scaling.begin
    scaling.begin = lambda: (fresh.update(range(len(linears))), begin())
    Product.apply = watched
    try:
        for seed in (1, 2, 3):
            train(policy, seed)
    finally:
        del Product.apply
    for (i, part), expected in naive.items():
        found = scaling.scale[i, part].item()
        wrong += [f"at the end {i}, {part}: {found}, not {expected.scale}"] * (abs(found / expected.scale - 1) > 1e-6)
    assert min(seen.values()) == max(seen.values()) >= 12 and len(order) >= 6
    return wrong


@pytest.mark.parametrize(
    "keys", [dict(fp8_amax_history_len=2, fp8_margin=1), pytest.param({}, marks=pytest.mark.full)], ids=str
)
def test_a_policy_scales_by_what_its_linears_met_in_the_micro_batches_before(keys):
    history = History(keys.get("fp8_amax_history_len", 1024), "max", keys.get("fp8_margin", 0))
    assert run_ranks(_watched, 1, settings(**keys), history) == [[]]


def _trained(made: RunConfig, shape: str) -> tuple[list[float], torch.Tensor, torch.Tensor]:
    """Losses of three steps, and the scales and magnitudes after them."""
    policy = policy_of(made, shape)
    losses = [train(policy, seed) for seed in (1, 2, 3)]
    return losses, policy._scaling.scale, policy._scaling.amaxes


@pytest.mark.full
def test_a_layer_that_is_computed_again_is_computed_as_before_and_counts_once():
    parallel = dict(tp=2, sequence_parallel=True)
    found = {
        kind: run_ranks(_trained, 2, settings(parallel, recompute=kind), "qwen2_untied") for kind in ("none", "full")
    }
    for one, other in zip(found["none"], found["full"], strict=True):
        assert one[0] == other[0] and torch.equal(one[1], other[1]) and torch.equal(one[2], other[2])
    scales = found["none"][0][1]
    assert (scales != 1).all() and torch.equal(scales, found["none"][1][1])


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "shape"),
    [(CASES[1], "qwen2_untied"), (CASES[2], "qwen2_untied"), (Case("ep2", 2, dict(ep=2)), "qwen3_moe")],
)
def test_the_ranks_of_a_stage_share_their_scales(case, shape):
    found = run_ranks(_trained, case.ranks, settings(case.parallel, case.train, recompute="full"), shape)
    stages = case.parallel.get("pp", 1)
    each = case.ranks // stages
    for stage in range(stages):
        first, *others = found[stage * each : (stage + 1) * each]
        assert all(torch.equal(first[1], other[1]) for other in others) and (first[1] != 1).any()
    assert stages == 1 or not torch.equal(found[0][1], found[-1][1])


# ---------------------------------------------------------------------------------------------------------- checkpoints


def _saved(made: RunConfig, shape: str, folder, source) -> tuple[float, torch.Tensor]:
    """Two steps, log-probs without a following step, a checkpoint, and a third step."""
    policy = policy_of(made, shape)
    saver = Checkpointer(folder, policy.layout, policy, 1, source)
    train(policy, 1), train(policy, 2)
    batch = pack(
        random_samples(4), packing_rules(made, policy.shares_prompts), policy.layout.dp_rank, policy.layout.dp_size
    )
    policy.logprobs(batch)
    save_now(saver, TrainState(step=2))
    return train(policy, 3), policy._scaling.amaxes


def _resumed(
    made: RunConfig, shape: str, folder, source, steps: int = 1
) -> tuple[list[float], torch.Tensor, torch.Tensor]:
    policy = policy_of(made, shape)
    saver = Checkpointer(folder, policy.layout, policy, 1, source)
    saver.load(newest_checkpoint(saver.folder))
    losses = [train(policy, 3) for _ in range(steps)]
    return losses, policy._scaling and policy._scaling.amaxes, policy._scaling and policy._scaling.scale


@pytest.fixture
def source(tmp_path):
    def made(shape: str):
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_text(json.dumps(model(shape).raw))
        return tmp_path / "model"

    return made


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.full), 4])
def test_a_run_resumes_with_its_scales_and_magnitudes(tmp_path, source, rank):
    folder, made = source("qwen2_untied"), settings(dict(tp=2, sequence_parallel=True), fp8_amax_history_len=16)
    made = made.model_copy(update=dict(lora=made.lora.model_copy(update=dict(rank=rank))))
    straight = run_ranks(_saved, 2, made, "qwen2_untied", tmp_path / "run", folder)
    resumed = run_ranks(_resumed, 2, made, "qwen2_untied", tmp_path / "run", folder)
    for (loss, amaxes), ((again,), magnitudes, scales) in zip(straight, resumed, strict=True):
        assert loss == again and torch.equal(amaxes, magnitudes) and (scales != 1).all()


@pytest.mark.full
def test_scales_load_into_another_layout_and_are_reset_with_another_history_or_recipe(tmp_path, source):
    folder, made = (
        source("qwen3_moe"),
        settings(dict(tp=2, ep=2, etp=1, sequence_parallel=True), fp8_amax_history_len=16),
    )
    run_ranks(_saved, 2, made, "qwen3_moe", tmp_path / "run", folder)
    kept = run_ranks(_resumed, 2, made, "qwen3_moe", tmp_path / "run", folder, 0)
    ((_, _, scales),) = run_ranks(
        _resumed, 1, settings(fp8_amax_history_len=16), "qwen3_moe", tmp_path / "run", folder, 0
    )
    two = [len(kept[0][2]), len(scales)]
    assert two[1] > two[0] and {*kept[0][2].flatten().tolist()} == {*scales.flatten().tolist()} != {1.0}
    ((_, _, scales),) = run_ranks(
        _resumed, 1, settings(fp8_amax_history_len=8), "qwen3_moe", tmp_path / "run", folder, 0
    )
    assert (scales == 1).all()
    ((losses, none, _),) = run_ranks(_resumed, 1, config({}, "none"), "qwen3_moe", tmp_path / "run", folder, 0)
    assert losses == [] and none is None
