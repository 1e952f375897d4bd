"""Predicts the seconds of a step in which the hosts read, exchange, pack and write its samples.

The seconds are of one core, and of gloo between two hosts. `python benchmarks/scale.py --parts planned` prints them
beside measured ones.
"""

from __future__ import annotations

from math import ceil, log2

from megagrpo.config import RunConfig
from megagrpo.families.hf_config import HfConfig
from megagrpo.planner.costs.shapes import layer_route_bytes
from megagrpo.planner.costs.workload import Lengths, average_bundle, step_samples
from megagrpo.planner.times.pass_times import fill

REQUEST_SECONDS, READ_TOKEN_SECONDS = 0.45e-3, 0.6e-6  # a leader reads a response
PLANNED_SAMPLE_SECONDS = 5e-6  # every rank: advantages, packing and metrics of all samples
BUILT_SECONDS = 0.25e-3  # a micro-batch of a rank's own samples
BUILT_SAMPLE_SECONDS, BUILT_TOKEN_SECONDS = 20e-6, 30e-9  # what is in it
WRITTEN_SAMPLE_SECONDS, WRITTEN_TOKEN_SECONDS = 17e-6, 40e-9  # the line of a response, one after the other
READ_ROUTE_SECONDS = 8e-9  # of a byte of routes that a leader decodes and checks
ROUTED_TOKEN_SECONDS, ROUTED_SECONDS = 150e-9, 5e-9  # of a token, and of a byte of its routes, that a leader sends on
GLOO_SECONDS = 50e-6  # of a small message between two hosts over gloo
GLOO_GB_PER_S = 1.0  # of a large one
AGREEMENTS = 16  # small all-reduces over all ranks in a step
FACT_BYTES = 40  # of a sample that every rank knows


def route_bytes(config: RunConfig, model: HfConfig) -> int:
    """Return the bytes of a token's routes in all layers, with `rollout.routing_replay: engine`."""
    if model.experts is None or config.rollout.routing_replay != "engine":
        return 0
    return len(model.experts.blocks) * layer_route_bytes(model)


def control_seconds(config: RunConfig, world_size: int, lengths: Lengths, routes: int = 0) -> dict[str, float]:
    """Return part -> seconds of a step: `read` on the leader of a replica, beside generation, and in turn `facts` and
    `tokens` (their exchange), `pack`, `agree`, `write`, and with `routes` bytes of routes a token their exchange.

    Facts go around the leaders, tokens from leader to leader, and both then from the leader to the ranks of its
    replica, tokens only to the first and the last pipeline stage. Routes go from leader to leader as tokens do. A rank
    then gets only those of its own tokens and layers.
    """
    p, samples = config.parallel, step_samples(config)
    dp = max(1, world_size // p.model_parallel_size)
    own = samples / dp
    computed = own * average_bundle(config, lengths).tokens_per_response
    micro_batches = ceil(computed / (config.train.max_tokens_per_micro_batch * fill(config, lengths)))
    built = own * (BUILT_SAMPLE_SECONDS + BUILT_TOKEN_SECONDS * lengths.sample)
    facts, row = samples * FACT_BYTES, 4 * (lengths.sample + lengths.response)
    seconds = {
        "read": own * (REQUEST_SECONDS + READ_TOKEN_SECONDS * lengths.response),
        "facts": _seconds(dp - 1, facts) + _broadcast(p.model_parallel_size, facts),
        "tokens": _seconds(dp - 1, own * row) + _broadcast(p.tp * p.cp * min(2, p.pp), own * row),
        "pack": samples * PLANNED_SAMPLE_SECONDS + micro_batches * BUILT_SECONDS + built,
        "agree": AGREEMENTS * _seconds(ceil(log2(world_size)), 0),
        "write": samples * (WRITTEN_SAMPLE_SECONDS + WRITTEN_TOKEN_SECONDS * lengths.response),
    }
    if routes:
        tokens, ranks = own * lengths.sample, p.model_parallel_size
        copies = 1 if p.sequence_parallel else p.tp
        seconds["read"] += tokens * routes * READ_ROUTE_SECONDS
        seconds["routes"] = tokens * (ROUTED_TOKEN_SECONDS + ROUTED_SECONDS * routes) + _seconds(
            dp - 1, tokens * routes
        )
        seconds["routes"] += _seconds(ranks - 1, copies * tokens * routes * (ranks - 1) / ranks)
    return seconds


def _seconds(messages: int, size: float) -> float:
    """Return the seconds of messages one after the other, of `size` bytes together."""
    return messages * GLOO_SECONDS + (size / (GLOO_GB_PER_S * 1e9) if messages else 0.0)


def _broadcast(ranks: int, size: float) -> float:
    """Return the seconds of a broadcast along a binary tree, which sends everything in each of its rounds."""
    rounds = ceil(log2(ranks))
    return _seconds(rounds, rounds * size)
