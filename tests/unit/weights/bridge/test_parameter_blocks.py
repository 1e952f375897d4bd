"""The tables of families: the expert of each parameter, in the names of both layer specs, and every tensor name of a
model on disk."""

import re
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from megagrpo.config import ParallelSection
from megagrpo.families.family_index import FAMILIES
from megagrpo.families.hf_config import parse_hf_config
from megagrpo.weights.blocks.parameter_blocks import blocks, tensor_names
from tests.unit.for_each import for_each

SIZES = dict(
    num_hidden_layers=3, hidden_size=8, num_attention_heads=4, num_key_value_heads=2, intermediate_size=6, vocab_size=11
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=5, mlp_only_layers=[0], head_dim=2)
LATENT = dict(
    num_key_value_heads=4, q_lora_rank=6, kv_lora_rank=5, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=3
)
LATENT |= dict(
    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=5, n_shared_experts=1, first_k_dense_replace=2
)
LATENT |= dict(n_group=1, topk_group=1, routed_scaling_factor=1.0)

YARN = dict(rope_type="yarn", rope_theta=1e4, factor=32.0, original_max_position_embeddings=4096)


@dataclass(frozen=True)
class SecondOfTwo:
    """A rank with the second half of the experts."""

    parallel: ParallelSection = field(default_factory=lambda: ParallelSection(ep=2))
    tp_rank: int = 0
    ep_rank: int = 1
    etp_rank: int = 0


class Layer(nn.Module):
    """A hybrid layer with parameters under the dotted `names`."""

    def __init__(self, number: int, names: list[str]):
        super().__init__()
        self.layer_number = number
        for path, _, name in (name.rpartition(".") for name in names):
            module = self
            for part in path.split("."):
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            shape = (10, 8) if "fc1" in path else (8, 5)
            module.register_parameter(name, nn.Parameter(torch.zeros(shape)))


def stage(names: list[str]) -> nn.Module:
    """A pipeline stage with only the experts of the second decoder block."""
    chunk = nn.Module()
    chunk.decoder = nn.Module()
    chunk.decoder.layers = nn.ModuleList([Layer(4, names)])
    return chunk


@pytest.mark.parametrize(
    "names",
    [
        [f"mlp.experts.local_experts.{e}.linear_fc{fc}.weight" for fc in (1, 2) for e in (0, 1)],
        [f"mlp.experts.linear_fc{fc}.weight{e}" for fc in (1, 2) for e in (0, 1)],
    ],
    ids=["local spec", "Transformer Engine"],
)
def test_local_experts_are_numbered_over_all_ranks_under_the_names_of_either_spec(names):
    hf_config = parse_hf_config(SIZES | EXPERTS | {"model_type": "qwen3_moe"})
    found = [block.name for _, _, held in blocks([stage(names)], hf_config, SecondOfTwo()) for block in held]
    expected = [f"experts.{e}.{p}_proj.weight" for p in ("gate", "up", "down") for e in (2, 3)]
    assert sorted(found) == sorted(f"model.layers.1.mlp.{name}" for name in expected)


def test_a_parameter_without_a_rule_is_named():
    hf_config = parse_hf_config(SIZES | EXPERTS | {"model_type": "qwen3_moe"})
    with pytest.raises(
        KeyError, match=r"family qwen3_moe has no rule for Megatron parameter decoder\.layers\.0\.mlp\.odd\.weight"
    ):
        list(blocks([stage(["mlp.odd.weight"])], hf_config, SecondOfTwo()))


@for_each(
    "raw",
    [
        {"model_type": "llama"},
        {"model_type": "qwen2"},
        {"model_type": "qwen3", "head_dim": 2},
        {"model_type": "qwen3_moe"} | EXPERTS,
        {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
        LATENT | {"model_type": "deepseek_v2", "q_lora_rank": None, "topk_method": "greedy"},
        LATENT | {"model_type": "deepseek_v3", "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        dict(model_type="gpt_oss", num_local_experts=4, num_experts_per_tok=2, head_dim=2) | dict(rope_parameters=YARN),
    ],
)
def test_the_names_of_a_model_are_those_that_transformers_writes(raw, tmp_path):
    import transformers

    raw = SIZES | raw
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**raw))
    model.save_pretrained(tmp_path)
    from safetensors import safe_open

    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == tensor_names(parse_hf_config(raw))


@pytest.mark.parametrize(
    ("key", "count"), [("num_nextn_predict_layers", 2), ("num_mtp_layers", 2), ("num_nextn_predict_layers", 0)]
)
def test_as_many_layers_behind_the_last_one_stay_as_loaded_as_config_json_names_or_one(key, count):
    raw = (
        SIZES | LATENT | {"model_type": "deepseek_v3", "scoring_func": "sigmoid", "topk_method": "noaux_tc", key: count}
    )
    patterns = FAMILIES["deepseek_v3"].untrained(parse_hf_config(raw))
    found = [
        layer
        for layer in range(8)
        if any(re.fullmatch(pattern, f"model.layers.{layer}.eh_proj.weight") for pattern in patterns)
    ]
    assert found == [3, 4][: count or 1]
