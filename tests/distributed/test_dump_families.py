"""Dumped steps of families whose model code differs from a Llama's: transformers in float64 agrees with log-probs,
entropy, loss and gradient norm."""

import pytest
from dumped_steps import FUNCTIONS, dump_step, make_model
from ranks import run_ranks
from test_dump_layouts import audit
from test_gpt_oss import RAW as GPT_OSS
from test_latent_parity import V2_LITE, V3
from tiny_policy import MORE_SHAPES, RELEASED, SHAPES, tiny_run

from megagrpo.config import ParallelSection
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.proof.verify.shrink import shrink_model

TP2 = dict(tp=2, sequence_parallel=True)
FAMILIES = {
    "deepseek_v3": (V3, TP2 | dict(ep=2, etp=1)),
    "deepseek_v2": (V2_LITE, dict(pp=2)),
    "gpt_oss": (GPT_OSS, TP2 | dict(ep=2, etp=1)),
    # The longest sequences of the run exceed the length of pretraining; most are shorter.
    "phi3": (MORE_SHAPES["phi3"] | dict(original_max_position_embeddings=20), TP2),
    "glm4": (MORE_SHAPES["glm4"], dict(cp=2)),
}
FAMILIES |= {kind: (RELEASED[kind], TP2) for kind in ("qwen3_next", "qwen3_5_moe_text", "llama4_text", "ernie4_5_moe")}


EXPERTS = dict(rank=2, target_parameters=["experts.gate_up_proj", "experts.down_proj"])
DOWN = dict(rank=2, target_modules=["o_proj"], target_parameters=["experts.down_proj"])
ADAPTERS = {
    "qwen2": (SHAPES["qwen2_untied"], TP2, dict(rank=3)),
    "qwen3_moe": (SHAPES["qwen3_moe"], dict(ep=2), EXPERTS),
    "gpt_oss": (GPT_OSS, TP2 | dict(ep=2, etp=1), DOWN),
    "deepseek_v3": (V3, TP2 | dict(ep=2, etp=1), EXPERTS),
}


def dump(raw, parallel, root, lora=None):
    config = tiny_run(
        parallel,
        algorithm=dict(beta=0.5, entropy_coef=0.1, num_iterations=2),
        debug=dict(dump_steps=[1]),
        lora=lora or {},
        rewards=dict(functions=FUNCTIONS),
        model=dict(tokenizer="/nowhere"),
    )
    return dump_step(config, init_layout(config.parallel), root / "model", root)


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_of_this_family_agrees_with_float64(name, tmp_path, capfd):
    raw, parallel = FAMILIES[name]
    run_ranks(make_model, 1, tmp_path / "model", shrink_model(raw, ParallelSection(tp=2, pp=2, ep=2, etp=2)))
    run_ranks(dump, 2, raw, parallel, tmp_path)
    assert run_ranks(audit, 1, tmp_path, 1) == [0], capfd.readouterr().out


@pytest.mark.parametrize(
    "name", [name if name == "qwen3_moe" else pytest.param(name, marks=pytest.mark.full) for name in ADAPTERS]
)
def test_a_step_of_adapters_agrees_with_float64(name, tmp_path, capfd):
    raw, parallel, lora = ADAPTERS[name]
    run_ranks(make_model, 1, tmp_path / "model", shrink_model(raw, ParallelSection(tp=2, pp=2, ep=2, etp=2)))
    run_ranks(dump, 2, raw, parallel, tmp_path, lora)
    assert run_ranks(audit, 1, tmp_path, 1) == [0], capfd.readouterr().out
    config = tmp_path / "dumps/step_000001/weights_2/adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 1', '"lora_alpha": 2'))
    assert run_ranks(audit, 1, tmp_path, 1) == [1]
    assert "differs" in (told := capfd.readouterr().out) and "optimizer step 2" in told.splitlines()[-1], told
