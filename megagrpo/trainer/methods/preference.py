"""Preference optimization on pairs of responses: DPO and the other rows of `algorithms/preference_losses.py`.

A pair is packed with one copy of its prompt, into one micro-batch. KTO's pair is a response with a label, and the
response of another row, whose ratio estimates the KL. The reference is the frozen start of the policy, or
the model below its adapters.
"""

from __future__ import annotations

from megagrpo.algorithms.preference_losses import make_loss
from megagrpo.config import RunConfig
from megagrpo.data.examples import LABELED, PREFERENCES
from megagrpo.trainer.methods.row_wiring import Method


def method(config: RunConfig) -> Method:
    """Return what this method differs in."""
    return Method(make_loss, LABELED if config.algorithm.loss_type == "kto" else PREFERENCES)
