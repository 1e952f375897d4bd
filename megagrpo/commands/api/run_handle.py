"""A training run as `megagrpo.train` returns it, and as `megagrpo.load_run` opens it later."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from megagrpo.commands.api import child_process, generation
from megagrpo.commands.api.conversions import EXPORT_DTYPES, export_here
from megagrpo.commands.api.inputs.tables import flat_rewards, is_evaluation, table
from megagrpo.config import ConfigError, RunConfig, load_config
from megagrpo.proof.report.collect import read_lines
from megagrpo.records.checkpoints.run_files import (
    BEST,
    CHECKPOINTS,
    COMPLETIONS,
    METRICS,
    RESOLVED,
    named_checkpoint,
    newest_checkpoint,
)

if TYPE_CHECKING:
    import pandas

ADAPTER_FOLDER = "adapter"  # folder of the LoRA adapter in a checkpoint
EXPORTS_FOLDER = "exports"  # folder of the exports of `Run.push`


class Run:
    """A training run: its numbers, its responses, its checkpoints, and its model.

    Every property reads the run's files when it is used, so a run that still trains shows its newest step.

    Attributes:
        folder: The absolute path of the run's folder, `run.output_dir/run.name`.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).absolute()

    @property
    def config(self) -> RunConfig:
        """The config of the run, with every value."""
        return load_config(self.folder / RESOLVED)

    @property
    def metrics(self) -> pandas.DataFrame:
        """One row per step, and a column per metric of docs/metrics.md, such as `step`, `reward` and `time/step`."""
        return table(row for row in read_lines(self.folder / METRICS, {}) if not is_evaluation(row))

    @property
    def evaluations(self) -> pandas.DataFrame:
        """One row per evaluation: `step`, the number of finished steps, and the metrics `eval/...`."""
        return table(row for row in read_lines(self.folder / METRICS, {}) if is_evaluation(row))

    @property
    def completions(self) -> pandas.DataFrame:
        """One row per response: `step`, `prompt`, `completion`, `num_tokens`, `reward`, `rewards/NAME`, `advantage` and
        more."""
        return table(map(flat_rewards, read_lines(self.folder / COMPLETIONS, {})))

    @property
    def checkpoint(self) -> Path | None:
        """The newest complete checkpoint, a Megatron distributed checkpoint. None before the first one."""
        return newest_checkpoint(self.folder / CHECKPOINTS)

    @property
    def best_checkpoint(self) -> Path | None:
        """The checkpoint with the best evaluation (`evaluation.keep_best`), or None."""
        link = self.folder / CHECKPOINTS / BEST
        return link.resolve() if link.exists() else None

    @overload
    def generate(self, prompts: generation.Prompt, *, n: None = None, **options: Any) -> str: ...
    @overload
    def generate(self, prompts: generation.Prompt, *, n: int, **options: Any) -> list[str]: ...
    @overload
    def generate(self, prompts: Sequence[generation.Prompt], *, n: None = None, **options: Any) -> list[str]: ...
    @overload
    def generate(self, prompts: Sequence[generation.Prompt], *, n: int, **options: Any) -> list[list[str]]: ...

    def generate(
        self,
        prompts: Any,
        *,
        n: int | None = None,
        checkpoint: str | os.PathLike[str] | None = "latest",
        **options: Any,
    ) -> Any:
        """Generate with vLLM and the trained weights. A server is started for the call, so pass all prompts at once.

        Args:
            prompts: A text, a conversation (a list of messages with `role` and `content`), or a list of texts or
                conversations. The run's chat template and system prompt are used.
            n: Responses per prompt; None means one, which is not wrapped in a list.
            checkpoint: `latest`, `best`, the path of a checkpoint, or None for the model before training.
            **options: `temperature`, `top_p`, `top_k`, `min_p` (the training's where left out), `max_tokens`, the limit
                of a response, and `seed`.

        Returns:
            The text of the response: one, a list of `n`, or a list with one entry per prompt.

        Raises:
            ConfigError: An option is wrong, a prompt is too long, or the checkpoint does not exist.
            CommandFailed: vLLM failed.
        """
        weights = None if checkpoint is None else self._checkpoint(checkpoint)
        return generation.generate(self.folder / RESOLVED, prompts, n, weights, options)

    def export(
        self,
        folder: str | os.PathLike[str],
        *,
        checkpoint: str | os.PathLike[str] = "latest",
        merge: bool = False,
        dtype: Any = "auto",
    ) -> Path:
        """Write the trained model as a Hugging Face folder, which transformers and vLLM load.

        Args:
            folder: The folder to create.
            checkpoint: `latest`, `best`, or the path of a checkpoint.
            merge: With LoRA, add the adapter to the model's weights. Otherwise a LoRA run exports its adapter, as PEFT
                saves it.
            dtype: The dtype of the weights: `float32`, `bfloat16`, `float16`, or a dtype of torch. `auto` means the
                dtypes of the start model's files. A line says when weights are rounded.

        Returns:
            The absolute path of the folder.

        Raises:
            ConfigError: There is no checkpoint, or the folder exists.
            CommandFailed: The export failed.
        """
        out, source, name = Path(folder).absolute(), self._checkpoint(checkpoint), _dtype(dtype)
        if out.exists():
            raise ConfigError(f"folder: {out} exists; name another folder")
        if name not in EXPORT_DTYPES:
            raise ConfigError(f"dtype: {name} is not known; choose one of {', '.join(EXPORT_DTYPES)}")
        has_adapter = (source / ADAPTER_FOLDER).is_dir()
        merged = merge and has_adapter
        model = self.config.model.path if merged else None
        source = source / ADAPTER_FOLDER if has_adapter else source
        command = "megagrpo merge" if merged else "megagrpo export"
        child_process.call(command, export_here, source, out, model, name, merged)
        return out

    def push(
        self,
        repo: str,
        *,
        checkpoint: str | os.PathLike[str] = "latest",
        merge: bool = False,
        dtype: Any = "auto",
        private: bool = False,
        revision: str | None = None,
        token: str | None = None,
    ) -> str:
        """Export the trained model with its model card and upload it to the Hugging Face hub.

        The export stays in `exports/` of the run's folder. A second call repeats the upload, or continues a failed one.

        Args:
            repo: The model repository, OWNER/NAME. It is created if it does not exist.
            checkpoint: `latest`, `best`, or the path of a checkpoint.
            merge: As for `export`.
            dtype: As for `export`.
            private: Create the repository as private.
            revision: The branch to upload to, which is created if it does not exist.
            token: A token with write access; None means HF_TOKEN, or the token of `hf auth login`.

        Returns:
            The address of the repository.

        Raises:
            ConfigError: There is no checkpoint.
            CommandFailed: The export failed.
            PushError: The name, the token or the upload is wrong.
        """
        from megagrpo.weights.hub.upload import check_repo, push

        check_repo(repo)
        source = self._checkpoint(checkpoint)
        in_dtype = "" if _dtype(dtype) == "auto" else f"_{_dtype(dtype)}"
        out = self.folder / EXPORTS_FOLDER / f"{source.name}{'_merged' if merge else ''}{in_dtype}"
        if not out.exists():
            self.export(out, checkpoint=source, merge=merge, dtype=dtype)
        return push(out, repo, private, revision, token)

    def _checkpoint(self, checkpoint: str | os.PathLike[str]) -> Path:
        """Return the absolute path of a checkpoint. Raises ConfigError when the run has none of this name."""
        try:
            return named_checkpoint(self.folder, os.fspath(checkpoint)).absolute()
        except ValueError as error:
            raise ConfigError(f"checkpoint: {error}") from None

    def __repr__(self) -> str:
        rewards = [
            (row["step"], row.get("reward")) for row in read_lines(self.folder / METRICS, {}) if not is_evaluation(row)
        ]
        known = [reward for _, reward in rewards if reward is not None]
        progress = f": {rewards[-1][0]} steps" if rewards else ""
        return f"<Run {self.folder}{progress}{f', reward {known[0]:.3g} -> {known[-1]:.3g}' if known else ''}>"


def _dtype(dtype: Any) -> str:
    """Return the name of a dtype: `torch.float32` is float32."""
    return str(dtype).removeprefix("torch.")


def load_run(folder: str | os.PathLike[str]) -> Run:
    """Open the folder of a run, `run.output_dir/run.name`, that has ended or still trains.

    Raises:
        ConfigError: The folder holds no run.
    """
    if not (Path(folder) / RESOLVED).is_file():
        raise ConfigError(
            f"folder: {Path(folder).absolute()} holds no run (no {RESOLVED}); name the folder run.output_dir/run.name"
        )
    return Run(folder)
