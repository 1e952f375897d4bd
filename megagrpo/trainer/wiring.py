"""Wiring: builds process groups, policy, vLLM servers and all other components from a config, and runs the `Trainer` made of them."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megagrpo import device
from megagrpo.algorithms.losses import make_loss
from megagrpo.bridge.adapters import fill_adapters
from megagrpo.bridge.families import adapter_blocks
from megagrpo.bridge.load import Checkpoint, load_hf
from megagrpo.bridge.merged import merged_blocks
from megagrpo.config import LOOPBACK, ConfigError, RolloutSection, RunConfig, save_resolved, weight_path
from megagrpo.data.prompts import PromptSource
from megagrpo.data.tokenizer import Tokenizer, load_tokenizer
from megagrpo.device import quiet
from megagrpo.engine.access import read_token
from megagrpo.engine.client import VllmEngine
from megagrpo.engine.http import MovedServers, check_urls, named_urls
from megagrpo.engine.probe import check_plugin
from megagrpo.engine.protocol import EngineError, EngineStartError
from megagrpo.engine.updates import Updates
from megagrpo.evaluation.sets import HeldOut, check_columns, load_sets
from megagrpo.families.config import HfConfig, architecture_differences, load_hf_config
from megagrpo.families.sources import resolve_model
from megagrpo.multi_turn.dialogues import make_dialogues
from megagrpo.parallel.agree import RankError, own_part, together
from megagrpo.parallel.layout import Layout, init_layout
from megagrpo.plan import plan
from megagrpo.policy.megatron_policy import MegatronPolicy, check_device
from megagrpo.policy.reference import Reference
from megagrpo.process.terminal import show, warn
from megagrpo.process.variables import TOKEN_VARIABLE
from megagrpo.records.checkpoint import Checkpointer, CheckpointError, checked, newest_checkpoint
from megagrpo.records.dump import StepDumps
from megagrpo.records.metrics import MetricsWriter, PhaseTimer
from megagrpo.records.run_lock import LOCK, RunFolderLost, RunLock
from megagrpo.rewards.scorer import RewardScorer
from megagrpo.rollout.ahead import AsyncPool
from megagrpo.rollout.collector import Collector, sampling_params
from megagrpo.servers.launcher import Launcher
from megagrpo.servers.restarts import Reconnector, Restarter
from megagrpo.servers.serving import engine_dtype, make_launcher, name_of, offloads, servers_sleep
from megagrpo.trainer.callbacks import CallbackError, Callbacks, load_callbacks
from megagrpo.trainer.offload import Offload
from megagrpo.trainer.stop_signals import stop_on_signals
from megagrpo.trainer.time_limit import OUT_OF_TIME, check_time_limit, end_of_run
from megagrpo.trainer.trainer import BrokenTraining, Trainer
from megagrpo.transfer.exchange import is_here
from megagrpo.transfer.manifest import WeightSyncError
from megagrpo.weight_sync.adapters import AdapterSync
from megagrpo.weight_sync.sync import NoOffload, WeightSync, make_transport
from megagrpo.weight_sync.transport import TrainerOffload

TO_BE_CONTINUED = 85  # exit code that asks the scheduler to restart the run


def main(config: RunConfig, config_path: Path) -> int:
    """Run a training and return the exit code: 0 at its end, 85 when it has saved and is to be restarted, 1 for an error.

    A run that a signal stopped for good returns 128 + the signal's number. Raises ConfigError (exit code 2) for errors that the user can
    fix in the config.
    """
    check_time_limit(config.run.time_limit)
    ends = end_of_run(config.run.time_limit, time.time())
    quiet()
    layout = None
    try:
        if config.run.deterministic:
            device.make_deterministic()
        _check_plan(config)
        if config.run.nodes == 1 and not config.rollout.urls and config.rollout.interface == LOOPBACK:
            os.environ["NCCL_SOCKET_IFNAME"] = LOOPBACK  # all ranks and servers are on this host
        layout = _layout(config)
        with ExitStack() as resources:
            trainer = build(config, config_path.parent, layout, resources)
            stop_on_signals(trainer.collector.stop)
            if layout.world_rank == 0:
                trainer.time_limit.ends = ends
            stopped_by = trainer.run()
        layout.barrier()  # Servers have stopped and logs are complete: a launcher may kill the other ranks when the first one exits.
        layout.close()
        return _exit_code(stopped_by)
    except ConfigError:
        raise
    except (RankError, EngineError, WeightSyncError, CheckpointError, BrokenTraining, CallbackError, RunFolderLost) as error:
        warn(f"rank {layout.world_rank} stops: {error}")
    except KeyboardInterrupt:
        warn("interrupted; the newest checkpoint is the last thing that was saved")
        return 128 + signal.SIGINT
    except Exception as error:
        warn(f"{''.join(traceback.format_exception(error))}\nrank {layout.world_rank if layout else '?'} failed: {error}")
    return 1


def build(config: RunConfig, base_folder: Path, layout: Layout, resources: ExitStack) -> Trainer:
    """Build every component of a run. Components to close are entered into `resources`.

    vLLM starts while Megatron loads, unless they share GPUs. Raises ConfigError for errors that the user can fix.
    """
    run_folder = Path(config.run.output_dir) / config.run.name
    first = layout.world_rank == 0
    with _problems_of_the_config():
        token, named = together(layout, lambda: _check_servers(config), here=first)[0]
        os.environ.pop(TOKEN_VARIABLE, None)  # reward functions must not see the token
        loss_fn = own_part(layout, lambda: make_loss(config))
        callbacks = Callbacks(config, layout, own_part(layout, lambda: load_callbacks(config), here=first))
        model_folder = resolve_model(config.model.path)
        hf_config = load_hf_config(model_folder)
        own_part(layout, lambda: check_device(config, hf_config))  # before weights are loaded or servers started
        together(layout, lambda: Checkpoint(model_folder).check_all(hf_config), here=first)
        lock = RunLock(run_folder)
        resources.callback(lock.release)
        resume_from = together(layout, lambda: prepare_run_folder(config, lock, os.environ.get("MEGAGRPO_JOB")), here=first)[0]
        tokenizer = load_tokenizer(config.model.tokenizer or model_folder, model_folder)
        reference_folder = _reference_folder(config, hf_config, tokenizer)
        dialogues = own_part(layout, lambda: make_dialogues(config, tokenizer, base_folder, resources), here=layout.is_dp_leader)
        tools, columns = together(layout, lambda: (dialogues.tools, dialogues.columns) if dialogues else ([], []), here=first)[0]
        prompts = PromptSource(config.data.train, config.data, tokenizer, config.rollout.max_prompt_length, config.run.seed, tools=tools)
        held_out = load_sets(config, tokenizer, tools, columns)
        rewards = own_part(layout, lambda: _rewards(config, base_folder, prompts.columns, held_out, resources), here=layout.is_dp_leader)

    dtype = device.resolve_precision(config.model.precision)
    writer = MetricsWriter(run_folder, config, restored_step=_step_of(resume_from)) if first else MetricsWriter.silent()
    resources.callback(writer.close)
    context = f" x cp {layout.cp_size}" if layout.cp_size > 1 else ""
    writer.message(
        f"{config.run.name}: {config.model.path} in {name_of(dtype)} on {layout.world_size} rank(s) "
        f"= tp {layout.tp_size}{context} x pp {layout.pp_size} x dp {layout.dp_size}"
    )
    writer.message(f"run folder: {run_folder}")
    launcher, moved = None, None if config.rollout.urls else MovedServers(run_folder / "moved_servers.json")
    if first and not config.rollout.urls:
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        with _problems_of_the_config():
            known = dict(num_ranks=ranks_here, token=token, moved=moved)
            launcher = make_launcher(config, model_folder, run_folder, engine_dtype(config), **known)
    if launcher is not None:
        resources.callback(launcher.stop)
    with _problems_of_the_config():
        own_part(layout, launcher.start if launcher else lambda: None, here=first)
        if servers_sleep(config):  # vLLM measures free GPU memory as it starts, and would count the trainer's allocations as its own
            own_part(layout, lambda: _start_asleep(config, launcher, writer.message), here=first)

    torch.manual_seed(config.run.seed)
    with _problems_of_the_config():
        policy = MegatronPolicy(config, layout, hf_config)
        reference = None
        if reference_folder is not None:
            own_part(layout, lambda: load_hf(policy.chunks, hf_config, reference_folder, layout))
            reference = Reference(policy)
        own_part(layout, lambda: load_hf(policy.chunks, hf_config, model_folder, layout))
        fill_adapters(policy.chunks, hf_config, layout, config.lora, config.run.seed)
    policy.weights_changed()
    if reference is None and config.algorithm.beta:
        reference = Reference(policy)

    wait = partial(launcher.wait, writer.message) if launcher else lambda: named
    urls, token = together(layout, lambda: (wait(), launcher.token if launcher else token), here=first)[0]
    logs = launcher.logs if launcher else []
    with _problems_of_the_config():
        transport, why = _transport(config, layout, urls)
    quantization = config.rollout.quantization
    quantized = f"; vLLM quantizes to {quantization}" if quantization != "none" else ""
    writer.message(f"weight sync: {transport} ({why}){quantized}")
    engine = None
    if layout.is_dp_leader:
        options = dict(lora=config.lora.syncs_adapters, sleeps=servers_sleep(config), refills=transport == "shared_memory")
        options["in_flight"] = config.rollout.in_flight if config.rollout.max_staleness else None
        engine = VllmEngine(urls, tokenizer.decode, logs=logs, token=token, moved=moved, **options, **_limits(config.rollout))
        if engine.sleeps:
            engine.fleet.begin_sleep()
    offload = Offload(policy, reference) if offloads(config) else NoOffload()
    with _problems_of_the_config():
        options = dict(transport=transport, say=writer.message, offload=offload)
        weight_sync = _weight_sync(config, engine if first else None, layout, engine_dtype(config), **options)
    resources.enter_context(weight_sync)
    if launcher is not None and launcher.max_restarts:
        resources.enter_context(Restarter(launcher, engine, weight_sync.load_last, writer.message))
    elif first and config.rollout.urls:
        resources.enter_context(Reconnector(engine, weight_sync.load_last, writer.message))
    pool = None
    if engine is not None and config.rollout.max_staleness:
        pool = resources.enter_context(AsyncPool(engine, rewards, config.rollout.max_staleness, config.rollout.straggler_seconds))
    checkpointer = Checkpointer(run_folder / "checkpoints", layout, policy, config.run.save_total_limit, model_folder, reference)
    timer = PhaseTimer()
    trainer = Trainer(
        config=config,
        layout=layout,
        policy=policy,
        reference=reference,
        loss_fn=loss_fn,
        prompts=prompts,
        held_out=held_out,
        collector=Collector(layout, dialogues.wrap(engine) if dialogues else engine, rewards, timer, pool),
        sampling=sampling_params(config.rollout, tokenizer.eos_token_ids),
        dtype=max(name_of(dtype), engine_dtype(config), key=("float32", "bfloat16").index),
        engine_sleeps=servers_sleep(config),
        offload=offload,
        weights=partial(adapter_blocks if config.lora.syncs_adapters else merged_blocks, policy.chunks, hf_config, layout),
        weight_sync=weight_sync,
        checkpointer=checkpointer,
        writer=writer,
        dumps=StepDumps(config, policy, run_folder / "dumps", model_folder, writer.message, reference, reference_folder),
        timer=timer,
        run_folder_check=lock.check if first else lambda: None,
        callbacks=callbacks,
    )
    if resume_from is not None:
        trainer.restore(resume_from)
    return trainer


def _exit_code(stopped_by: int) -> int:
    """Return the exit code for a stop. The time limit, or SIGTERM to a job that its scheduler restarts, gives TO_BE_CONTINUED."""
    if stopped_by == OUT_OF_TIME or (stopped_by == signal.SIGTERM and "MEGAGRPO_JOB" in os.environ):
        return TO_BE_CONTINUED
    return 128 + stopped_by if stopped_by else 0


def prepare_run_folder(config: RunConfig, lock: RunLock, job: str | None = None) -> Path | None:
    """Create and lock the run's folder and write `resolved.yaml`. Returns the checkpoint to resume from, None for a fresh start.

    A run that the same `job` began is continued, or started again when it has saved nothing yet. Raises ValueError when another process
    uses the folder, when the checkpoint to resume from is missing or damaged, or when a fresh start would mix with an earlier run.
    """
    lock.take()
    folder = lock.folder
    checkpoint = newest_checkpoint(folder / "checkpoints")
    begun_by = folder / "job"
    ours = job is not None and begun_by.exists() and begun_by.read_text() == job
    resume = checkpoint is not None if ours else config.run.resume
    if resume and checkpoint is None:
        raise ValueError(f"run.resume: {folder} holds no complete checkpoint; start it without --resume")
    if resume:
        try:
            checked(checkpoint)
        except CheckpointError as error:
            raise ValueError(f"run.resume: {error}") from None
    if not resume and (checkpoint is not None or _has_text(folder / "metrics.jsonl")):
        if not config.run.overwrite and not ours:
            raise ValueError(
                f"run.name: {folder} holds an earlier run; continue it with --resume, pick another name, or set run.overwrite=true"
            )
        aside = next(p for p in (folder.with_name(f"{folder.name}.{i}") for i in range(1, 10_000)) if not p.exists())
        shutil.move(folder, aside)
        show(f"the earlier run in {folder} was moved to {aside}" + (" (run.overwrite)" if config.run.overwrite else ""))
        (aside / LOCK).unlink(missing_ok=True)
        lock.take()
    save_resolved(config, folder)
    if job is not None:
        begun_by.write_text(job)
    return checkpoint if resume else None


def _has_text(file: Path) -> bool:
    return file.exists() and file.stat().st_size > 0


def _layout(config: RunConfig) -> Layout:
    try:
        return init_layout(config.parallel, config.run.seed)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _check_plan(config: RunConfig) -> None:
    problems = plan(config, int(os.environ.get("WORLD_SIZE", "1")), device.gpu_memory_gb(), device.host_memory_gb()).problems
    if problems:
        raise ConfigError("\n".join(map(str, problems)))


class _problems_of_the_config:
    """Convert errors raised inside to ConfigError, because the user can fix their cause. A RankError repeats another rank's error."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (ValueError, RankError, EngineStartError)):
            raise ConfigError(str(error)) from error


def _reference_folder(config: RunConfig, model: HfConfig, tokenizer: Tokenizer) -> Path | None:
    """Return the folder of `model.reference_path`, or None. Raises ValueError when its architecture or vocabulary is not the policy's."""
    if config.model.reference_path is None:
        return None
    folder = resolve_model(config.model.reference_path, "model.reference_path")
    different = architecture_differences(model, load_hf_config(folder))
    if not different and (folder / "tokenizer_config.json").exists():
        pairs = zip(tokenizer.pieces(), load_tokenizer(folder).pieces(), strict=False)
        different = [f"token {i}: {one!r}, {other!r}" for i, (one, other) in enumerate(pairs) if one != other][:1]
    if different:
        raise ValueError(
            f"model.reference_path: {folder} differs from the policy in architecture or vocabulary (policy, reference): "
            f"{'; '.join(different)}. Name weights that match, or leave it empty to use the policy's initial weights"
        )
    return folder


def _rewards(config: RunConfig, base_folder: Path, columns: list[str], held_out: list[HeldOut], resources: ExitStack) -> RewardScorer:
    scorer = resources.enter_context(RewardScorer(config.rewards, config.rollout.max_completion_length, base_folder))
    scorer.check_columns(columns)
    check_columns(held_out, scorer)
    return scorer


def _start_asleep(config: RunConfig, launcher: Launcher, say: Callable[[str], None]) -> None:
    """Wait for the servers, then put them to sleep until the first sync: a trainer that loads needs the GPU memory."""
    options = dict(logs=launcher.logs, token=launcher.token, sleeps=True, lora=config.lora.syncs_adapters)
    Updates(launcher.wait(say), **options, sync_timeout=config.rollout.weight_sync_timeout).sleep()


def _limits(rollout: RolloutSection) -> dict[str, Any]:
    """Return the engine's limits: concurrent sequences and timeouts. A restarting server gets as much time as a starting one."""
    patience = rollout.startup_timeout if rollout.max_restarts else 0.0
    if rollout.urls:
        patience = rollout.reconnect_timeout
    timeouts = dict(request_timeout=rollout.request_timeout, sync_timeout=rollout.weight_sync_timeout)
    urls_file = rollout.urls_file and Path(rollout.urls_file)
    return dict(max_num_seqs=rollout.max_num_seqs, patience=patience, urls_file=urls_file, **timeouts)


def _check_servers(config: RunConfig) -> tuple[str | None, list[str]]:
    """Check the servers of `rollout.urls`, or of the file that replaces it, and return their token and URLs. Raises ValueError when a
    server does not respond or cannot take weights."""
    token = read_token(config.rollout.token_file)
    urls = named_urls(config.rollout.urls, config.rollout.urls_file)
    check_urls(urls)
    if not config.lora.syncs_adapters:
        check_plugin(urls, token, config.rollout.quantization)
    return token, urls


def _transport(config: RunConfig, layout: Layout, urls: Sequence[str]) -> tuple[str, str]:
    """Choose how weights get to all `urls`. Returns the transport and the reason for the choice. Raises ValueError when ranks on other
    hosts cannot reach the run's servers. Collective."""
    hosts = layout.all_gather_objects((socket.gethostname(), all(map(is_here, urls))))
    names = sorted({name for name, _ in hosts})
    if len(names) > 1 and not config.rollout.urls and config.rollout.interface == LOOPBACK:
        raise ValueError(
            f"rollout.urls: ranks are on {', '.join(names)}, and servers started by this run answer on the first rank's host only; name an "
            "interface that all hosts reach (rollout.interface), or servers that run already"
        )
    return weight_path(config, device.has_gpu(), one_host=len(names) == 1 and all(here for _, here in hosts))


def _weight_sync(
    config: RunConfig,
    engine: VllmEngine | None,
    layout: Layout,
    dtype: str,
    transport: str,
    say: Callable[[str], None],
    offload: TrainerOffload | None = None,
) -> WeightSync:
    """Build the run's weight sync over `transport`."""
    if config.lora.syncs_adapters:
        return AdapterSync(engine, layout, dtype, config.lora, config.model.path, offload)
    limits = dict(seconds=config.rollout.weight_sync_timeout, megabytes=config.rollout.weight_sync_bucket_megabytes)
    return WeightSync(engine, layout, dtype, make_transport(transport, layout, dtype, device.device(), **limits), say, offload)


def _step_of(checkpoint: Path | None) -> int:
    return 0 if checkpoint is None else int(checkpoint.name.removeprefix("step_"))
