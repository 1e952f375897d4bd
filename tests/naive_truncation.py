"""Naive sampling filters (top-k, top-p, min-p): sort the whole distribution in float64."""

from __future__ import annotations

from torch import Tensor

from megagrpo.types import Truncation


def truncated_log_softmax(logits: Tensor, labels: Tensor, rules: Truncation) -> Tensor:
    """[n, V] log-probs of logits [n, V] over the tokens that the rules keep, and the labels [n]; minus infinity for the
    others."""
    kept = logits.double().softmax(-1)
    kept = kept.where(kept >= rules.min_p * kept.amax(-1, keepdim=True), 0.0)
    if rules.top_k:
        last = min(rules.top_k, kept.shape[-1]) - 1
        kept = kept.where(kept >= kept.sort(-1, descending=True).values[:, last, None], 0.0)
    ordered, order = (kept / kept.sum(-1, keepdim=True)).sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    if rules.top_p < 1:
        kept = kept.where((before < rules.top_p).gather(1, order.argsort(-1)), 0.0)
    chosen = (kept > 0).scatter(1, labels[:, None], True)
    return logits.double().masked_fill(~chosen, float("-inf")).log_softmax(-1)
