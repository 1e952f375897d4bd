"""The generating part of a step: prompts, the engine of this rank's replica, and their rewards."""

from __future__ import annotations

from contextlib import ExitStack

from megagrpo.engine.client import VllmEngine
from megagrpo.platform.parallel.layout import Layout
from megagrpo.trainer.recording import Journal
from megagrpo.trainer.rollout.async_rollouts import AsyncPool
from megagrpo.trainer.rollout.collector import Collector, sampling_params
from megagrpo.trainer.rollout.groups import Rollouts
from megagrpo.trainer.run_inputs import Inputs
from megagrpo.types import TrainState


def make_rollouts(
    inputs: Inputs,
    engine: VllmEngine | None,
    layout: Layout,
    state: TrainState,
    journal: Journal,
    resources: ExitStack,
) -> Rollouts:
    """Return what draws the rollouts of each step: on demand, as conversations, or ahead with
    `rollout.max_staleness`."""
    config, data, pool = inputs.config, inputs.data, None
    rollout = config.rollout
    if engine is not None and data.rewards is not None and rollout.max_staleness:
        pool = AsyncPool(engine, data.rewards, rollout.max_staleness, rollout.straggler_seconds)
        resources.enter_context(pool)
    generator = data.dialogues.wrap(engine) if data.dialogues and engine else engine
    collector = Collector(layout, generator, data.rewards, journal.phases, pool)
    sampling = sampling_params(rollout, data.tokenizer.eos_token_ids)
    return Rollouts(config, data.prompts, collector, sampling, state, journal.writer.message)
