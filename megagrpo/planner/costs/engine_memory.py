"""Predicts the memory of a vLLM server: its weights, its KV cache, and the room for a weight sync."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil

from megagrpo.config import RolloutSection, RunConfig
from megagrpo.families.hf_config import HfConfig
from megagrpo.planner.costs.shapes import expert_parameters, num_parameters

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


@dataclass(frozen=True)
class ServerMemory:
    """The memory of each vLLM server of a run. `weight_bytes` are those of an element in the trainer. With `images` a
    server computes the model's tower."""

    rollout: RolloutSection
    weight_bytes: int
    max_model_len: int
    images: bool
    model: HfConfig

    @classmethod
    def of(cls, config: RunConfig, model: HfConfig) -> ServerMemory:
        """Return it for a config."""
        return cls(config.rollout, config.model.weight_bytes, config.max_model_len, config.data.images, model)

    def kv_bytes(self, tokens: int, prefill: int | None = None) -> int:
        """Return the KV cache bytes of one sequence on one of the run's vLLM devices: `kv_elements` in vLLM's compute
        dtype, of the layers of the largest pipeline stage."""
        whole = self.element * kv_elements(self.model, self.rollout.tp, tokens, prefill)
        return ceil(whole * ceil(self.model.num_layers / self.rollout.pp) / self.model.num_layers)

    @property
    def element(self) -> int:
        """The bytes of one element in vLLM's compute dtype: 2 with quantized weights, else as in the trainer."""
        return self.weight_bytes if self.rollout.quantization == "none" else 2

    @property
    def block_element(self) -> int:
        """The bytes of one element of a block's linears in vLLM, without FP8's scales, which are a thousandth."""
        return self.element if self.rollout.quantization == "none" else 1

    @cached_property
    def whole_bytes(self) -> int:
        """The bytes of the whole model in vLLM. vLLM quantizes only the blocks, not embedding and output layer."""
        model = self.model
        vectors = model.layer_inputs * model.num_layers  # of a token, in the second embedding
        outer = model.vocab_size * (model.hidden_size * (1 if model.tied_embeddings else 2) + vectors)
        return self.element * outer + self.block_element * (num_parameters(model) - outer)

    def device_bytes(self) -> float:
        """Return the bytes of the weights on the fullest device of a vLLM server.

        The first and the last pipeline stage hold the embedding and the output layer besides their blocks.
        Data-parallel copies share the experts only. The tower of a run with images is on the first stage.
        """
        r, model, every = self.rollout, self.model, float(self.whole_bytes)
        experts = float(self.block_element * expert_parameters(model))
        outer = self.element * model.vocab_size * model.hidden_size
        if r.pp > 1:
            share = ceil(model.num_layers / r.pp) / model.num_layers
            experts = experts * share
            every = outer + (every - outer * (1 if model.tied_embeddings else 2)) * share
        tower = model.vision.shape if self.images and model.vision else None
        every += self.element * tower.parameters if tower else 0
        return (every - experts + experts / r.dp) / r.tp

    def reload_bytes(self) -> float:
        """Return the bytes that a weight sync needs on each of a server's GPUs beside vLLM's weights and cache.

        vLLM's reload allocates one module at a time in the compute dtype, fills it, quantizes it to a new tensor and
        copies that to the weights. The largest module is an embedding, an MLP's gate and up, or all experts of a layer.
        """
        model, element = self.model, self.element
        quantized = element if self.rollout.quantization == "none" else element + self.block_element
        experts = model.mlp_matrices * model.experts.intermediate_size * model.experts.count if model.experts else 0
        mlp = (model.mlp_matrices - 1) * model.intermediate_size * (1 + model.wide_borrowers) * quantized
        embedding = model.vocab_size * element * max(1, model.layer_inputs * model.num_layers / model.hidden_size)
        largest = max(embedding, mlp, experts / self.rollout.dp * quantized)
        return largest * model.hidden_size / self.rollout.tp

    def sequence(self) -> float:
        """Return the GiB of the longest sequence in the KV cache while a batch is prefilled."""
        return self.kv_bytes(self.max_model_len, PREFILL_TOKENS) / GIB

    def parts(self, gpu: float | None = None) -> dict[str, float]:
        """Return the GiB of weights and KV cache of a vLLM server on each of its GPUs.

        The cache gets the rest of the server's share of `gpu` GiB. With `gpu` None it is the minimum: one longest
        sequence.
        """
        least = self.sequence()
        weights = self.device_bytes() / GIB
        rest = least if gpu is None else self.rollout.gpu_memory_utilization * gpu - weights
        return {"vllm_weights": weights, "kv_cache": max(0.0, rest)}
