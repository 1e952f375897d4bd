"""Wiring: builds the `Trainer` of a run from its config. `make_` functions build its parts, most in the part's file."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path

from megagrpo.algorithms.losses import make_loss
from megagrpo.config import RunConfig
from megagrpo.data.sources.task_mixture import Mixture
from megagrpo.engine.client import VllmEngine
from megagrpo.engine.servers.serving import offloads
from megagrpo.environments.own_judges import own_judges
from megagrpo.environments.task_engine import generator_of
from megagrpo.platform.parallel.layout import Layout
from megagrpo.policy.moe.routing_replay import route_shape
from megagrpo.policy.optimizer.policy_optimizer import apex_note
from megagrpo.records.rows.kept_rollouts import ROLLOUTS, KeptFiles
from megagrpo.train_types import TrainState
from megagrpo.trainer.alarms import make_alarms
from megagrpo.trainer.engine_side import as_config_errors, connect, start_servers
from megagrpo.trainer.gpu.gpu_sharing import GpuTurns
from megagrpo.trainer.gpu.state_offload import NoOffload, Offload
from megagrpo.trainer.lifecycle import make_evaluations, make_lifecycle, make_saves
from megagrpo.trainer.policy_update import Learning, load_critic, load_policy
from megagrpo.trainer.recording import Journal, make_records, open_journal
from megagrpo.trainer.rollout.async_rollouts import AsyncPool
from megagrpo.trainer.rollout.collector import Collector
from megagrpo.trainer.rollout.groups import Rollouts
from megagrpo.trainer.rollout.scored_groups import last_step, open_kept
from megagrpo.trainer.rollout.sourced_prompts import SourcedPrompts
from megagrpo.trainer.run_inputs import Inputs, read_inputs
from megagrpo.trainer.syncing import Syncing
from megagrpo.trainer.teachers import load_teachers
from megagrpo.trainer.trainer import Trainer
from megagrpo.weights.blocks.parameter_blocks import blocks


def build(config: RunConfig, base_folder: Path, layout: Layout, resources: ExitStack) -> Trainer:
    """Build every component of a run. Components to close are entered into `resources`.

    vLLM starts while Megatron loads, unless they share GPUs. Raises ConfigError for errors that the user can fix.
    """
    with as_config_errors():
        inputs = read_inputs(config, base_folder, layout, resources, make_loss)
    config, data, model, folder, state = inputs.config, inputs.data, inputs.model, inputs.folder, TrainState()
    journal = open_journal(inputs, layout, resources)
    say, phases, progress = journal.writer.message, journal.phases, journal.progress
    servers = start_servers(config, model.folder, folder.path, layout, inputs.servers, progress, say, resources)
    policy, reference = load_policy(config, layout, model, data.sampling, progress)
    with as_config_errors():
        teachers = load_teachers(config, model.teachers, (policy, reference), progress)
    critic = load_critic(config, layout, model, progress) if config.algorithm.has_critic else None
    if note := apex_note(policy.optimizer):
        say(note)
    routes = route_shape(model.hf_config) if config.rollout.routing_replay == "engine" else None
    base = partial(blocks, policy.chunks, model.hf_config, layout)
    engine, weight_sync = connect(servers, config, layout, data.tokenizer, routes, base, say, resources)
    if engine is not None:
        journal.writer.follow(engine)
    with as_config_errors():
        rollouts = make_rollouts(inputs, engine, layout, state, journal, resources)
    collector = rollouts.collector
    offloaded = config.generates and offloads(config.rollout, config.train.offload)
    offload = Offload(policy, reference, teachers, critic) if offloaded else NoOffload()
    rank_0_engine = engine if layout.world_rank == 0 else None
    turns = GpuTurns(layout, rank_0_engine, servers.sleep, offload, collector.stop_if_requested, phases)
    records = make_records(config, journal, model, policy, reference, collector.pool, critic)
    alarms = make_alarms(config, state, policy, servers.dtype, collector.reward_tracebacks, say)
    counted = records.recorders, phases, alarms.count_skip
    learning = Learning(config, policy, reference, inputs.loss_fn, state, *counted, teachers, critic)
    syncing = Syncing(weight_sync, learning.weights, state, collector, turns, phases, say)
    saves = make_saves(inputs, policy, reference, critic, state, collector, turns, journal.writer)
    evaluations = make_evaluations(inputs, rollouts, turns, records, saves)
    lifecycle = make_lifecycle(inputs, layout, evaluations, alarms, last_step(config, layout))
    if folder.resume_from is not None:
        saves.restore(folder.resume_from, inputs.data_change)
    return Trainer(config, state, turns, rollouts, learning, syncing, records, lifecycle)


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
    generator = generator_of(engine, data.dialogues) if engine else None
    if engine is not None and data.rewards is not None and data.tokenizer is not None:
        of_texts = data.tokenizer, config.data.chat_template, data.sampling.stop_token_ids, config.longest_sequence
        resources.enter_context(own_judges(engine, data.rewards, config.all_rewards.own_judges, *of_texts))
    if generator is not None and data.rewards is not None and rollout.max_staleness:
        pool = AsyncPool(generator, data.rewards, rollout.max_staleness, rollout.straggler_seconds)
        resources.enter_context(pool)
    ahead, algorithm = rollout.max_staleness > 0, config.algorithm
    kept = None if config.generates else open_kept(config, data.prompts, data.rewards, data.tokenizer, layout)
    collector = Collector(layout, generator, data.rewards, journal.phases, pool, kept, ahead, algorithm)
    folder, limit, keeps = inputs.folder, config.run.keep_rollouts_gb * 1e9, None
    if config.generates and limit and layout.is_dp_leader:
        replica = layout.dp_rank, layout.dp_size
        keeps = KeptFiles(folder.path / ROLLOUTS, replica, folder.restored_step, limit, journal.writer.message)
        resources.callback(keeps.close)
    orders = data.prompts.orders if isinstance(data.prompts, Mixture) else [data.prompts]
    pairs = zip(config.each_task, orders, strict=True)
    sources = {task.name: order for task, order in pairs if isinstance(order, SourcedPrompts)}
    return Rollouts(config, data.prompts, collector, data.sampling, state, journal.writer.message, sources, keeps)
