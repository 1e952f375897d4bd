"""Output of a run's metrics: JSONL files, TensorBoard, optionally Weights & Biases, and the console.

`metrics.jsonl` and `completions.jsonl` are the source of truth; all other output can be rebuilt from them. A sink that fails is reported
once and never stops training.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from megagrpo.config import RunConfig
from megagrpo.process.terminal import warn
from megagrpo.records.console import ConsoleSink
from megagrpo.types import Metric, ScoredRollout

_OVER_UPDATES: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "max": max,
    "min": min,
    "last": lambda values: values[-1],
}


def values_of(metrics: dict[str, Metric]) -> dict[str, float]:
    """Return the metrics as numbers."""
    return {name: metric.value for name, metric in metrics.items()}


def over_updates(updates: Sequence[dict[str, Metric]]) -> dict[str, float]:
    """Combine the metrics of a step's optimizer steps, each as its `reduce` says, over those that report it."""
    by_name: dict[str, list[Metric]] = {}
    for update in updates:
        for name, metric in update.items():
            by_name.setdefault(name, []).append(metric)
    return {name: _OVER_UPDATES[metrics[0].reduce]([metric.value for metric in metrics]) for name, metrics in by_name.items()}


def idle_shares(times: dict[str, float]) -> dict[str, float]:
    """Return the shares of a step in which the trainer waits for responses and rewards, and in which the servers do not generate. Valid for
    synchronous runs, where the two take turns."""
    step, generating = times["time/step"], times.get("time/generate", 0.0)
    return {"idle/trainer": (generating + times.get("time/reward", 0.0)) / step, "idle/servers": 1 - generating / step}


class Sink(Protocol):
    """One output of metrics. Any method may raise; the writer catches the error."""

    def step(self, step: int, metrics: dict[str, float]) -> None: ...

    def completions(self, step: int, scored: Sequence[ScoredRollout], advantages: Sequence[float]) -> None: ...

    def evaluation(self, step: int, metrics: dict[str, float]) -> None: ...

    def message(self, text: str) -> None: ...

    def close(self) -> None: ...


class MetricsWriter:
    """Passes every call to each sink. A sink that raises is reported once on stderr. A file is tried again at the next call, a service is
    dropped."""

    def __init__(self, run_folder: str | Path, config: RunConfig, restored_step: int = 0):
        """A resumed run continues after `restored_step`: lines of later steps are removed, because these steps are repeated."""
        folder = Path(run_folder)
        self._sinks: dict[str, Sink] = {}
        self._failed: set[str] = set()
        self._add("console", lambda: ConsoleSink(config))
        self._add("metrics.jsonl and completions.jsonl", lambda: JsonlSink(folder, restored_step))
        if config.run.tensorboard:
            self._add("TensorBoard", lambda: TensorBoardSink(folder / "tensorboard", restored_step))
        if config.run.wandb != "off":
            self._add("wandb", lambda: WandbSink(folder, config))

    @classmethod
    def silent(cls) -> MetricsWriter:
        """Return a writer without sinks, for ranks that do not report."""
        writer = cls.__new__(cls)
        writer._sinks, writer._failed = {}, set()
        return writer

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of one finished training step."""
        self._each("step", step, metrics)

    def completions(self, step: int, scored: Sequence[ScoredRollout], advantages: Sequence[float]) -> None:
        """Write every rollout of one step, with its rewards and its advantage."""
        self._each("completions", step, scored, advantages)

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of the held-out prompts after `step` steps, under `eval/`."""
        named = {name if name.startswith("eval/") else f"eval/{name}": value for name, value in metrics.items()}
        self._each("evaluation", step, named)

    def message(self, text: str) -> None:
        """Write a line for the user."""
        self._each("message", text)

    def close(self) -> None:
        """Flush and close every sink."""
        self._each("close")
        self._sinks = {}

    def _add(self, name: str, make: Any) -> None:
        try:
            self._sinks[name] = make()
        except Exception as error:
            self._warn(name, error)

    def _each(self, method: str, *arguments: Any) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                getattr(sink, method)(*arguments)
            except Exception as error:
                self._warn(name, error)
                if not isinstance(error, OSError):
                    del self._sinks[name]

    def _warn(self, name: str, error: Exception) -> None:
        if name in self._failed:
            return
        self._failed.add(name)
        try:
            warn(f"warning: {name} failed and may be incomplete; training continues. {type(error).__name__}: {error}")
        except OSError:
            pass  # stderr is closed


class JsonlSink:
    """Writes `metrics.jsonl`, one line per step or evaluation, and `completions.jsonl`, one line per rollout.

    Each call returns after its lines were passed to the kernel.
    """

    def __init__(self, folder: Path, restored_step: int):
        folder.mkdir(parents=True, exist_ok=True)
        self._metrics = JsonlFile(folder / "metrics.jsonl", restored_step)
        self._completions = JsonlFile(folder / "completions.jsonl", restored_step)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self._metrics.append([{"step": step, "wall_time": round(time.time(), 3), **metrics}])

    evaluation = step

    def completions(self, step: int, scored: Sequence[ScoredRollout], advantages: Sequence[float]) -> None:
        self._completions.append([_completion(step, s, a) for s, a in zip(scored, advantages, strict=True)])

    def message(self, text: str) -> None:
        pass

    def close(self) -> None:
        self._metrics.close()
        self._completions.close()


def _completion(step: int, scored: ScoredRollout, advantage: float) -> dict[str, Any]:
    rollout = scored.rollout
    later = {"later_versions": rollout.later_versions} if rollout.later_versions else {}
    dialogue = {} if rollout.dialogue is None else {"dialogue": rollout.dialogue.record()}
    return {
        "step": step,
        "prompt_id": rollout.prompt.prompt_id,
        "prompt": rollout.prompt.messages,
        "completion": rollout.text,
        "num_tokens": rollout.length,
        "finish_reason": rollout.finish_reason,
        "reward": scored.reward,
        "rewards": scored.rewards,
        "advantage": advantage,
        "weight_version": rollout.weight_version,
        **later,
        **dialogue,
    }


class JsonlFile:
    """Appends JSON lines to a file. A line is whole or, when the disk is full, broken and alone on its line. NaN and infinity become
    null."""

    def __init__(self, path: Path, last_step: int):
        """Open the file. Lines of steps after `last_step`, and a line that a kill truncated, are removed from an existing file."""
        if path.exists():
            self._drop_after(path, last_step)
        self._file = open(path, "ab", buffering=0)
        self._broken_line = False

    @staticmethod
    def _drop_after(path: Path, last_step: int) -> None:
        rewritten = path.with_suffix(".rewriting")
        with open(path, "rb") as lines, open(rewritten, "wb") as file:
            file.writelines(line for line in lines if _step_of(line) <= last_step)
        os.replace(rewritten, path)

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        lines = "".join(json.dumps(_finite(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
        # A lone surrogate has no UTF-8 bytes, so it is written as its JSON escape.
        data = memoryview((("\n" if self._broken_line else "") + lines).encode(errors="backslashreplace"))
        self._broken_line = bool(data)
        while data:
            data = data[self._file.write(data) :]  # unbuffered: with a full disk, write() writes a part and the next call raises
        self._broken_line = False

    def close(self) -> None:
        self._file.close()


def _step_of(line: bytes) -> float:
    """Return the step of a JSON line; infinity when the line is incomplete."""
    try:
        return json.loads(line)["step"] if line.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _NumbersOnly:
    """Base class of sinks that ignore text."""

    def completions(self, step: int, scored: Sequence[ScoredRollout], advantages: Sequence[float]) -> None:
        pass

    def message(self, text: str) -> None:
        pass


class TensorBoardSink(_NumbersOnly):
    """Writes scalars as TensorBoard events."""

    def __init__(self, folder: Path, restored_step: int):
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self._writer = SummaryWriter(str(folder), purge_step=restored_step + 1 if restored_step else None)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    evaluation = step

    def close(self) -> None:
        self._writer.close()


class WandbSink(_NumbersOnly):
    """Writes to Weights & Biases, online or offline. A resumed run continues with the id in the file `wandb_id`."""

    def __init__(self, folder: Path, config: RunConfig):
        try:
            import wandb
        except ImportError:
            raise RuntimeError("run.wandb needs the package wandb: pip install wandb") from None
        folder.mkdir(parents=True, exist_ok=True)
        id_file = folder / "wandb_id"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:8])
        self._run = wandb.init(
            project="megagrpo",
            name=config.run.name,
            id=id_file.read_text().strip(),
            resume="allow",
            dir=str(folder),
            mode="offline" if config.run.wandb == "offline" else "online",
            config=config.model_dump(),
            settings=wandb.Settings(console="off", silent=True),
        )

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    evaluation = step

    def close(self) -> None:
        self._run.finish()


class PhaseTimer:
    """Measures the seconds of each phase of a step: `with timer("generate"): ...`. Times of repeated phases are added up.

    The times are host times: work that a phase leaves queued on a GPU counts for the phase that waits for it.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._started = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] += time.perf_counter() - start

    def collect(self) -> dict[str, float]:
        """Return `time/PHASE` for each phase and `time/step`, in seconds since the last call or the start, and reset them."""
        now = time.perf_counter()
        metrics = {f"time/{phase}": seconds for phase, seconds in self._seconds.items()} | {"time/step": now - self._started}
        self._seconds.clear()
        self._started = now
        return metrics
