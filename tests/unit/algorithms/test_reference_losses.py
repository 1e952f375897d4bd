"""Every loss equals the results of the reference systems' own code: value, gradient and metrics (tests/vectors)."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megagrpo.algorithms import preference_losses
from megagrpo.algorithms.entropy import threshold_of_top
from megagrpo.algorithms.losses import make_loss
from megagrpo.algorithms.reductions import denominator
from megagrpo.config import RunConfig
from megagrpo.config.sections.loss_table import LOSSES, ROW_LOSSES
from megagrpo.data.packing.sample_packing import UNLIMITED, pack
from megagrpo.train_types import LossInputs, TrainSample
from tests.unit.for_each import for_each

VECTORS = Path(__file__).parents[2] / "vectors"
TRL = json.loads((VECTORS / "trl_loss.json").read_text())
SWIFT = {engine: json.loads((VECTORS / f"swift_loss_{engine}.json").read_text()) for engine in ("hf", "megatron")}
SEED = json.loads((VECTORS / "seed_era.json").read_text())
GMPO = json.loads((VECTORS / "trl_misc.json").read_text())["gmpo"]
PROMPT = 2  # tokens before each response


def settings(rewards=True, **algorithm):
    base = {
        "model": {"path": "x"},
        "data": {"train": {"source": "x"}},
        "rewards": {"functions": [{"function": "exact_number"}] * rewards},
    }
    rollout = {name: algorithm.pop(name) for name in ("max_completion_length", "num_generations") if name in algorithm}
    if algorithm.get("loss_type") == "cispo" and algorithm.get("epsilon_high") is None:
        # the reference systems' default; ours must be configured
        algorithm["epsilon_high"] = algorithm.get("epsilon", 0.2)
    return RunConfig.model_validate(base | {"algorithm": algorithm, "rollout": rollout})


class Rows:
    """The vectors' padded [B, T] rows as one packed micro-batch, and back. Masked positions stay in it, because a mask
    may have holes. `pack` applies `mask_truncated_completions` to `truncated` [B] responses."""

    def __init__(self, inputs, mask, truncated=None):
        mask = torch.tensor(mask, dtype=torch.bool)
        truncated = truncated or [0] * len(mask)
        self.width = mask.shape[1]
        samples = []
        for advantage, row, cut in zip(inputs["advantages"], mask, truncated, strict=True):
            response = torch.cat([torch.zeros(PROMPT, dtype=torch.bool), row])
            length = PROMPT + self.width
            samples.append(
                TrainSample(
                    torch.arange(length),
                    response,
                    torch.zeros(length),
                    advantage,
                    index=len(samples),
                    truncated=bool(cut),
                )
            )
        self.step = pack(samples, replace(UNLIMITED, mask_truncated=True))
        (batch,) = self.step.micro_batches
        self.sequences = batch.samples  # rows that packing keeps
        self.num_rows = len(mask)
        advantages = torch.tensor(inputs["advantages"], dtype=torch.float64)[self.sequences]
        self.batch = replace(batch, advantages=advantages.repeat_interleave(PROMPT + self.width))

    def pack(self, rows):
        rows = torch.tensor(rows, dtype=torch.float64)[self.sequences]
        rows = rows.expand(-1, self.width) if rows.shape[1] == 1 else rows
        padded = torch.nn.functional.pad(rows, (PROMPT - 1, 1))
        return padded.flatten()

    def unpack(self, flat):
        """[B, T], 0 in rows that packing dropped."""
        kept = flat.view(-1, PROMPT + self.width)[:, PROMPT - 1 : -1]
        return kept.new_zeros(self.num_rows, self.width).index_copy(0, self.sequences, kept)

    def divisor(self, config):
        return denominator(self.step, config.algorithm.loss.average, config.rollout.max_completion_length)


def of_the_whole_step(batch, entropy, rows, config):
    """The result of `add_step_terms` for a step of one micro-batch."""
    algorithm, found = config.algorithm, {}
    counted = batch.loss_mask
    if algorithm.top_entropy_quantile < 1:
        counted = counted & (entropy >= threshold_of_top(entropy[counted], algorithm.top_entropy_quantile))
        found["high_entropy"] = counted
    if algorithm.entropy_coef:
        found["entropy_weights"] = counted * (algorithm.entropy_coef * rows.divisor(config) / counted.sum())
    return found


def check(case, inputs, mask, config, scale=1.0, batch_changes=lambda rows: {}, truncated=None):
    """`scale`: our denominator over the reference's, where the reference does not use the count of this batch."""
    rows = Rows(inputs, mask, truncated)
    terms = {"old_logprobs": rows.pack(inputs["old"])}
    if config.algorithm.beta:
        terms["ref_logprobs"] = rows.pack(inputs["ref"])
    policy, entropy = (rows.pack(inputs[name]).requires_grad_() for name in ("new", "entropy"))
    batch = replace(rows.batch, **batch_changes(rows)).with_terms(**terms)
    batch = batch.with_terms(**of_the_whole_step(batch, entropy.detach(), rows, config))
    output = make_loss(config.algorithm)(LossInputs(policy, entropy, batch))
    loss = output.numerator * scale / rows.divisor(config)
    assert loss.item() == pytest.approx(case["loss"], rel=1e-6, abs=1e-9)
    found = torch.autograd.grad(loss, (policy, entropy), materialize_grads=True)
    for grad, oracle in zip(found, (case.get("grad_logps", case.get("grad")), case.get("grad_entropy")), strict=True):
        grad = rows.unpack(grad)
        oracle = torch.zeros_like(grad) if oracle is None else torch.tensor(oracle, dtype=torch.float64)
        torch.testing.assert_close(grad, oracle, rtol=1e-6, atol=1e-8)
    return {name: metric.value.item() for name, metric in output.metrics.items() if metric.reduce == "mean"}


TRL_WORDS = (
    dict(loss_type=str, beta=float, epsilon=float, epsilon_high=float, delta=float, importance_sampling_level=str)
    | dict(use_bias_correction_kl=bool, sapo_temperature_neg=float, sapo_temperature_pos=float, vespo_k_pos=float)
    | dict(vespo_lambda_pos=float, vespo_k_neg=float, vespo_lambda_neg=float, off_policy_mask_threshold=float)
    | dict(top_entropy_quantile=float, entropy_coef=float, max_completion_length=int)
)
# The reference divides by a window's average token count here; ours divides by the step's own (docs/losses.md).
WINDOW = [c for c in TRL["cases"] if c["name"].endswith("ga2_spg4_items37")]


@for_each("case", TRL["cases"])
def test_trl(case):
    reference, inputs = case["config"], TRL["inputs"] | case.get("inputs_override", {})
    words = {name: reference[name] for name in TRL_WORDS if reference[name] is not None}
    mask = torch.tensor(inputs["mask"])
    if reference["tool_mask"] is not None:
        mask = mask * torch.tensor(reference["tool_mask"])
    weights = {}
    # TRL takes them as weights; the corresponding engine log-probs are exp(old) / weight
    if reference["is_ratio"] is not None:
        words |= {"importance_correction": "token_truncate", "importance_correction_max": 1e9}
        ratio = torch.tensor(reference["is_ratio"], dtype=torch.float64).clamp(min=1e-12)
        weights = {"rollout_logprobs": (torch.tensor(inputs["old"], dtype=torch.float64) - ratio.log()).tolist()}
    metrics = check(
        case,
        inputs,
        mask.tolist(),
        settings(**words),
        scale=_trl_scale(reference, mask),
        batch_changes=lambda rows: {name: rows.pack(values) for name, values in weights.items()},
    )
    names = tuple("entropy clip_ratio/low_mean clip_ratio/high_mean clip_ratio/region_mean cispo_clip_ratio kl".split())
    for name in names:
        if name in case["metrics"]:
            assert metrics[name] == pytest.approx(case["metrics"][name], rel=1e-5), name


def _trl_scale(reference, mask):
    """TRL's divisor is not a count of the whole step when it accumulates gradients: undo its division."""
    accumulated, loss_type = reference["gradient_accumulation_steps"], reference["loss_type"]
    if LOSSES[loss_type].average != "tokens" or loss_type == "bnpo":
        return 1 / accumulated if reference["training"] else 1.0
    if reference["num_items_in_batch"] is None:
        return 1.0
    window = reference["num_items_in_batch"] / reference["num_processes"]
    if reference["training"]:
        window *= accumulated / reference["steps_per_generation"]
    return float(mask.sum()) / window


SWIFT_WORDS = (
    dict(loss_type="loss_type", beta="beta", epsilon="epsilon", epsilon_high="epsilon_high", delta="delta")
    | dict(importance_sampling_level="importance_sampling_level", tau_pos="sapo_temperature_pos")
    | dict(tau_neg="sapo_temperature_neg", max_completion_length="max_completion_length")
    | dict(num_generations="num_generations", fipo_decay_rate="fipo_decay_rate")
    | dict(fipo_clip_range="fipo_clip_range", fipo_clip_high_only="fipo_clip_high_only")
)


ITS_CORRECTION = {
    "token_truncate": "token_truncate",
    "token_mask": "token_mask",
    "sequence_truncate": "geometric_truncate",
    "sequence_mask": "geometric_mask",
}
SWIFT_CLIPPING = {
    "clip_ratio/low_mean": "low_clip_mean",
    "clip_ratio/high_mean": "high_clip_mean",
    "clip_ratio/region_mean": "region_clip_mean",
    "cispo_clip_ratio": "cispo_clip_ratio",
}
# Cases that ours computes differently, with the reason; docs/losses.md documents them. Each of these cases must differ.
SWIFT_DIFFERS = {
    "grpo/rollout_is/token_truncate/C2": "its correction weighs the KL term too",
    "grpo/rollout_is/token_mask/C2": "its correction weighs the KL term too",
    "grpo/rollout_is/sequence_truncate/C2": "its correction weighs the KL term too",
    "grpo/rollout_is/sequence_mask/C2": "its correction weighs the KL term too, and tokens of a kept sequence by "
    "their own ratios",
}
# Token losses: ms-swift's divisor also counts the tokens of filtered responses; ours and TRL's count only the loss's
# tokens.
SWIFT_COUNTS_FILTERED = ("cispo/overlong_filter_rows1,4",)
SWIFT_CASES = [(engine, case) for engine, file in SWIFT.items() for case in file["cases"]]


@for_each(("engine", "case"), SWIFT_CASES)
def test_ms_swift(engine, case):
    if case["name"] not in (*SWIFT_DIFFERS, *SWIFT_COUNTS_FILTERED):
        _check_swift(engine, case)
        return
    with pytest.raises(AssertionError):
        _check_swift(engine, case)
    assert case["config"]["beta"] > 0 or case["name"] in SWIFT_COUNTS_FILTERED


@pytest.mark.parametrize("name", SWIFT_COUNTS_FILTERED)
@pytest.mark.parametrize("engine", SWIFT)
def test_ms_swift_divides_token_losses_by_all_tokens_and_ours_by_those_that_its_overlong_filter_keeps(engine, name):
    """ms-swift's loss and gradient equal ours times (tokens after the filter) / (tokens before it)."""
    inputs, (case,) = SWIFT[engine]["inputs"], [c for c in SWIFT[engine]["cases"] if c["name"] == name]
    tokens = [sum(row) for row in inputs["mask"]]
    kept = sum(n for n, cut in zip(tokens, inputs["truncated_mask"], strict=True) if not cut)
    assert (kept, sum(tokens)) == (22, 31)
    _check_swift(engine, case, scale=kept / sum(tokens))


def _check_swift(engine, case, scale=None):
    reference, inputs = case["config"], SWIFT[engine]["inputs"]
    words = {ours: reference[theirs] for theirs, ours in SWIFT_WORDS.items() if reference[theirs] is not None}
    words["fipo_safety_threshold"] = reference["fipo_safety_threshold"]
    changes = {}
    if mode := reference["rollout_importance_sampling_mode"]:
        words |= {
            "importance_correction": ITS_CORRECTION[mode],
            "importance_correction_max": reference["rollout_importance_sampling_threshold"],
        }
        changes["rollout_logprobs"] = inputs["sampling"]
    metrics = check(
        case,
        inputs,
        inputs["mask"],
        settings(**words),
        scale=scale or _swift_scale(engine, reference, torch.tensor(inputs["mask"])),
        batch_changes=lambda rows: {name: rows.pack(values) for name, values in changes.items()},
        truncated=inputs["truncated_mask"] if reference["overlong_filter"] else None,
    )
    theirs = dict(case.get("metrics", {}))
    clipping = theirs.pop("clipping", {})
    theirs |= {name: clipping[its] for name, its in SWIFT_CLIPPING.items() if its in clipping}
    if "kl" in theirs:
        assert metrics["kl"] == pytest.approx(theirs["kl"], rel=1e-5)
    for name in SWIFT_CLIPPING.keys() & theirs.keys():
        # One ratio per sequence: ours and TRL's are shares of sequences; ms-swift weighs each sequence by its tokens.
        agrees = metrics[name] == pytest.approx(theirs[name], rel=1e-5)
        assert agrees == (reference["importance_sampling_level"] != "sequence"), name


def _swift_scale(engine, reference, mask):
    """Megatron's schedule and the Trainer divide by the micro-batches afterwards, so ms-swift multiplies token losses
    by their number first."""
    if reference["loss_type"] not in ("dapo", "cispo", "fipo", *(["bnpo"] if engine == "megatron" else [])):
        return 1.0
    accumulated = reference["num_microbatches"] if engine == "megatron" else reference["gradient_accumulation_steps"]
    if reference["num_items_in_batch"] is None:  # all tokens are in this batch
        return float(accumulated * reference["world"])
    return float(mask.sum()) / reference["num_items_in_batch"] * accumulated * reference["world"]


@pytest.mark.parametrize("case", GMPO, ids=lambda c: f"beta {c['beta']}")
def test_gmpo(case):
    words = {"loss_type": "gmpo", "beta": case["beta"], "epsilon": case["epsilon"]}
    check(case, TRL["inputs"], TRL["inputs"]["mask"], settings(**words))


def test_the_loss_of_trls_first_release():
    """The reference's gradient includes a policy's ratio to itself, which has a gradient; its value is only the KL
    term."""
    check(
        SEED["trl_e95f9fb"] | {"beta": 0.04},
        SEED["inputs"] | {"old": SEED["inputs"]["new"], "entropy": SEED["inputs"]["old"]},
        SEED["inputs"]["mask"],
        settings(loss_type="grpo", beta=0.04),
    )


# Ours divides once by the step's tokens; the reference divides each mini-batch by its own, and does not divide the sum
# by their number.
SEED_DIFFERS = ["mini_batch_2"]


@pytest.mark.parametrize("case", SEED["swift_526f8a409"]["cases"], ids=lambda c: c["name"])
def test_the_loss_of_ms_swift_in_april_2025(case):
    inputs, mask = SEED["inputs"] | {"entropy": SEED["inputs"]["old"]}, torch.tensor(SEED["inputs"]["mask"])
    if case["overlong_filter"]:
        mask = mask * (1 - torch.tensor(case["truncated"], dtype=torch.long)[:, None])
    config = settings(loss_type="dapo", beta=case["beta"], epsilon_high=case["epsilon_high"])
    if case["name"] in SEED_DIFFERS:
        with pytest.raises(AssertionError):
            check(case, inputs, mask.tolist(), config)
    else:
        check(case, inputs, mask.tolist(), config)


METHODS = json.loads((VECTORS / "trl_methods.json").read_text())
DPO = {case["name"]: case for case in METHODS if case["kind"] == "dpo"}


@for_each("name", DPO)
def test_the_losses_on_pairs_equal_trl(name):
    """TRL has the chosen responses first, then the rejected ones."""
    config, inputs, expected = (DPO[name][part] for part in ("config", "inputs", "expected"))
    (loss_type,), row = config["losses"], ROW_LOSSES[config["losses"][0]]
    given = {"label_smoothing": config["label_smoothing"], "tau": config["discopop_tau"]}
    arguments = {key: value for key, value in given.items() if key in row.arguments}
    algorithm = settings(loss_type=loss_type, beta=config["beta"], loss_args=arguments, rewards=False).algorithm
    mask = torch.tensor(inputs["completion_mask"], dtype=torch.bool)
    policy, reference = (torch.tensor(inputs[key], dtype=torch.float64) for key in ("logps", "ref_logps"))
    policy.requires_grad_()
    count, width = mask.shape
    order = torch.arange(count).view(2, -1).t().flatten()  # chosen, rejected, chosen, ...
    samples = [
        TrainSample(torch.arange(width), own, torch.zeros(width), 1.0, index) for index, own in enumerate(mask[order])
    ]
    (m,) = pack(samples, replace(UNLIMITED, group=2)).micro_batches
    rows = {key: torch.zeros(count, width, dtype=torch.float64) for key in ("policy", "reference")}
    rows["policy"] = torch.nn.functional.pad(policy[order], (0, 1))[m.samples[m.samples >= 0]].flatten()
    rows["reference"] = torch.nn.functional.pad(reference[order], (0, 1))[m.samples[m.samples >= 0]].flatten()
    m = m.with_terms(ref_logprobs=rows["reference"])
    if row.whole_step:
        sums = torch.stack([(one[order] * mask[order, 1:]).sum(1) for one in (policy.detach(), reference)])
        m = m.with_advantages(preference_losses.of_step(algorithm, sums, torch.zeros(count)))
    output = preference_losses.make_loss(algorithm)(LossInputs(rows["policy"], rows["policy"].detach(), m))
    loss = output.numerator / count
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-6)
    (gradient,) = torch.autograd.grad(loss, policy)
    torch.testing.assert_close(
        gradient, torch.tensor(expected["grad_logps"], dtype=torch.float64), rtol=1e-5, atol=1e-9
    )
    for ours, theirs in (
        ("chosen", "chosen"),
        ("rejected", "rejected"),
        ("accuracy", "accuracies"),
        ("margin", "margins"),
    ):
        assert output.metrics[f"rewards/{ours}"].value.item() == pytest.approx(expected[f"rewards/{theirs}"], rel=1e-5)


def test_a_value_has_the_rank_of_another():
    found = preference_losses._of_rank(torch.tensor([30.0, 10.0, 20.0]), torch.tensor([0.5, 0.9, 0.1]))
    assert found.tolist() == [20.0, 30.0, 10.0]


@for_each("case", [case["name"] for case in METHODS if case["kind"] == "kto"])
def test_the_loss_of_kto_equals_trl(case):
    """A response and one to another prompt are a pair here; TRL has two batches."""
    case = next(one for one in METHODS if one["name"] == case)
    config, inputs, expected = case["config"], case["inputs"], case["expected"]
    arguments = {key: config[key] for key in ("desirable_weight", "undesirable_weight")}
    algorithm = settings(loss_type="kto", beta=config["beta"], loss_args=arguments, rewards=False).algorithm
    own, kl = (torch.tensor(inputs[f"{key}logps"], dtype=torch.float64) for key in ("", "kl_"))
    own.requires_grad_()
    masks = [torch.tensor(inputs[f"{key}completion_mask"])[:, 1:] for key in ("", "kl_")]
    sums = [(rows * mask).sum(1) for rows, mask in zip((own, kl), masks, strict=True)]
    given = [torch.tensor(inputs[f"ref_{key}logps"], dtype=torch.float64) for key in ("", "kl_")]
    reference = torch.stack([(rows * mask).sum(1) for rows, mask in zip(given, masks, strict=True)], 1)
    policy, labels = torch.stack(sums, 1), torch.tensor(inputs["label"], dtype=torch.float64) * 2 - 1
    both = torch.stack([policy.detach().flatten(), reference.flatten()])
    values = preference_losses.of_step(algorithm, both, torch.stack([labels, torch.zeros_like(labels)], 1).flatten())
    ones = torch.ones_like(policy)
    pairs = preference_losses.Pairs(policy, reference, ones, config["beta"], arguments, values.view(-1, 2))
    loss = preference_losses.kto(pairs).mean()
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-6)
    assert pairs.values[0, 1].item() == pytest.approx(expected["kl"], rel=1e-6)
    (gradient,) = torch.autograd.grad(loss, own)
    wanted = torch.tensor(expected["grad_logps"], dtype=torch.float64)
    torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-9)


@for_each("case", [case["name"] for case in METHODS if case["kind"] in ("cpo", "orpo")])
def test_the_losses_without_a_reference_equal_trl(case):
    """Of responses of one token, whose log-probs are the sums. TRL's ORPO adds -log p of the chosen response later."""
    case = next(one for one in METHODS if one["name"] == case)
    config, inputs, expected = case["config"], case["inputs"], case["expected"]
    kind = config.get("loss_type", "orpo")
    rows = torch.tensor([inputs["chosen_logps"], inputs["rejected_logps"]], dtype=torch.float64).t().requires_grad_()
    given = {"gamma": config.get("simpo_gamma"), "label_smoothing": config.get("label_smoothing", 0)}
    pairs = preference_losses.Pairs(rows, torch.zeros_like(rows), torch.ones_like(rows), config["beta"], given, rows)
    losses = getattr(preference_losses, kind)(pairs)
    theirs = torch.tensor(expected["losses"], dtype=torch.float64)
    wanted = theirs if kind != "orpo" else -rows[:, 0] - theirs
    torch.testing.assert_close(losses, wanted, rtol=1e-6, atol=1e-7)


@for_each("case", [case["name"] for case in METHODS if case["kind"] == "reward"])
def test_the_loss_of_reward_models_equals_trl(case):
    case = next(one for one in METHODS if one["name"] == case)
    center, inputs = case["config"]["center_rewards_coefficient"], case["inputs"]
    algorithm = settings(loss_type="bradley_terry", loss_args={"center": center or 0.0}, rewards=False).algorithm
    both = torch.tensor([inputs["rewards_chosen"], inputs["rewards_rejected"]], dtype=torch.float64).requires_grad_()
    mask = torch.tensor([False, True])
    samples = [TrainSample(torch.arange(2), mask, torch.zeros(2), 0.0, index) for index in range(both.numel())]
    (m,) = pack(samples, replace(UNLIMITED, group=2)).micro_batches
    rows = torch.zeros(m.num_tokens, dtype=torch.float64)
    scores = rows.masked_scatter(m.loss_mask, both.t()[:, :].flatten()[m.samples[m.samples >= 0]])
    output = preference_losses.make_score_loss(algorithm)(LossInputs(scores, rows, m))
    loss = output.numerator / both.numel()
    assert loss.item() == pytest.approx(case["expected"]["loss"], rel=1e-7)
    (gradient,) = torch.autograd.grad(loss, both)
    assert gradient.flatten().tolist() == pytest.approx(case["expected"]["grad"], rel=1e-6)
