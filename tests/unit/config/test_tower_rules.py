"""Each rule of `model.freeze_vision_tower: false` names the key and the reason."""

import pytest

from megagrpo.config import ConfigError, ParallelSection, load_config
from megagrpo.families.hf_config import model_problems, parse_hf_config, trained_tower_problems
from megagrpo.policy.images.trained_tower import train_tower

TRAINED = ["model.freeze_vision_tower=false", "data.images=true"]
REFUSED = [  # overrides, and the beginning of the reason
    (["data.images=false"], "a run of text has no tower"),
    (["lora.rank=4"], "adapters are in the language model only"),
    (["train.optimizer=muon", "train.distributed_optimizer=false"], "Muon would orthogonalize fused queries"),
    (["train.overlap=[param_gather]"], "ranks without images would gather its weights in another order"),
    (["rollout.quantization=fp8_per_channel"], "vLLM would quantize the tower's linears"),
]


@pytest.mark.parametrize(("overrides", "reason"), REFUSED)
def test_a_rule_names_the_key_and_the_reason(overrides, reason):
    with pytest.raises(ConfigError) as error:
        load_config("megagrpo:quickstart", [*TRAINED, *overrides])
    said = f"model.freeze_vision_tower: false: {reason}"
    assert any(line.strip().startswith(said) for line in str(error.value).splitlines()), str(error.value)


def test_a_trained_tower_alone_is_allowed():
    assert not load_config("megagrpo:quickstart", TRAINED).model.freeze_vision_tower


def test_the_first_stage_must_have_all_blocks_with_features_of_a_trained_tower():
    text = dict(model_type="qwen3_vl_text", hidden_size=64, intermediate_size=96, num_hidden_layers=4, vocab_size=128)
    text |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6, tie_word_embeddings=True)
    text |= dict(max_position_embeddings=512, hidden_act="silu", attention_bias=False)
    text |= dict(
        rope_parameters=dict(rope_type="default", rope_theta=1e6, mrope_section=[4, 2, 2], mrope_interleaved=True)
    )
    tower = dict(depth=3, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=64, patch_size=16)
    tower |= dict(num_position_embeddings=16, deepstack_visual_indexes=[0, 1, 2])
    raw = dict(model_type="qwen3_vl", architectures=["Qwen3VLForConditionalGeneration"], text_config=text)
    frozen = parse_hf_config(raw | dict(vision_config=tower, image_token_id=5, tie_word_embeddings=True))
    trained, halves = train_tower(frozen), ParallelSection(pp=2)
    assert not model_problems(frozen, halves)
    assert not model_problems(trained, ParallelSection(pp=2, pipeline_layers=[3, 1]))
    (problem,) = model_problems(trained, halves)
    assert [problem] == [*trained_tower_problems(frozen, halves)]
    assert str(problem).startswith("model.freeze_vision_tower: false: the first stage has 2 decoder blocks")
