"""Checks of what this rank's device can run, before a model is built."""

from __future__ import annotations

import torch

import megagrpo.platform.device as device
from megagrpo.config import AlgorithmSection, RunConfig, TrainSection
from megagrpo.families.hf_config import HfConfig
from megagrpo.policy.fp8.fp8_settings import Fp8
from megagrpo.policy.lm_head import fused_logprobs
from megagrpo.policy.transformer.message_overlap import check_overlap

OVERFLOWS_FP16 = ("gemma2", "gemma3", "gemma3_text", "glm4")


def check_device(config: RunConfig, hf_config: HfConfig) -> torch.dtype:
    """Check that this rank's device can run the config, without a model, and return the compute dtype. Raises
    ValueError with key and fix."""
    dtype = device.resolve_precision(config.model.precision)
    if fp8 := Fp8.of(config.model, hf_config.num_layers):
        fp8.megatron_config()
        if fp8.keeps_weights and dtype != torch.bfloat16:
            raise ValueError(
                "model.fp8_param: weights in float32 have no masters to be rounded from; set model.precision to bf16"
            )
    if dtype == torch.float16:
        _check_fp16(hf_config)
    for name in ("logit_bias", "allowed_token_ids"):
        named = [token for token in getattr(config.rollout, name) if isinstance(token, int)]
        if beyond := [token for token in named if token >= hf_config.vocab_size]:
            raise ValueError(
                f"rollout.{name}: the model has {hf_config.vocab_size} tokens, from 0, and no token {beyond[0]}; name "
                "one of them"
            )
    check_overlap(config.train, config.parallel, dtype)
    check_fused(config.train, config.algorithm, config.rollout.truncates, dtype, hf_config.hidden_size)
    return dtype


def check_fused(
    train: TrainSection, algorithm: AlgorithmSection, truncates: bool, dtype: torch.dtype, hidden_size: int
) -> None:
    """Raise ValueError when the config asks for the fused kernels and they cannot run."""
    exact_kl = algorithm.full_kl and algorithm.beta > 0
    in_fp8 = train.logprobs_fp8_recipe != "none"
    reason = fused_logprobs.refusal(dtype, hidden_size, truncates, exact_kl, in_fp8)
    if train.fused_logprobs and reason:
        raise ValueError(f"train.fused_logprobs: true is not possible: {reason}; set it to false")


def _check_fp16(hf_config: HfConfig) -> None:
    """Raise ValueError for a model that vLLM refuses in fp16, or whose weights fp16 cannot carry without loss."""
    if hf_config.family in OVERFLOWS_FP16:
        reason = f"vLLM refuses {hf_config.family} in fp16, because its activations overflow"
    elif hf_config.experts and hf_config.experts.bias:
        reason = "the selection biases of this model's routers need the range of float32"
    else:
        return
    raise ValueError(f"model.precision: {reason}; set it to bf16")
