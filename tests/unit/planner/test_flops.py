"""FLOPs of an optimizer step against torch's own count on a model of transformers, and GPU peaks by CUDA's names."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megagrpo.families.hf_config import parse_hf_config
from megagrpo.planner.costs.flops import attention_flops, model_flops, step_flops, token_flops
from megagrpo.planner.costs.gpu_specs import GPUS, bf16_tflops_of
from tests.family_examples import RELEASES

PROMPT, RESPONSE = 40, 24
SHAPE = dict(
    hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
) | dict(vocab_size=512)


def counted(frozen: bool) -> tuple:
    """FLOPs that torch counts for forward and backward of one sample, with the head on response tokens only. Its
    attention is not causal: every token meets every other one."""
    import transformers

    config = transformers.LlamaConfig(**SHAPE, max_position_embeddings=256, tie_word_embeddings=False)
    config._attn_implementation = "eager"
    model = transformers.LlamaForCausalLM(config)
    if frozen:
        model.requires_grad_(False)
    tokens = torch.arange(PROMPT + RESPONSE)[None]
    embedded = model.model.embed_tokens(tokens).detach().requires_grad_()
    with FlopCounterMode(display=False) as counter:
        hidden = model.model(inputs_embeds=embedded, use_cache=False).last_hidden_state
        model.lm_head(hidden[:, PROMPT:]).sum().backward()
    return config, counter.get_total_flops()


def spans(*pairs):
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


@pytest.mark.parametrize("frozen", [False, True])
def test_the_flops_of_a_step_are_those_that_torch_counts(frozen):
    config, naive = counted(frozen)
    model, length = parse_hf_config(config.to_dict() | {"architectures": ["LlamaForCausalLM"]}), PROMPT + RESPONSE
    own = step_flops(model, spans((0, length)), RESPONSE, frozen)
    # causal attention is half of the square
    assert own + 3 * attention_flops(model, length) == pytest.approx(naive, rel=0.01)
    assert own == model_flops(model, PROMPT, RESPONSE, frozen)


def test_a_shared_prompt_counts_once_and_the_parts_of_a_sample_add_up():
    import transformers

    model = parse_hf_config(transformers.LlamaConfig(**SHAPE).to_dict() | {"architectures": ["LlamaForCausalLM"]})
    whole = step_flops(model, spans((0, 64)), 24)
    assert step_flops(model, spans((0, 40), (40, 64)), 24) == pytest.approx(whole)
    assert step_flops(model, spans((0, 40), (40, 64), (40, 64)), 48) == pytest.approx(
        2 * whole - step_flops(model, spans((0, 40)), 0)
    )
    assert step_flops(model, spans(), 0) == 0


def test_a_gpu_is_known_by_its_whole_name_only():
    assert {name: bf16_tflops_of(name) for gpu in GPUS.values() for name in gpu.cuda_names} == {
        "NVIDIA A100-SXM4-40GB": 312,
        "NVIDIA A100-SXM4-80GB": 312,
        "NVIDIA A100 80GB PCIe": 312,
    } | {"NVIDIA A100-PCIE-40GB": 312, "NVIDIA H100 80GB HBM3": 989, "NVIDIA H200": 989, "NVIDIA B200": 2250}
    for slower in ("NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA GeForce RTX 4090", ""):
        assert bf16_tflops_of(slower) is None


def test_sparse_attention_counts_the_keys_that_a_token_sees():
    sparse = parse_hf_config(RELEASES["deepseek_v32"])
    dense = replace(sparse, indexer=None)
    assert attention_flops(sparse, 2048) == attention_flops(dense, 2048)
    seen = sum(min(i + 1, 2048) for i in range(6000))
    per_key = 2 * 61 * 128 * (192 + 128)  # products and sums of layers, heads, and widths of keys and values
    assert attention_flops(sparse, 6000) == pytest.approx(per_key * seen, rel=1e-3)
    products = 6000 * token_flops(sparse).blocks
    assert step_flops(sparse, spans((0, 6000)), 0) == pytest.approx(3 * (products + attention_flops(sparse, 6000)))
