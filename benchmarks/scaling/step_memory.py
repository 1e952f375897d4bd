"""Predicts the host memory that the samples of a step take on a rank, beside Python, libraries and the model."""

from __future__ import annotations

from math import ceil

from megagrpo.config import RunConfig
from megagrpo.planner.costs.gpu_specs import GPUS_PER_NODE
from megagrpo.planner.costs.workload import Lengths, step_samples

ROLLOUT_BYTES = 830  # of the objects of a scored rollout without its arrays and text
BODY_TOKEN_BYTES, DECODED_TOKEN_BYTES = 97, 140  # of a response's JSON, and of its entries while they are read
RESPONSES_READ_AT_ONCE = 2  # responses that a leader reads at once
SAMPLE_BYTES = 300  # of facts, prompts and plans of a sample, on every rank
ROW_TOKEN_BYTES = 8  # of a `Rollout`: int32 and float32
TEXT_TOKEN_BYTES = 4  # of a response as text
TRAVEL_BYTES = 4  # of a token id, and of a log-prob, while they travel
SAMPLE_TOKEN_BYTES = 13  # of a `TrainSample`: int64, bool, float32
BATCH_TOKEN_BYTES = 57  # of a `RankBatch`: six rows of int64, two of float32, one of bool


ROUTE_ROUND_BYTES = 2**28  # of routes that a leader sends to others at once


def planned_step_memory(
    config: RunConfig, world_size: int, lengths: Lengths, routes: int = 0
) -> dict[str, dict[str, float]]:
    """Return the peak of a step's samples in host memory, as bytes by part: of a `leader`, which samples for its
    replica, of another `rank`, and of the fullest `node`.

    A leader keeps what it sampled until it is written: arrays of 8 bytes a token, texts, and `routes` bytes a token.
    Every rank keeps the facts of all samples, and the rows and samples of its replica until they are micro-batches. It
    keeps the routes of its own tokens and layers. The peak is then, or while responses are read.
    """
    p, r, samples = config.parallel, config.rollout, step_samples(config)
    dp = max(1, world_size // p.model_parallel_size)
    own = ceil(samples / dp)
    sampled = own * (1 + r.max_staleness)  # those of the next steps wait in the pool
    kept = {
        "facts": samples * SAMPLE_BYTES,
        "rollouts": sampled * (ROLLOUT_BYTES + lengths.response * ROW_TOKEN_BYTES),
        "texts": sampled * lengths.response * TEXT_TOKEN_BYTES,
    }
    # responses of equal length end together, and wait to be read
    slots = ceil((len(r.urls) or r.servers) * r.dp * r.max_num_seqs / dp)
    bodies = min(own, slots) if lengths.response >= lengths.longest else RESPONSES_READ_AT_ONCE
    read = RESPONSES_READ_AT_ONCE * DECODED_TOKEN_BYTES + bodies * BODY_TOKEN_BYTES
    row = own * TRAVEL_BYTES * (lengths.sample + lengths.response)  # freed, but malloc keeps it
    tokens = own * lengths.sample
    trained = {"rows": row, "samples": tokens * SAMPLE_TOKEN_BYTES, "micro_batches": tokens * BATCH_TOKEN_BYTES}
    json = read * lengths.longest
    if routes:
        kept["rollouts"] += sampled * lengths.sample * routes
        trained["routes"] = tokens * routes / (p.pp * p.cp * (p.tp if p.sequence_parallel else 1))
        # in base64; those that are read also as bytes and as an array
        json += (bodies * 4 / 3 + 2 * RESPONSES_READ_AT_ONCE) * routes * (lengths.prompt + lengths.longest)
    training, reading = kept | trained | {"rows": 2 * row}, kept | {"json": json}
    training["rows"] += 2 * min(routes * tokens, ROUTE_ROUND_BYTES)  # sent and received
    leader = max(training, reading, key=lambda parts: sum(parts.values()))
    rank = {"facts": kept["facts"]} | trained
    leaders = min(dp, max(1, GPUS_PER_NODE // (p.tp * p.cp)))
    others = min(world_size, GPUS_PER_NODE) - leaders
    node = {part: leaders * leader.get(part, 0.0) + others * rank.get(part, 0.0) for part in leader | rank}
    return {"leader": leader, "rank": rank, "node": node}
