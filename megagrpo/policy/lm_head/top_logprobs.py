"""The largest log-probs of a vocabulary-sharded LM head, exact over the whole vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from megagrpo.policy.lm_head.task import HeadTask
from megagrpo.policy.lm_head.vocab_shard import Softmax, chunks
from megagrpo.train_types import TopLogprobs


@torch.no_grad()
def top_logprobs(hidden: Tensor, weight: Tensor, k: int, task: HeadTask) -> TopLogprobs:
    """Return the k largest log-probs [N, k] of each token and their ids [N, k], largest first, of softmax(logits /
    temperature) over the whole vocabulary.

    `hidden` [N, H] and the head `weight` [V/tp, H] are as in `vocab_logprobs`; `task.truncation` and `task.fused` do
    not apply. All ranks of `task.group` get the same result. Each rank sends k logits and k ids per token. The order of
    equal log-probs is arbitrary. Raises ValueError for a k below 1 or above the vocabulary's size.
    """
    shard = task.shard(weight)
    if not 0 < k <= shard.full_vocab_size(weight, task.vocab_size):
        raise ValueError(f"k: {k} is not between 1 and the number of tokens in the vocabulary")
    memory = shard.logits_buffer(hidden, task.chunk)
    logprobs = torch.empty(hidden.shape[0], k, dtype=memory.dtype, device=hidden.device)
    token_ids = torch.empty(hidden.shape[0], k, dtype=torch.int64, device=hidden.device)
    for rows in chunks(hidden.shape[0], task.chunk):
        temperature = task.temperature_of(rows)
        if task.processors is None:
            logits = shard.logits(hidden[rows], weight, temperature, task.logit_cap, memory)
        else:
            logits = shard.logits(hidden[rows], weight, 1.0, task.logit_cap, memory)
            task.processors.apply(logits, rows, shard, None)
            logits.div_(temperature)
        normaliser = Softmax.of(logits, task.labels[rows], shard).log_normaliser
        largest, token_ids[rows] = shard.topk(logits, k)
        logprobs[rows] = largest - normaliser[:, None]
    return TopLogprobs(logprobs, token_ids)
