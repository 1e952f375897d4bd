"""Preference optimization on pairs of responses: DPO and the other rows of `algorithms/preference_losses.py`.

A pair is packed with one copy of its prompt, into one micro-batch. KTO's pair is a response with a label, and the
response of another row, whose ratio estimates the KL. The reference is the frozen start of the policy, or
the model below its adapters.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from megagrpo.algorithms.preference_losses import make_loss
from megagrpo.config import RunConfig
from megagrpo.data.examples import LABELED, PREFERENCES
from megagrpo.platform.parallel.layout import Layout
from megagrpo.trainer.methods.row_loop import RowLoop
from megagrpo.trainer.methods.row_wiring import Method, build_rows


def build(config: RunConfig, base_folder: Path, layout: Layout, resources: ExitStack) -> RowLoop:
    """Build the training loop; see `build_rows`."""
    rows = LABELED if config.algorithm.loss_type == "kto" else PREFERENCES
    return build_rows(Method(make_loss, rows), config, base_folder, layout, resources)
