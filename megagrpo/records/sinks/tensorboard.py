"""Writes TensorBoard events to the run's folder: scalars, and as texts the config and sample completions."""

from __future__ import annotations

from megagrpo.config.io import as_yaml
from megagrpo.records.rows.completions import Rows, best_and_worst, encodable, prompt_text
from megagrpo.records.sinks.sink import TrackedRun, TrackerSink


class TensorBoardSink(TrackerSink):
    """Writes to `tensorboard/` in the run's folder. A resumed run hides the steps that it repeats."""

    def __init__(self, run: TrackedRun):
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        super().__init__(run)
        purge_step = run.restored_step + 1 if run.restored_step else None
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=purge_step)
        if not run.restored_step:
            self._writer.add_text("config", _verbatim(as_yaml(run.config)), 0)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    evaluation = step

    def table(self, step: int, rows: Rows) -> None:
        """Write the best and the worst response of a group as text; TensorBoard is slow with more."""
        shown = best_and_worst(rows)
        parts = ["prompt", _verbatim(prompt_text(shown[0]["prompt"]))]
        for row in shown:
            numbers = {"reward": row["reward"], **row["rewards"], **row.get("extra", {}), "advantage": row["advantage"]}
            parts += [
                "response",
                _verbatim(row["completion"]),
                _verbatim(", ".join(f"{k} {v}" for k, v in numbers.items())),
            ]
        self._writer.add_text("completions", "\n\n".join(parts), step)

    def close(self, failed: bool = False) -> None:
        self._writer.close()


def _verbatim(text: str) -> str:
    """Return Markdown that shows `text` as it is."""
    return "\n".join(f"    {line}" for line in encodable(text).splitlines())
