"""Predicts the seconds in which vLLM servers generate the responses of a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil, exp

from megagrpo.config import RunConfig
from megagrpo.families.hf_config import HfConfig
from megagrpo.planner.costs.engine_memory import GIB, ServerMemory
from megagrpo.planner.costs.flops import attention_flops, token_flops
from megagrpo.planner.costs.gpu_specs import GPUS_PER_NODE, Gpu, Links
from megagrpo.planner.costs.shapes import expert_parameters
from megagrpo.planner.costs.tower_costs import tower_seconds
from megagrpo.planner.costs.workload import Lengths, mean_group, step_samples

PREFILL_EFFICIENCY = 0.5
DECODE_BANDWIDTH = 0.7  # share of the peak memory bandwidth when decoding
EXPERT_DECODE_BANDWIDTH = 0.5  # the same when it reads many narrow experts for a few tokens each
DECODE_STEP_SECONDS = 4e-3  # vLLM's overhead per decoding step: scheduling, sampling
LAYER_SECONDS = 20e-6  # kernel launches per layer of a decoding step
SLEEP_SECONDS = 3.0  # a colocated server's sleep and wake-up together
CURVE_POINTS = 64


@dataclass(frozen=True)
class Generation:
    """The vLLM servers of a run, on a kind of GPU, which generate responses of these lengths."""

    config: RunConfig
    model: HfConfig
    gpu: Gpu
    lengths: Lengths

    @cached_property
    def _memory(self) -> ServerMemory:
        return ServerMemory.of(self.config, self.model)

    @property
    def _servers(self) -> int:
        return len(self.config.rollout.urls) or self.config.rollout.servers

    @property
    def _each(self) -> int:
        """The responses of a step on each server."""
        return ceil(step_samples(self.config) / self._servers)

    def seconds(self) -> float:
        """Return the seconds to generate a step's responses: prefill by FLOPs, decoding by reads of weights and
        cache."""
        r, model, lengths = self.config.rollout, self.model, self.lengths
        prompts = ceil(
            self._each / mean_group(self.config.each_task)
        )  # the responses of a group share their prompt's cache
        peak = self.gpu.bf16_tflops * 1e12 * r.devices_per_server
        of_prompt = lengths.prompt * token_flops(model).blocks + attention_flops(model, lengths.prompt)
        prefill = prompts * of_prompt / (peak * PREFILL_EFFICIENCY)
        prefill += tower_seconds(self.config, model, self.gpu, lengths, self._servers)
        slots = self._slots()
        if r.max_staleness and r.in_flight != "wait":
            return prefill + self._steady_seconds(min(slots, self._each * (1 + r.max_staleness)))
        return prefill + self._drained_seconds(min(slots, self._each)) + SLEEP_SECONDS * (r.placed == "colocated")

    def is_cache_full(self) -> bool:
        """Whether responses wait because the KV cache of a server is full."""
        r = self.config.rollout
        return self._slots() < min(r.dp * r.max_num_seqs, self._each)

    def _drained_seconds(self, slots: int) -> float:
        """Return a server's decoding seconds until its responses, and the other servers' responses, have ended.

        `slots` sequences decode at once, always while requests wait. Then the number falls with the length
        distribution.
        """
        lengths = self.lengths
        queued = (self._each - slots) * lengths.response / slots  # steps in which every slot is busy
        total = queued * self._decode_seconds(slots, lengths.prompt + lengths.response / 2)
        scale = exponential_mean(lengths.response, lengths.longest)
        width = lengths.longest / CURVE_POINTS
        for i in range(CURVE_POINTS):
            position = (i + 0.5) * width
            left = exp(-position / scale) if scale else 1.0  # share of responses that are longer than `position`
            going = 1 - (1 - left) ** step_samples(self.config)  # probability that any still runs
            total += width * going * self._decode_seconds(max(1.0, slots * left), lengths.prompt + position)
        return total

    def _steady_seconds(self, slots: int) -> float:
        """Return a server's decoding seconds if the next steps' responses fill free slots, so every slot is always
        busy. The longest response may take as many steps as it may be stale."""
        lengths = self.lengths
        one = self._decode_seconds(slots, lengths.prompt + lengths.response / 2)
        longest = lengths.longest / (1 + self.config.rollout.max_staleness)
        return max(self._each * lengths.response / slots, longest) * one

    def _slots(self) -> int:
        """Return how many average sequences a server decodes at once: `rollout.max_num_seqs` on each data-parallel
        copy, or as many as its KV cache holds, at least one."""
        r = self.config.rollout
        room = r.gpu_memory_utilization * self.gpu.memory_gib * GIB - self._memory.device_bytes()
        cached = max(1, int(room / max(1, self._memory.kv_bytes(int(self.lengths.sample)))))
        return r.dp * min(r.max_num_seqs, cached)

    def _decode_seconds(self, batch: float, context: float) -> float:
        """Return the seconds in which a server decodes one token for each of `batch` sequences of `context` tokens.

        Pipeline stages work on parts of the batch at the same time. Each stage reads its weights once for each part, so
        stages make room and save products, but no reading of weights. Data-parallel copies share the batch and the
        experts; each reads all other weights.
        """
        r, model, gpu, experts = self.config.rollout, self.model, self.gpu, self.model.experts
        links = Links(gpu, min(GPUS_PER_NODE, r.devices_per_node))
        own = batch / r.dp  # sequences of a copy
        of_experts = self._memory.block_element * expert_parameters(model)
        read = (self._memory.whole_bytes - of_experts) / r.tp + own * self._memory.kv_bytes(int(context))
        reading = read / (gpu.memory_gb_per_s * 1e9 * DECODE_BANDWIDTH)
        if experts:  # a part of the batch touches this share of the experts
            touched = of_experts * (1 - (1 - experts.per_token / experts.count) ** (batch / r.pp))
            reading += touched / (r.tp * r.dp) / (gpu.memory_gb_per_s * 1e9 * EXPERT_DECODE_BANDWIDTH)
        flops = token_flops(model)
        rate = r.devices_per_server * gpu.bf16_tflops * 1e12 * PREFILL_EFFICIENCY
        computing = batch * (flops.blocks + flops.head) / rate
        talking = model.num_layers * 2 * links.all_reduce(own * model.hidden_size * 2, r.tp)
        if experts and r.dp > 1:  # every copy's tokens go to all workers, and the sums come back
            talking += 2 * len(experts.blocks) * links.reduce_scatter(batch * model.hidden_size * 2, r.dp, r.tp)
        if r.pp > 1:
            talking += r.pp * (links.latency(1) + links.seconds(own / r.pp * model.hidden_size * 2, r.tp * r.dp + 1))
        return max(reading, computing) + talking + DECODE_STEP_SECONDS + model.num_layers * LAYER_SECONDS


def exponential_mean(mean: float, longest: float) -> float:
    """Return the scale of the exponential distribution that has this mean when truncated at `longest`.

    The share of responses running after some tokens falls like exp(-tokens / scale). 0 means all have full length.
    """
    if mean >= 0.999 * longest:
        return 0.0
    low, high = mean, 1000 * longest
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if middle * (1 - exp(-longest / middle)) < mean else (low, middle)
    return high
