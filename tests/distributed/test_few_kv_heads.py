"""More tensor-parallel ranks than KV heads: a step, adapters, loading and exporting equal those of one process."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import cheaper, covering_rows
from layouts import AXES, RULES, config_of, name, ranks
from ranks import run_ranks
from suites import usual
from test_convert import assert_same_files
from tiny_families import EVERY
from tiny_families import tiny_model as tiny_transformers_model
from tiny_policy import MORE_SHAPES, SHAPES, release_of, tiny_run

from megagrpo.config import ParallelSection
from megagrpo.families.hf_config import HfConfig, model_problems
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.proof.verify.shrink import plainly, random_samples, shrink_model
from megagrpo.proof.verify.verified_step import Outcome, take_step
from megagrpo.proof.verify.verify_compare import compare, silent_tensors
from megagrpo.weights.bridge.conversion import export_hf, import_hf

LARGEST = ParallelSection(tp=4, cp=2, pp=2, vpp=2, ep=2, etp=4)
MODELS: dict[str, dict[str, Any]] = {  # biases, head norms, experts, fused projections, norms of outputs
    "qwen2_untied": SHAPES["qwen2_untied"] | dict(num_attention_heads=16, num_key_value_heads=2),
    "qwen3_tied": SHAPES["qwen3_tied"] | dict(num_attention_heads=4, num_key_value_heads=1),
    "qwen3_moe": SHAPES["qwen3_moe"] | dict(num_attention_heads=8, num_key_value_heads=2),
    "phi3": MORE_SHAPES["phi3"] | dict(hidden_size=1024, num_attention_heads=8, num_key_value_heads=1),
    "glm4": MORE_SHAPES["glm4"] | dict(num_attention_heads=8, num_key_value_heads=2),
    "gemma3": MORE_SHAPES["gemma3"] | dict(num_attention_heads=4, num_key_value_heads=1),
    "qwen3_5_text": release_of("qwen3_5_text") | dict(num_attention_heads=8, num_key_value_heads=2),
}
ONE = {axis: values[:1] for axis, values in AXES.items()}
FEW = {axis: AXES[axis] for axis in ("cp", "distributed_optimizer", "sequence_parallel", "recompute", "share_prompts")}
FEW = ONE | FEW | dict(model=list(MODELS), tp=[4], pp=[1, 2])
SAMPLES = [*random_samples()[:3], *random_samples()[6:9]]


def tiny_model(model: str) -> HfConfig:
    found = shrink_model(MODELS[model], LARGEST)
    assert found.num_kv_heads == MODELS[model]["num_key_value_heads"] < 4
    return found


# Two ranks per KV head, and two KV heads. `test_options_by_layouts.py` has a model with one KV head on two ranks.
USUAL = {axis: values[0] for axis, values in FEW.items()} | dict(sequence_parallel=True, distributed_optimizer=True)


def pytest_generate_tests(metafunc):
    if "row" in metafunc.fixturenames:
        left_out = "not full" in metafunc.config.option.markexpr
        rows = [] if left_out else cheaper(covering_rows(FEW, RULES), FEW, RULES, ranks)
        metafunc.parametrize(
            "row",
            [pytest.param(row, marks=pytest.mark.full) for row in (USUAL, *rows) if row is USUAL or row != USUAL],
            ids=name,
        )


@functools.cache
def one_process(model: str, loss: str) -> Outcome:
    config = plainly(config_of({axis: values[0] for axis, values in AXES.items()} | dict(model=model, loss=loss)))
    (outcome,) = run_ranks(take_step, 1, config, tiny_model(model), SAMPLES)
    assert silent_tensors(outcome) == []
    return outcome


def test_a_step_equals_that_of_one_process(row):
    found = run_ranks(take_step, ranks(row), config_of(row), tiny_model(row["model"]), SAMPLES)[0]
    assert [d for d in compare(found, one_process(row["model"], row["loss"])) if not d.passed] == []
    assert found.disagreement == 0


@pytest.mark.parametrize("sequence_parallel", usual([False, True]))
@pytest.mark.parametrize(
    ("model", "lora"),
    usual(
        [
            ("qwen2_untied", dict(rank=3)),
            ("qwen3_tied", dict(rank=2, target_modules=["k_proj", "up_proj"])),
        ],
        0,
    ),
)
def test_a_step_of_adapters_equals_that_of_one_process(model, lora, sequence_parallel):
    def config(parallel):
        return tiny_run(parallel, lora=lora, train=dict(share_prompts=False))

    (expected,) = run_ranks(take_step, 1, plainly(config({})), tiny_model(model), SAMPLES)
    assert silent_tensors(expected) == []
    layout = config(dict(tp=4, sequence_parallel=sequence_parallel))
    found = run_ranks(take_step, 4, layout, tiny_model(model), SAMPLES)[0]
    assert [d for d in compare(found, expected) if not d.passed] == []
    assert found.disagreement == 0


def make_models(root: Path) -> None:
    for kind, extra in TRANSFORMERS.items():
        tiny = tiny_transformers_model(kind, extra | dict(num_attention_heads=4, hidden_size=64))
        tiny.to(torch.bfloat16).save_pretrained(root / kind)


TRANSFORMERS: dict[str, dict[str, Any]] = {
    "Qwen2": dict(num_key_value_heads=2),
    "Qwen3": dict(num_key_value_heads=1, head_dim=24),
    "Phi3": dict(num_key_value_heads=1, pad_token_id=0, tie_word_embeddings=False),
    "Qwen3_5": EVERY["qwen3_5"][1] | dict(num_key_value_heads=1, linear_num_key_heads=4),
}


def through(root: Path, kind: str) -> None:
    """Convert with four ranks per KV head or per two of them, and back with other numbers."""
    for number, (one, other) in enumerate(((dict(tp=4), dict(tp=2, pp=2)), (dict(tp=2, pp=2), dict(tp=4)))):
        layout = init_layout(ParallelSection(**one))
        import_hf(str(root / kind), root / f"{kind}{number}", layout)
        layout.release()
        layout = init_layout(ParallelSection(**other))
        export_hf(root / f"{kind}{number}", root / f"{kind}{number}_hf", None, layout)
        layout.release()


@pytest.mark.parametrize("kind", usual(TRANSFORMERS, 0))
def test_a_model_comes_back_byte_for_byte(kind, tmp_path):
    run_ranks(make_models, 1, tmp_path)
    run_ranks(through, 4, tmp_path, kind)
    for number in range(2):
        assert_same_files(tmp_path / kind, tmp_path / f"{kind}{number}_hf")


def test_a_size_that_neither_divides_the_kv_heads_nor_is_a_multiple_is_refused():
    """With one KV head, 8 ranks would cut its group's rows unevenly."""
    model = tiny_model("qwen3_tied")
    model = replace(model, num_heads=12, num_kv_heads=3, head_dim=2, intermediate_size=96)
    for tp, fits in ((2, False), (3, True), (6, True), (12, True), (4, False)):
        problems = model_problems(model, ParallelSection(tp=tp))
        assert ([str(problem) for problem in problems] == []) == fits, (tp, problems)
    said = str(model_problems(model, ParallelSection(tp=4))[0])
    assert "num_key_value_heads=3 is not divisible by tp=4; valid tp: 1, 3, 6, 12" in said
    small = replace(model, num_heads=8, num_kv_heads=1, head_dim=2)
    assert "num_key_value_heads=1 is not divisible by tp=8; valid tp: 1, 2, 4" in str(
        model_problems(small, ParallelSection(tp=8))[0]
    )
