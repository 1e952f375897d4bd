"""Predicts the memory of a vLLM server: its weights, its KV cache, and the room for a weight sync."""

from __future__ import annotations

from math import ceil

from megagrpo.config import RunConfig
from megagrpo.families.hf_config import HfConfig
from megagrpo.planner.costs.shapes import expert_parameters, num_parameters
from megagrpo.planner.costs.tower_costs import tower_shape

GIB = 2**30
PREFILL_TOKENS = 8192  # tokens in one prefill batch of vLLM, its default on large GPUs


def kv_elements(model: HfConfig, tp: int, tokens: int, prefill: int | None = None) -> int:
    """Return the KV cache elements of one sequence of `tokens` tokens on one of `tp` vLLM devices.

    A device keeps at least one whole head; with latent attention it keeps the whole latent. For a layer with a window
    vLLM keeps the tokens that a token sees before its own, and up to `prefill` tokens of the current batch. `prefill`
    None: it keeps all tokens, as when whole prompts are one batch.
    """

    def of_layer(layer: int) -> int:
        own, window = model.in_block(layer), model.window(layer)
        element = 2 * own.head_dim * max(1, own.num_kv_heads // tp)
        element = model.mla.kv_rank + model.mla.rope_dim if model.mla else element
        return element * (tokens if window is None or prefill is None else min(tokens, window - 1 + prefill))

    own_keys = (layer for layer in range(model.num_layers) if model.lender(layer) is None)
    of_layers = (of_layer(layer) for layer in own_keys if model.has_attention(layer))
    return sum(of_layers) + _state_elements(model, tp)


def _state_elements(model: HfConfig, tp: int) -> int:
    """Return the elements of one sequence's states in all recurrent parts on one of `tp` devices."""
    recurrence = model.recurrence
    if recurrence is None:
        return 0
    past = (recurrence.kernel - 1) * sum(recurrence.convolved.values())
    return len(recurrence.blocks) * (past + recurrence.state) // tp


def kv_bytes(config: RunConfig, model: HfConfig, tokens: int, prefill: int | None = None) -> int:
    """Return the KV cache bytes of one sequence on one of the run's vLLM devices: `kv_elements` in vLLM's compute
    dtype, of the layers of the largest pipeline stage."""
    whole = engine_element(config) * kv_elements(model, config.rollout.tp, tokens, prefill)
    return ceil(whole * ceil(model.num_layers / config.rollout.pp) / model.num_layers)


def engine_element(config: RunConfig) -> int:
    """Return the bytes of one element in vLLM's compute dtype: 2 with quantized weights, else as in the trainer."""
    return config.model.weight_bytes if config.rollout.quantization == "none" else 2


def block_bytes(config: RunConfig) -> int:
    """Return the bytes of one element of a block's linears in vLLM, without FP8's scales, which are a thousandth."""
    return engine_element(config) if config.rollout.quantization == "none" else 1


def engine_bytes(config: RunConfig, model: HfConfig) -> int:
    """Return the bytes of the whole model in vLLM. vLLM quantizes only the blocks, not embedding and output layer."""
    vectors = model.layer_inputs * model.num_layers  # of a token, in the second embedding
    outer = model.vocab_size * (model.hidden_size * (1 if model.tied_embeddings else 2) + vectors)
    return engine_element(config) * outer + block_bytes(config) * (num_parameters(model) - outer)


def device_bytes(config: RunConfig, model: HfConfig) -> float:
    """Return the bytes of the weights on the fullest device of a vLLM server.

    The first and the last pipeline stage hold the embedding and the output layer besides their blocks. Data-parallel
    copies share the experts only. The tower of a run with images is on the first stage.
    """
    r = config.rollout
    block, every = block_bytes(config), float(engine_bytes(config, model))
    experts = float(block * expert_parameters(model))
    outer = engine_element(config) * model.vocab_size * model.hidden_size
    if r.pp > 1:
        share = ceil(model.num_layers / r.pp) / model.num_layers
        experts = experts * share
        every = outer + (every - outer * (1 if model.tied_embeddings else 2)) * share
    tower = tower_shape(config, model)
    every += engine_element(config) * tower.parameters if tower else 0
    return (every - experts + experts / r.dp) / r.tp


def reload_bytes(config: RunConfig, model: HfConfig) -> float:
    """Return the bytes that a weight sync needs on each of a server's GPUs beside vLLM's weights and cache.

    vLLM's reload allocates one module at a time in the compute dtype, fills it, quantizes it to a new tensor and copies
    that to the weights. The largest module is an embedding, an MLP's gate and up, or all experts of a layer.
    """
    tp, hidden, element = config.rollout.tp, model.hidden_size, engine_element(config)
    quantized = element if config.rollout.quantization == "none" else element + block_bytes(config)
    experts = model.mlp_matrices * model.experts.intermediate_size * model.experts.count if model.experts else 0
    mlp = (model.mlp_matrices - 1) * model.intermediate_size * (1 + model.wide_borrowers) * quantized
    embedding = model.vocab_size * element * max(1, model.layer_inputs * model.num_layers / hidden)
    return max(embedding, mlp, experts / config.rollout.dp * quantized) * hidden / tp


def sequence_memory(config: RunConfig, model: HfConfig) -> float:
    """Return the GiB of the longest sequence in the KV cache while a batch is prefilled."""
    return kv_bytes(config, model, config.max_model_len, PREFILL_TOKENS) / GIB


def engine_memory(config: RunConfig, model: HfConfig, gpu: float | None = None) -> dict[str, float]:
    """Return the GiB of weights and KV cache of a vLLM server on each of its GPUs.

    The cache gets the rest of the server's share of `gpu` GiB. With `gpu` None it is the minimum: one longest sequence.
    """
    least = sequence_memory(config, model)
    weights = device_bytes(config, model) / GIB
    rest = least if gpu is None else config.rollout.gpu_memory_utilization * gpu - weights
    return {"vllm_weights": weights, "kv_cache": max(0.0, rest)}
