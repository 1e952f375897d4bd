"""The parts of `megagrpo verify`: the small copy of a run, layouts as text, distances and tolerances, the report."""

import json
import math
from dataclasses import replace

import pytest
import torch
from tiny_policy import MORE_SHAPES, SHAPES, tiny_run

from megagrpo.config import ConfigError, ParallelSection
from megagrpo.families.hf_config import model_problems, parse_hf_config
from megagrpo.proof.verify.layouts import layout_text, parse_layout
from megagrpo.proof.verify.shrink import VOCABULARY, plainly, random_samples, random_tensor, shrink_config, shrink_model
from megagrpo.proof.verify.verified_step import Outcome, relative_error
from megagrpo.proof.verify.verify_compare import (
    Distance,
    Verdict,
    as_row,
    as_text,
    compare,
    silent_tensors,
    summary,
    worst,
)
from tests.unit.for_each import for_each

# ------------------------------------------------------------------------------------------------------- the small copy

LAYOUTS = [
    dict(),
    dict(tp=2, pp=2, sequence_parallel=True),
    dict(tp=3, pp=2, vpp=2),
    dict(pp=4, pipeline_layers=[5, 7, 7, 5]),
    dict(tp=4, cp=2, sequence_parallel=True),
]


@for_each("shape", [*SHAPES, *MORE_SHAPES])
@for_each("sizes", LAYOUTS)
def test_a_small_model_is_of_the_same_kind_and_fits_the_layout(shape, sizes):
    raw = (SHAPES | MORE_SHAPES)[shape]
    real, parallel = parse_hf_config(raw), shrink_config(tiny_run(sizes)).parallel
    small = shrink_model(raw, ParallelSection(**sizes))
    assert model_problems(small, parallel) == []
    for kept in "family tied_embeddings qkv_bias qk_norm rope_type norm_eps dtype partial_rotary_factor".split():
        assert getattr(small, kept) == getattr(real, kept)
    assert small.num_heads * real.num_kv_heads == real.num_heads * small.num_kv_heads
    assert (small.hidden_size == small.num_heads * small.head_dim) == (
        real.hidden_size == real.num_heads * real.head_dim
    )
    assert parallel.tp == 1 or small.vocab_size % parallel.tp
    assert small.num_layers <= 8 and small.hidden_size <= 512
    assert (small.num_kv_heads > parallel.tp) == (real.num_kv_heads > parallel.tp)


def test_experts_are_fewer_but_several_a_token_and_a_dense_layer_stays():
    small = shrink_model(SHAPES["qwen3_moe"], ParallelSection(tp=2, sequence_parallel=True, ep=4, etp=1))
    assert small.experts.count == 8 and small.experts.per_token == 2 and small.experts.blocks == {0}
    assert shrink_model(SHAPES["mixtral"], ParallelSection(ep=2)).experts.blocks == {0, 1}


def test_uneven_stages_stay_uneven():
    parallel = ParallelSection(pp=4, pipeline_layers=[5, 7, 7, 6])
    assert shrink_config(tiny_run(parallel.model_dump())).parallel.pipeline_layers == [1, 3, 3, 2]
    assert shrink_model(SHAPES["qwen2_untied"], parallel).num_layers == 9


def test_what_decides_how_a_step_is_computed_stays():
    config = tiny_run(
        dict(tp=2, sequence_parallel=True),
        model=dict(precision="bf16", recompute="full"),
        algorithm=dict(loss_type="dr_grpo", beta=0.3, epsilon_high=0.28, kl_estimator="k2"),
        rollout=dict(temperature=0.6),
        train=dict(distributed_optimizer=True, share_prompts=True, max_grad_norm=0.5, weight_decay=0.1)
        | dict(learning_rate=1e-7, warmup_steps=9)
        | dict(fused_logprobs=True, logprobs_fp8_recipe="tensorwise"),
    )
    assert config.parallel.tp == 2 and config.parallel.sequence_parallel and config.model.recompute == "full"
    assert config.algorithm.beta == 0.3 and config.algorithm.kl_estimator == "k2" and config.rollout.temperature == 0.6
    assert config.train.share_prompts and config.train.max_grad_norm == 0.5 and config.train.weight_decay == 0.1
    assert config.train.learning_rate == 1e-2 and config.train.warmup_steps == 0  # large enough for float32
    plain = plainly(config)
    assert (
        plain.parallel.model_parallel_size == 1 and plain.model.recompute == "none" and plain.model.precision == "bf16"
    )
    assert config.train.fused_logprobs and not plain.train.fused_logprobs and plain.train.logprobs_fp8_recipe == "none"
    assert (
        not plain.train.share_prompts and not plain.train.distributed_optimizer and plain.algorithm == config.algorithm
    )


def test_samples_are_of_many_lengths_and_their_tokens_can_be_told_apart():
    samples, config = random_samples(), tiny_run()
    lengths = [s.token_ids.numel() for s in samples]
    assert len(set(lengths)) > 6 and max(lengths) == config.max_model_len
    assert any(s.advantage == 0 for s in samples) and any(s.advantage < 0 for s in samples)
    assert all(int(s.response_mask.sum()) >= 1 and s.token_ids.max() < VOCABULARY for s in samples)
    tags = torch.cat([s.rollout_logprobs[s.response_mask] for s in samples])
    assert tags.unique().numel() == tags.numel()


def test_a_weight_is_a_function_of_its_name_and_shape():
    a = random_tensor("model.layers.0.self_attn.q_proj.weight", (8, 4))
    assert torch.equal(a, random_tensor("model.layers.0.self_attn.q_proj.weight", (8, 4)))
    assert not torch.equal(a, random_tensor("model.layers.1.self_attn.q_proj.weight", (8, 4)))
    assert (
        abs(random_tensor("model.norm.weight", (400,)).mean() - 1)
        < 0.05
        > abs(random_tensor("q_proj.bias", (400,)).mean())
    )


# ------------------------------------------------------------------------------------------------------ layouts as text


@pytest.mark.parametrize(
    ("text", "section", "dp"),
    [
        ("tp=2,pp=2,dp=3", "{tp: 2, pp: 2}", 3),
        ("tp=2, sequence_parallel", "{tp: 2, sequence_parallel: true}", None),
        ("pp=2,pipeline_layers=[2,3]", "{pp: 2, pipeline_layers: [2,3]}", None),
        ("dp=2", "{}", 2),
    ],
)
def test_a_layout_reads_as_a_section_of_the_config(text, section, dp):
    assert parse_layout(text) == (section, dp)


@pytest.mark.parametrize("text", ["", "tp=2,,pp=2", "dp=0", "dp=two"])
def test_what_is_no_layout_is_refused(text):
    with pytest.raises(ConfigError, match="--layout"):
        parse_layout(text)


@pytest.mark.parametrize("text", ["tp=2,pp=2,dp=3", "pp=2,pipeline_layers=[2,3]", "tp=2,sequence_parallel", "dp=1"])
def test_layouts_are_shown_as_they_are_given(text):
    sizes = dict(tp=2) if "tp" in text else {}
    sizes |= dict(pp=2) if "pp" in text else {}
    sizes |= dict(pipeline_layers=[2, 3]) if "[" in text else dict(sequence_parallel=True) if "sequence" in text else {}
    assert layout_text(ParallelSection(**sizes, timeout_minutes=3), 3 if "dp=3" in text else 1) == text


# ------------------------------------------------------------------------------------------------ distances, the report


def outcome(**changes) -> Outcome:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(5, 3, generator=generator, dtype=torch.float64) for name in ("a.weight", "b.weight")}
    made = Outcome(
        {"loss": -0.3, "grad_norm": 2.0, "kl": 0.1}, torch.linspace(-6, -2, 7).double(), tensors, tensors, 0.0, 0.0
    )
    return replace(made, **changes)


def moved(tensors: dict, by: float) -> dict:
    return tensors | {"b.weight": tensors["b.weight"] * (1 + by)}


def kinds(found: Outcome, *rest) -> set[str]:
    return {d.kind for d in compare(found, outcome(), *rest) if not d.passed}


def test_each_quantity_has_its_tolerance():
    same = outcome()
    assert kinds(same) == set()
    assert kinds(replace(same, metrics=same.metrics | {"loss": -0.300002})) == {"loss"}
    assert kinds(replace(same, metrics=same.metrics | {"kl": 0.100002})) == {"metric"}
    assert kinds(replace(same, metrics=same.metrics | {"grad_norm": 2.0001})) == {"gradient norm"}
    assert kinds(replace(same, logprobs=same.logprobs + 2e-5)) == {"log-prob"}
    assert kinds(replace(same, gradients=moved(same.gradients, 2e-5))) == {"gradient"}
    assert kinds(replace(same, gradients=moved(same.gradients, 5e-6))) == set()
    assert kinds(replace(same, weights=moved(same.weights, 2e-5))) == {"next weight"}
    assert kinds(replace(same, disagreement=1e-3)) == {"replica"}
    assert kinds(replace(same, padding=1e-30)) == {"padding"}


def test_nan_is_never_near_enough_and_the_worst_of_all():
    same = outcome()
    found = compare(replace(same, gradients=moved(same.gradients, math.nan)), same)
    (wrong,) = [d for d in found if not d.passed]
    assert wrong.name == "b.weight" and wrong.excess == math.inf
    assert {d.kind: d for d in worst(found)}["gradient"] == wrong


def test_rounding_of_one_process_widens_what_is_allowed():
    same = outcome()
    rounded = replace(same, gradients=moved(same.gradients, 0.03), metrics=same.metrics | {"kl": 0.101})
    found = replace(same, gradients=moved(same.gradients, -0.05))
    assert kinds(found, rounded, True) == set()
    assert kinds(replace(same, gradients=moved(same.gradients, -0.12)), rounded, True) == {"gradient"}
    assert kinds(
        replace(same, gradients={**same.gradients, "a.weight": same.gradients["a.weight"] * 1.05}), rounded, True
    ) == {"gradient"}
    assert kinds(replace(same, padding=1e-30), rounded, True) == {"padding"}


def test_outcomes_of_different_quantities_cannot_be_compared():
    same = outcome()
    with pytest.raises(ValueError, match=r"gradients that only this layout or only one process has: b\.weight"):
        compare(replace(same, gradients={"a.weight": same.gradients["a.weight"]}), same)
    with pytest.raises(ValueError, match="this layout has 6 loss tokens, but one process has 7"):
        compare(replace(same, logprobs=same.logprobs[1:]), same)


def test_relative_errors_of_nothing():
    zero, one = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    assert relative_error(zero, zero) == 0 and relative_error(one, zero) > 1e100 and relative_error(one, 2 * one) == 0.5
    assert silent_tensors(outcome(gradients={"a.weight": zero, "b.weight": one})) == ["a.weight"]


def test_the_gradient_of_one_number_is_compared_with_that_of_all_layers():
    tensors = {
        f"layers.{i}.alpha": torch.tensor([size], dtype=torch.float64) for i, size in enumerate((1.0, 0.0, 1e-9))
    }
    expected, rounded = outcome(gradients=tensors), {name: value + 1e-9 for name, value in tensors.items()}
    wrong = tensors | {"layers.1.alpha": torch.tensor([1e-4], dtype=torch.float64)}
    assert all(d.passed for d in compare(replace(expected, gradients=rounded), expected))
    failed = [d.name for d in compare(replace(expected, gradients=wrong), expected) if not d.passed]
    assert failed == ["layers.1.alpha"]


def verdict(found: Outcome, expected: Outcome | None = None) -> Verdict:
    expected = expected or outcome()
    return Verdict("tp=2", 2, found, expected, compare(found, expected), 1.5)


@pytest.mark.parametrize("full", [False, True])
def test_verdicts_on_long_names_fit_100_columns(full):
    name = "model.layers.93.mlp.experts.127.gate_up_projection.with_a_long_name.weight"
    gradients = {name: torch.ones(5, 3).double(), f"{name}_again": torch.zeros(5, 3).double()}
    same = outcome(gradients=gradients)
    long = replace(
        verdict(replace(same, gradients=gradients | {name: 2 * gradients[name]}), same),
        layout="tp=2,pp=2,vpp=2,cp=2,ep=4,expert_tp=2," * 4,
    )
    text = as_text(long, full=full) + summary([long] * 9)
    assert max(map(len, text.split("\n"))) <= 100
    assert name in text and "exceeds" in text and "has no gradient" in text


def test_a_verdict_names_what_is_wrong():
    same = outcome()
    good, bad = verdict(same), verdict(replace(same, gradients=moved(same.gradients, 0.5)))
    silent = outcome(gradients={"a.weight": torch.zeros(5, 3).double(), "b.weight": torch.ones(5, 3).double()})
    unproved, dead = verdict(silent, silent), Verdict("tp=2", 2, failure="rank 1: killed by SIGKILL")
    assert good.passed and not any(v.passed for v in (bad, unproved, dead))
    assert "  pass, 1.5 s" in as_text(good) and "gradient b.weight: difference 5.0e-01 exceeds 1.0e-05" in as_text(bad)
    assert "a.weight has no gradient on one process" in as_text(unproved) and "killed by SIGKILL" in as_text(dead)
    assert len(as_text(good, full=True).split("\n")) > len(as_text(good).split("\n"))
    assert (
        "this layout matches" in summary([good])
        and "2 of 2" in summary([good, good])
        and "FAIL: tp=2" in summary([good, bad])
    )


def test_json_holds_every_distance_and_no_nan():
    same = outcome()
    bad = verdict(replace(same, gradients=moved(same.gradients, math.nan)))
    rows = list(map(as_row, (bad, Verdict("pp=2", 2, failure="gone"))))
    read = json.loads(json.dumps(rows), parse_constant=pytest.fail)
    assert [(row["passed"], row["failure"]) for row in read] == [(False, None), (False, "gone")]
    (gradient,) = [d for d in read[0]["distances"] if d["kind"] == "gradient" and d["name"] == "b.weight"]
    assert gradient["error"] is None and gradient["passed"] is False
    assert Distance("loss", "loss", 0.0, 1e-6).passed
