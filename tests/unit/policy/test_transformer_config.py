"""What Megatron's configuration says of kernels on a GPU. Building it needs neither a GPU nor Transformer Engine."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tiny_policy import tiny_model

from megagrpo.config import ParallelSection
from megagrpo.platform import device
from megagrpo.policy.build import _own_attention
from megagrpo.policy.transformer.transformer_config import ModelOptions, transformer_config


@pytest.fixture
def on_gpu(monkeypatch):
    """Transformer Engine is there, as far as the configuration asks."""
    from megatron.core.models.common.embeddings import rope_utils

    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", lambda: None)
    monkeypatch.setattr(device, "has_transformer_engine", lambda: True)


def built(shape="qwen2_untied", **options):
    return transformer_config(tiny_model(shape), ParallelSection(), ModelOptions(dtype=torch.float32, **options))


def test_fusions_that_change_log_probs_are_off_until_they_are_asked_for(on_gpu):
    plain, fused = built(), built(fusions=["rope", "bias_activation"])
    assert (plain.apply_rope_fusion, plain.bias_activation_fusion) == (False, False)
    assert (fused.apply_rope_fusion, fused.bias_activation_fusion) == (True, True)
    assert built(fusions=["rope"]).bias_activation_fusion is False
    assert not built("phi3", fusions=["rope"]).apply_rope_fusion  # longrope has an attention factor


def test_gelu_is_the_tanh_approximation_with_and_without_its_fusion(on_gpu):
    x = torch.linspace(-4, 4, 101)
    assert torch.equal(built("gemma2").activation_func(x), F.gelu(x, approximate="tanh"))
    # Megatron's fused kernel approximates by itself
    assert built("gemma2", fusions=["bias_activation"]).activation_func is F.gelu


def test_without_transformer_engine_nothing_is_fused():
    config = built(fusions=["rope", "bias_activation"])
    assert not (config.apply_rope_fusion or config.bias_activation_fusion or config.moe_permute_fusion)


def test_no_pipeline_message_waits_for_the_whole_gpu():
    assert built().batch_p2p_sync is False


@pytest.mark.parametrize(("shape", "router"), [("qwen3_moe", True)])
def test_routing_runs_in_fused_kernels_on_a_gpu(shape, router, on_gpu, monkeypatch):
    from megatron.core.transformer.moe import moe_utils

    for name in (
        "permute",
        "permute_with_probs",
        "sort_chunks_by_index",
        "sort_chunks_by_index_with_probs",
        "unpermute",
    ):
        monkeypatch.setattr(moe_utils, f"fused_{name}", lambda: None, raising=False)
    assert not built(shape).moe_permute_fusion  # kernels in torch stand in for Transformer Engine's in tests
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    config = built(shape)
    assert config.moe_permute_fusion and config.moe_router_fusion is router
    # the fused router takes the highest scores, whatever it is given
    replayed = built(shape, replays_routes=True)
    assert replayed.moe_permute_fusion and not replayed.moe_router_fusion


def test_selective_recomputation_names_its_modules(on_gpu):
    assert built(recompute="selective").recompute_modules == ["core_attn"]
    assert built(recompute="selective", recompute_modules=["layernorm", "mlp"]).recompute_modules == [
        "layernorm",
        "mlp",
    ]


def test_without_transformer_engine_the_modules_that_need_it_are_left_out():
    assert built(recompute="selective", recompute_modules=["layernorm", "moe_act", "mlp"]).recompute_modules == ["mlp"]


def test_attention_is_ours_where_transformer_engine_would_keep_all_scores(on_gpu, monkeypatch):
    model, options = tiny_model("llama_tied"), ModelOptions(torch.bfloat16)
    assert not _own_attention(model, 1, options)
    monkeypatch.setattr(device, "is_deterministic", lambda: True)
    assert _own_attention(model, 1, options)
    monkeypatch.setattr(device, "is_deterministic", lambda: False)
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    for capability, own in (((8, 0), True), ((9, 0), False), ((10, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        assert _own_attention(model, 1, options) is own
    assert _own_attention(model, 1, ModelOptions(torch.float32))
    for version, own in ((None, True), (92000, True), (92600, False)):
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
        assert _own_attention(replace(model, sinks=True), 1, options) is own
        assert not _own_attention(model, 1, options)
