"""Routed experts in vLLM for CPU: lets `--enable-return-routed-experts` work with the model runner for CPUs.

vLLM (seen in 0.32) connects its auxiliary outputs to Model Runner V2 only, which has no CPU version. Capture, prefix
cache, scheduler and the response field `routed_experts` are vLLM's own; this module calls them from the CPU's runner.
Remove it when a CPU server with `--enable-return-routed-experts` responds without it; the tests check that.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


def return_routed_experts() -> None:
    """Patch the check of the configuration and the CPU's model runner. Later calls change nothing."""
    if hasattr(VllmConfig._verify_aux_output_compatibility, "__wrapped__"):
        return
    VllmConfig._verify_aux_output_compatibility = _as_own_runner(VllmConfig._verify_aux_output_compatibility)
    CPUModelRunner.initialize_kv_cache = _with_connector(CPUModelRunner.initialize_kv_cache)
    CPUModelRunner.execute_model = _with_capture(CPUModelRunner.execute_model)
    CPUModelRunner.sample_tokens = _with_rows(CPUModelRunner.sample_tokens)


def _as_own_runner(original: Any) -> Any:
    @functools.wraps(original)
    def verify(self: VllmConfig) -> None:
        """Check as for a platform with its own model runner: everything but the version of vLLM's runner. The prefix
        cache, which this platform turns off for latent attention, is needed only for prompts that are read in parts."""
        cache = self.cache_config
        known, whole_prompts = cache.enable_prefix_caching, not self.scheduler_config.enable_chunked_prefill
        current_platform.is_out_of_tree = lambda: True
        try:
            cache.enable_prefix_caching = known or (self.model_config.use_mla and whole_prompts)
            original(self)
        finally:
            cache.enable_prefix_caching = known
            del current_platform.is_out_of_tree

    return verify


def _with_connector(original: Any) -> Any:
    @functools.wraps(original)
    def initialize_kv_cache(self: CPUModelRunner, kv_cache_config: Any, *arguments: Any, **named: Any) -> None:
        original(self, kv_cache_config, *arguments, **named)
        self.routes_connector = self.routes_pending = None
        if self.vllm_config.aux_output_config.enabled:
            if self.speculative_config is not None:
                raise ValueError(
                    "--enable-return-routed-experts on CPUs does not know which speculated tokens were rejected; leave "
                    "--speculative-config out"
                )
            # imports most of vLLM, which the plugin loader has not done in every process
            from vllm.distributed.aux_output_connector.worker import get_aux_output_connector

            self.routes_connector = get_aux_output_connector(self.model, self.vllm_config, kv_cache_config)

    return initialize_kv_cache


def _with_capture(original: Any) -> Any:
    @functools.wraps(original)
    def execute_model(self: CPUModelRunner, scheduler_output: Any, *arguments: Any, **named: Any) -> Any:
        connector = getattr(self, "routes_connector", None)  # None also in warm-ups before the cache exists
        if connector is None:
            return original(self, scheduler_output, *arguments, **named)
        connector.begin_step(scheduler_output.aux_output_connector_metadata)
        result = original(self, scheduler_output, *arguments, **named)
        if self.execute_model_state is not None:
            requests = self.input_batch.num_reqs
            batch = SimpleNamespace(
                req_ids=self.input_batch.req_ids,
                query_start_loc_np=self.query_start_loc.np[: requests + 1].copy(),
                num_computed_tokens_np=self.input_batch.num_computed_tokens_cpu[:requests].copy(),
            )
            self.routes_pending = connector.prepare_output(batch)
        return result

    return execute_model


def _with_rows(original: Any) -> Any:
    @functools.wraps(original)
    def sample_tokens(self: CPUModelRunner, grammar_output: Any) -> Any:
        output = original(self, grammar_output)
        pending = getattr(self, "routes_pending", None)
        if pending is not None:
            self.routes_pending = None
            sampled = np.array([len(output.sampled_token_ids[output.req_id_to_index[r]]) for r in pending.request_ids])
            pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))  # no token is rejected without speculation
            output.aux_output_connector_output = pending.process_output()
            if not self.cache_config.enable_prefix_caching:
                _drop_blocks(self.routes_connector)
        return output

    return sample_tokens


def _drop_blocks(connector: Any) -> None:
    """Free whole blocks of routes. Their keys are those of the prefix cache; without it no key comes and none reads
    them, because each step has sent its routes already."""
    for request in connector._requests.values():
        for _, rows in request.pending_blocks:
            connector._buffer.release_block(rows)
        request.pending_blocks = []
