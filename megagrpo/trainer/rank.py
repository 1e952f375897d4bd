"""One rank of a training run: its trainer, and its exit code, as `megagrpo train --help` lists them."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from megagrpo.config import ConfigError, RunConfig
from megagrpo.engine.http.protocol import EngineError
from megagrpo.loopback import LOOPBACK
from megagrpo.planner.rules.plan_problems import require
from megagrpo.platform import device
from megagrpo.platform.device import quiet
from megagrpo.platform.parallel.agree import RankError
from megagrpo.platform.parallel.layout import Layout, init_layout
from megagrpo.platform.process.terminal import OutputError, set_log_level, warn
from megagrpo.platform.process.variables import ENVIRONMENT, number
from megagrpo.records.checkpoints.checkpoint import CheckpointError
from megagrpo.records.checkpoints.run_lock import RunFolderLost
from megagrpo.trainer.alarms import BrokenTraining
from megagrpo.trainer.callbacks import CallbackError
from megagrpo.trainer.engine_side import as_config_errors
from megagrpo.trainer.loop import Loop
from megagrpo.trainer.saving.time_limit import OUT_OF_TIME, TO_BE_CONTINUED, end_of_run
from megagrpo.types import WeightSyncError

Build = Callable[[RunConfig, Path, Layout, ExitStack], Loop]


@dataclass
class Ending:
    """How a rank ended: `stopped_by` is from `Trainer.run`, `code` the exit code. `name` names the rank in messages."""

    name: str = "rank ?"
    stopped_by: int = 0
    code: int = 1


@contextmanager
def exit_code() -> Iterator[Ending]:
    """Context manager: yields the Ending, sets its exit code, prints errors. ConfigError and OutputError propagate."""
    ending = Ending()
    try:
        yield ending
        ending.code = _exit_code(ending.stopped_by)
    except (ConfigError, OutputError):
        raise
    except (
        RankError,
        EngineError,
        WeightSyncError,
        CheckpointError,
        BrokenTraining,
        CallbackError,
        RunFolderLost,
    ) as error:
        warn(f"{ending.name} stops: {error}")
    except KeyboardInterrupt:
        warn("interrupted; the newest checkpoint is the last thing that was saved")
        ending.code = 128 + signal.SIGINT
    except Exception as error:
        warn(f"{''.join(traceback.format_exception(error))}\n{ending.name} failed: {error}")


@contextmanager
def make_trainer(config: RunConfig, base_folder: Path, ending: Ending, build: Build) -> Iterator[Loop]:
    """Context manager: builds this rank's trainer, with the `build` of the method, and closes what it uses.
    `base_folder` is the config file's folder.

    Raises ConfigError for errors that the user can fix in the config.
    """
    set_log_level(config.run.log_level)
    end = end_of_run(config.run.time_limit)
    quiet()
    if config.run.deterministic:
        device.make_deterministic()
    require(config, number("WORLD_SIZE", 1), device.gpu_memory_gb(), device.host_memory_gb())
    if config.run.nodes == 1 and not config.rollout.urls and config.rollout.interface == LOOPBACK:
        ENVIRONMENT["NCCL_SOCKET_IFNAME"] = LOOPBACK  # all ranks and servers are on this host
    with as_config_errors():
        layout = init_layout(config.parallel, config.run.seed)
    ending.name = f"rank {layout.world_rank}"
    with ExitStack() as resources:
        trainer = build(config, base_folder, layout, resources)
        stop_on_signals(trainer.lifecycle.saves.collector.stop)
        if layout.world_rank == 0:
            trainer.lifecycle.saves.time_limit.end = end
        yield trainer
    # Servers have stopped and logs are complete: a launcher may kill the other ranks when the first one exits.
    layout.barrier()
    layout.close()


def _exit_code(stopped_by: int) -> int:
    """Return the exit code. The time limit, or SIGTERM to a job that its scheduler restarts, gives TO_BE_CONTINUED."""
    if stopped_by == OUT_OF_TIME or (stopped_by == signal.SIGTERM and "MEGAGRPO_JOB" in ENVIRONMENT):
        return TO_BE_CONTINUED
    return 128 + stopped_by if stopped_by else 0


FORCE_SECONDS = 20.0  # after the second Ctrl-C; stopping vLLM servers takes up to 15 s of this time


def stop_on_signals(stop: Callable[[int], None]) -> None:
    """Install handlers that call `stop(number)` at the first SIGINT or SIGTERM. A second SIGINT raises
    KeyboardInterrupt in the main thread.

    A process that has not ended `FORCE_SECONDS` after the second SIGINT exits with code 130. A separate thread enforces
    this: Python runs signal handlers only in the main thread, and not while that thread waits inside a library. Call
    this from the main thread.
    """
    signals: list[int] = []

    def ask(number: int, frame: object) -> None:
        signals.append(number)
        if number != signal.SIGINT or len(signals) == 1:
            stop(number)
            return
        try:
            # KeyboardInterrupt inside an event loop's own code can lose a wake-up; asyncio.run would then wait forever.
            asyncio.get_running_loop().call_soon_threadsafe(_interrupt)
        except RuntimeError:  # no event loop runs in the main thread
            _interrupt()

    signal.signal(signal.SIGINT, ask)
    signal.signal(signal.SIGTERM, ask)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # writes the number of each signal to the pipe at once
    threading.Thread(target=_end_after_two, args=(reader,), name="second-ctrl-c", daemon=True).start()


def _interrupt() -> None:
    raise KeyboardInterrupt


def _end_after_two(reader: int) -> None:
    seen = b""
    while signal.SIGINT not in seen[1:]:
        seen += os.read(reader, 64)
    time.sleep(FORCE_SECONDS)
    os._exit(128 + signal.SIGINT)
