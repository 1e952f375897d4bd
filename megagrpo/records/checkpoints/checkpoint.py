"""Checkpoints: model, optimizer, schedule, RNG and `TrainState`, sharded by Megatron's dist_checkpointing. Each is
complete or absent.

A checkpoint contains the reference only after the reference has changed; until then the config names its weights. With
LoRA it contains the adapters instead of the model's weights, and also a PEFT copy of the adapters in `adapter/`.

Ranks write into `.step_000012.partial`, in the foreground or while training continues. Rank 0 renames it to
`step_000012` when every rank has finished. A checkpoint loads into another layout: the distributed optimizer's state is
stored by parameter, not by rank.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import textwrap
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from megagrpo.families.hf_config import HfConfig, architecture_differences, load_hf_config
from megagrpo.platform import device
from megagrpo.platform.parallel.agree import RankError, on_first_rank, run_own_and_agree
from megagrpo.platform.parallel.layout import Layout
from megagrpo.platform.process.cleanup.removal import remove
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.model_state import prefix_keys
from megagrpo.policy.optimizer.policy_optimizer import dense_moments
from megagrpo.policy.reference import Reference
from megagrpo.records.checkpoints.ahead_files import sums_of_ahead, write_ahead
from megagrpo.records.checkpoints.run_files import (
    BEST,
    STATE_FILE,
    checkpoints,
    make_room,
    partial_of,
    point_to,
    remove_old,
    remove_partial,
)
from megagrpo.records.checkpoints.trained_state import load_trained, trained_state
from megagrpo.train_types import TrainState
from megagrpo.weights.blocks.parameter_blocks import adapter_blocks
from megagrpo.weights.bridge.adapter_files import ADAPTER_FILES, save_adapter
from megagrpo.weights.bridge.hf_export import Source, find_sources
from megagrpo.weights.bridge.hf_files import carry, files_of
from megagrpo.weights.bridge.load import untrained_names
from megagrpo.weights.bridge.megatron_io import (
    HF_FILES,
    METADATA,
    ShardedWrite,
    check_is_checkpoint,
    read_state,
    restore_rng,
    sharded_rng,
    sums_of_ranks,
)
from megagrpo.weights.files.file_checksums import CHECKSUMS, checksums, verify_others, verify_tensors
from megagrpo.weights.files.torch_dist import StoredTensors

BYTES_PER_PARAMETER = 14  # weight (2), float32 master, first and second moment: lower bound for the disk space check


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names it and the cause."""


@dataclass
class _Saving:
    """A checkpoint being written. `state` and `reference_moved` belong to its step, even if the run has continued."""

    final: Path
    partial: Path
    state: TrainState
    reference_moved: bool
    began: float = field(default_factory=time.monotonic)
    write: ShardedWrite | None = None
    ahead: int | None = None  # checksum of the file of this leader's groups, if any

    @property
    def started_write(self) -> ShardedWrite:
        """The write of this rank's part."""
        assert self.write is not None, "`Checkpointer.start` returned"
        return self.write


def readable(size: int) -> str:
    """Format a number of bytes with three digits: 512 bytes, 3.41 MiB, 97.0 GiB."""
    units = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"]
    power = min(max(size, 1).bit_length() // 10 if size >= 1024 else 0, len(units) - 1)
    return f"{size} bytes" if power == 0 else f"{size / 1024**power:.3g} {units[power]}"


class Checkpointer:
    """Saves and restores one run's checkpoints in `folder`. It keeps the newest `keep` checkpoints and the best one.

    Each checkpoint copies the config and tokenizer of `model_folder`, so that it can be exported without that folder.
    Only an export of a model with untrained tensors needs it.
    """

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        policy: MegatronPolicy,
        keep: int,
        model_folder: Path,
        reference: Reference | None = None,
        critic: MegatronPolicy | None = None,
    ):
        self.folder, self.layout, self.policy, self.reference, self.critic = folder, layout, policy, reference, critic
        self.keep, self.model_folder = keep, model_folder
        self.seconds = 0.0  # duration of the last write, in the background or not
        self._saving: _Saving | None = None
        self._sources: dict[str, Source] = {}  # of adapters, since the first save
        self._model_files = files_of(model_folder)  # read now: `model_folder` may be gone when a checkpoint is written
        self._models = [policy] if critic is None else [policy, critic]
        trained = [p for model in self._models for chunk in model.chunks for p in chunk.parameters() if p.requires_grad]
        count = sum(p.numel() for p in trained if _is_first_copy(p, layout))
        self._bytes_needed = int(layout.all_reduce(torch.tensor(count))) * BYTES_PER_PARAMETER

    def start(self, state: TrainState, background: bool, ahead: Iterable[dict[str, Any]] = ()) -> None:
        """Begin to write `step_N`. With `background`, a copy of the state is written during training. A leader writes
        the groups of its replica that were generated `ahead`. Collective.

        Call again only after `finish` returned the path or raised: one save at a time. If a rank fails, all raise
        CheckpointError, and no part of the checkpoint is left.
        """
        assert self._saving is None, "two checkpoints at a time"
        final = self.folder / f"step_{state.step:06d}"
        reference_moved = self.reference is not None and self.reference.moved
        saving = self._saving = _Saving(final, partial_of(final), state, reference_moved)
        with self._all_or_nothing(saving):
            on_first_rank(self.layout, lambda: self._prepare(saving.partial))
            self._write_adapter(saving.partial)
            replica = self.layout.dp_rank
            saving.ahead = run_own_and_agree(self.layout, lambda: write_ahead(ahead, saving.partial, replica))
            run_own_and_agree(self.layout, lambda: self._write(saving, background))

    def finish(self, wait: bool) -> Path | None:
        """Return the path of the checkpoint in progress once it is complete. Collective; fails like `start`.

        Returns None when no checkpoint is in progress, or when ranks still write and `wait` is False.
        """
        saving = self._saving
        if saving is None or not (wait or self._is_written(saving)):
            return None
        write = saving.started_write
        with self._all_or_nothing(saving):
            written = sums_of_ranks(run_own_and_agree(self.layout, write.result), self.layout)
            written |= sums_of_ahead(saving.ahead, self.layout)
            waited = time.monotonic()
            run_own_and_agree(self.layout, write.finish)
            on_first_rank(self.layout, lambda: self._publish(saving, written))
        self._saving = None
        self.seconds = write.ended - saving.began + time.monotonic() - waited
        return saving.final

    def _is_written(self, saving: _Saving) -> bool:
        """Whether every rank has written its part. Collective."""
        return bool(self.layout.all_reduce(torch.tensor(int(saving.started_write.done)), "min"))

    @contextmanager
    def _all_or_nothing(self, saving: _Saving) -> Iterator[None]:
        """Convert an error inside, raised on every rank, to CheckpointError. Remove the checkpoint in progress."""
        try:
            yield
        except Exception as error:
            self._saving = None
            if saving.write is not None:
                saving.write.wait()
            full = (
                f"; {readable(shutil.disk_usage(self.folder).free)} of disk space free" if self.folder.exists() else ""
            )
            if self.layout.world_rank == 0:
                remove(saving.partial)
            raise CheckpointError(
                f"writing checkpoint {saving.final} failed; earlier checkpoints remain: {error}{full}"
            ) from error

    def load(self, path: Path) -> TrainState:
        """Restore policy, optimizer, schedule, RNG and changed reference from `path`; return TrainState. Collective.

        RNG states are restored only into the layout that saved them. Raises CheckpointError when the checkpoint is
        damaged or does not fit the model.
        """
        rank, world_size = self.layout.world_rank, self.layout.world_size
        try:
            layout, reference_moved, reached = on_first_rank(self.layout, lambda: checked(path))
            run_own_and_agree(self.layout, lambda: _verify(path, rank, world_size))
            on_first_rank(self.layout, lambda: _check_parts(path, self.policy.hf_config, self.critic is not None))
        except RankError as e:
            raise CheckpointError(str(e)) from e
        same_layout = layout == self.layout.sizes
        reference = self.reference if reference_moved else None
        # float32 shards are views of leaf tensors, on which autograd forbids in-place writes
        with self._dense_moments(), torch.no_grad():
            state = self._sharded_state(is_loading=True, with_rng=same_layout, reference=reference)
            try:
                loaded = read_state(state, path)
            except (Exception, CheckpointException) as e:  # CheckpointException is not a subclass of Exception
                why = _other_model(path, self.policy.hf_config) or _reason(e)
                raise CheckpointError(f"{path} cannot be read, or does not fit this model: {why}") from e
            load_trained(self.policy, loaded)
            if self.critic is not None:
                load_trained(self.critic, loaded["critic"])
        if reference is not None:
            reference.load_state_dict(loaded["reference"])
        for model in self._models:
            model.masters_changed()
        if same_layout:
            restore_rng(loaded["rng"])
        return reached

    def _prepare(self, partial: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_partial(self.folder)
        free = shutil.disk_usage(self.folder).free
        if free < self._bytes_needed:
            raise OSError(f"the disk is full: {readable(free)} free, at least {readable(self._bytes_needed)} needed")
        partial.mkdir()

    def _write(self, saving: _Saving, background: bool) -> None:
        device.release_memory()  # writing needs two more copies of weights and optimizer state
        with self._dense_moments():
            reference = self.reference if saving.reference_moved else None
            sharded = self._sharded_state(is_loading=False, with_rng=True, reference=reference)
            saving.write = ShardedWrite(sharded, saving.partial, METADATA, background)

    def _write_adapter(self, partial: Path) -> None:
        policy, lora = self.policy, self.policy.config.lora
        if lora.enabled:
            adapters = list(adapter_blocks(policy.chunks, policy.hf_config, self.layout))
            self._sources = self._sources or find_sources(adapters, self.layout)
            base, folder = policy.config.model.path, partial / ADAPTER_FILES
            save_adapter(adapters, self.layout, self._sources, folder, lora, base, policy.dtype)

    def _publish(self, saving: _Saving, written: dict[str, str]) -> None:
        partial, final, state = saving.partial, saving.final, saving.state
        (partial / HF_FILES).mkdir()
        stored = self._model_files.entries if self._model_files else ()
        untrained = untrained_names(stored, self.policy.hf_config)
        carry(self.model_folder, self._model_files, partial / HF_FILES, untrained)
        contents = {"state": asdict(state), "layout": self.layout.sizes, "reference_moved": saving.reference_moved}
        (partial / STATE_FILE).write_text(json.dumps(contents, indent=1))
        others = [path for path in partial.rglob("*") if path.is_file() and path.name not in written]
        (partial / CHECKSUMS).write_text(json.dumps(written | checksums(partial, others), indent=1))
        for path in [*others, partial / CHECKSUMS, partial]:
            _to_disk(path)
        make_room(final)
        partial.rename(final)
        _to_disk(self.folder)
        best = self.folder / f"step_{state.best_step:06d}"
        remove_old(self.folder, self.keep, best)
        if best == final:
            point_to(best, self.folder / BEST)

    def _sharded_state(self, is_loading: bool, with_rng: bool, reference: Reference | None) -> dict[str, Any]:
        local = METADATA | {"dp_cp_group": self.layout.dp_cp_group}
        state = trained_state(self.policy, local, is_loading)
        if self.critic is not None:
            state["critic"] = trained_state(self.critic, local, is_loading)
            prefix_keys(state["critic"], "critic.")
        if reference is not None:
            state["reference"] = reference.sharded_state_dict(metadata=local)
        if with_rng:
            state["rng"] = sharded_rng(self.layout)
        return state

    @contextmanager
    def _dense_moments(self) -> Iterator[None]:
        with ExitStack() as stack:
            for model in self._models:
                stack.enter_context(dense_moments(model.optimizer))
            yield


def checked(path: Path) -> tuple[dict[str, int], bool, TrainState]:
    """Read a checkpoint's state like `_read`. Raises CheckpointError if damaged, naming the checkpoint before it."""
    with _naming_the_one_before(path):
        return _read(path)


def _verify(path: Path, rank: int, world_size: int) -> None:
    """Verify the checksums of this rank's share of the tensor files. Raises CheckpointError, worded as in `checked`."""
    with _naming_the_one_before(path):
        verify_tensors(path, rank, world_size)


@contextmanager
def _naming_the_one_before(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        before = ["step 0", *(other.name for other in checkpoints(path.parent) if other.name < path.name)][-1]
        raise CheckpointError(f"{error}. To continue from {before} instead, remove the folder {path}") from error


def _read(path: Path) -> tuple[dict[str, int], bool, TrainState]:
    """Return layout, whether the reference had changed, and TrainState. Raises ValueError that names a damaged file."""
    try:
        saved = json.loads((path / STATE_FILE).read_text())
        layout, moved, state = saved["layout"], saved["reference_moved"], TrainState(**saved["state"])
    except OSError as error:
        raise ValueError(f"{path} is not a complete checkpoint: {error}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path / STATE_FILE} is corrupt: {error!r}; copy the checkpoint again") from None
    check_is_checkpoint(path)
    verify_others(path)
    StoredTensors(path).check_files()
    return layout, moved, state


def _check_parts(path: Path, hf_config: HfConfig, needs_critic: bool) -> None:
    """Raises CheckpointError if a trained vision tower would be left out, or one that was frozen is now trained, or if
    there is no critic, which this run needs."""
    if needs_critic and not StoredTensors(path).has_part("critic"):
        fix = "resume with the algorithm.advantage_estimator that saved it, or begin a run with model.path from it"
        raise CheckpointError(f"{path} has no critic, unlike this run; {fix}")
    trained, stored = bool(hf_config.vision and hf_config.vision.trained), StoredTensors(path).has_tower
    if trained != stored:
        said = f"{path} has {'a' if stored else 'no'} trained vision tower, unlike this run"
        raise CheckpointError(f"{said}; set model.freeze_vision_tower to {str(not stored).lower()}")


def _other_model(path: Path, hf_config: HfConfig) -> str:
    """Describe how the checkpoint's model differs from `hf_config`; empty if it does not or has no model config."""
    try:
        different = architecture_differences(load_hf_config(path / HF_FILES), hf_config)
    except ValueError:
        return ""
    values = "; ".join(f"{key}: {pair}" for key, pair in different.items())
    return f"they differ in {values}; set model.path to the run's original model" if different else ""


def _reason(error: BaseException) -> str:
    """Shorten a Megatron or torch error to a line. The original has each rank's traceback and all keys of the model."""
    failures = getattr(error, "failures", {})
    lines = [f"rank {rank}: {type(failure).__name__}: {failure}" for rank, (failure, _) in sorted(failures.items())]
    line = textwrap.shorten((lines or [str(error)])[0], 500)
    if re.match(r"\D*\d+: KeyError: \W*optimizer\.state\.\S+\.mlp\.router\.", line):
        return "it has no optimizer state of routers; set train.freeze_moe_router to true, as in the run that saved it"
    return line


def _is_first_copy(parameter: torch.Tensor, layout: Layout) -> bool:
    """Whether this rank holds the first copy of the parameter. Megatron marks parameters that are not replicated over
    dp x cp: the experts."""
    return (layout.dp_cp_rank if getattr(parameter, "allreduce", True) else layout.expert_copy) == 0


def _to_disk(path: Path) -> None:
    """Call fsync on a file or folder, so that its content survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
