"""Finds problems of vLLM servers before they start: sizes that vLLM cannot shard, and limits that a server exceeds."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from megagrpo.config import Problem, RolloutSection, RunConfig, evaluation_sets
from megagrpo.config.rules.config_rules import LONGEST_SAMPLE
from megagrpo.families.family_index import FAMILIES
from megagrpo.families.hf_config import HfConfig


def rollout_problems(config: RunConfig, model: HfConfig, sequence: float) -> Iterator[Problem]:
    """Yield what the servers cannot shard or hold of this model. The longest sample's KV cache has `sequence` GiB."""
    r = config.rollout
    if not r.urls:
        yield from _server_problems(r, model)
    lengths: dict[tuple[str, ...], tuple[str, int]] = {}
    lengths["rollout.max_completion_length", *LONGEST_SAMPLE] = (config.response_limit, config.max_model_len)
    for name, held_out in evaluation_sets(config).items():
        longest = r.max_prompt_length + held_out.max_completion_length
        if name and config.max_model_len < longest:
            key = f"evaluation.sets.{name}.max_completion_length"
            lengths[key, "rollout.max_prompt_length"] = (str(held_out.max_completion_length), longest)
    for keys, (response, longest) in lengths.items():
        if longest > model.max_positions:
            said = (
                f"max_prompt_length {r.max_prompt_length} + {response} = {longest} tokens, but the model's limit is "
                f"{model.max_positions} (max_position_embeddings); shorten by {longest - model.max_positions}"
            )
            yield Problem(keys, said)
    if not r.urls and sequence > r.kv_cache_gb:
        said = f"{r.kv_cache_gb:g} cannot hold one sequence of {config.max_model_len} tokens; use"
        yield Problem(("rollout.kv_cache_gb", *LONGEST_SAMPLE), f"{said} {ceil(sequence * 10) / 10:g} or more")


def unserved_problems(model: HfConfig) -> Iterator[Problem]:
    """Yield why no vLLM serves the model's family."""
    if reason := FAMILIES[model.family].unserved:
        said = f"{model.family} cannot be trained: {reason}; its models can be converted, exported and verified"
        yield Problem(("model.path",), said)


def _server_problems(r: RolloutSection, model: HfConfig) -> Iterator[Problem]:
    """Yield why servers that the run starts cannot be sharded as `r` requires."""
    yield from unserved_problems(model)
    shared_out = r.enable_expert_parallel
    valid = [tp for tp in range(1, model.num_heads + 1) if vllm_can_split(model, tp, shared_out)]
    if r.tp not in valid:
        widths = " and ".join(map(str, _mlp_widths(model, shared_out)))
        said = (
            f"vLLM cannot split {model.num_heads} heads, {model.num_kv_heads} KV heads, vocabulary "
            f"{_vllm_vocab(model)}{widths and f' and intermediate_size={widths}'} over tp={r.tp}; valid tp: "
            f"{', '.join(map(str, valid))}"
        )
        yield Problem(("rollout.tp", "model.path"), said)
    if shared_out and not model.experts:
        yield Problem(("rollout.enable_expert_parallel",), f"{model.family} has no experts; set it to false")
    if shared_out and model.experts and model.experts.count < r.tp * r.dp:
        said = f"{r.tp} x rollout.dp {r.dp} workers share {model.experts.count} experts, which leaves workers without"
        yield Problem(("rollout.tp", "rollout.dp", "rollout.enable_expert_parallel"), f"{said} any; lower one")
    if r.pp > model.num_layers:
        said = f"{r.pp} stages share {model.num_layers} layers, which leaves stages without any; set it to"
        yield Problem(("rollout.pp", "model.path"), f"{said} {model.num_layers} or less")


def vllm_can_split(model: HfConfig, tp: int, experts_shared_out: bool = False) -> bool:
    """Whether vLLM starts on `model` with `tp` workers; with `experts_shared_out` each worker has whole experts."""
    whole = not any(
        size % tp for size in (model.num_heads, _vllm_vocab(model), *_mlp_widths(model, experts_shared_out))
    )
    return whole and (model.num_kv_heads % tp == 0 or tp % model.num_kv_heads == 0)


def _vllm_vocab(model: HfConfig) -> int:
    """Return vLLM's vocabulary size: it pads the vocabulary to a multiple of 64 before sharding."""
    return -(-model.vocab_size // 64) * 64


def _mlp_widths(model: HfConfig, experts_shared_out: bool) -> list[int]:
    """Return the widths of MLPs that vLLM shards."""
    dense = [model.intermediate_size] if model.has_dense_mlps else []
    if model.experts is None:
        return dense
    cut = [] if experts_shared_out else [model.experts.intermediate_size]
    return dense + cut + [model.experts.shared_size] * (model.experts.shared_size > 0)
