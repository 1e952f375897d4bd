"""Writes to Weights & Biases, online or offline: metrics, the config, and tables of completions."""

from __future__ import annotations

from megagrpo.config.sections.tracker_options import PROJECT
from megagrpo.platform.process.variables import ENVIRONMENT
from megagrpo.records.rows.completions import Rows, table
from megagrpo.records.sinks.sink import TrackedRun, TrackerSink


class WandbSink(TrackerSink):
    """Continues the same wandb run after a restart. The x-axis of all charts is the metric `step`, because a resumed
    run may log a step again, and wandb drops rows whose own step does not grow."""

    def __init__(self, run: TrackedRun):
        import wandb  # not always installed

        super().__init__(run)
        self._table, options = wandb.Table, run.config.run.wandb
        run.folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=options.project or ENVIRONMENT.get("WANDB_PROJECT") or PROJECT,
            entity=options.entity,
            group=options.group,
            tags=options.tags or None,
            name=options.name or run.name,
            id=run.id("wandb"),
            resume="allow",
            dir=str(run.folder),
            mode=options.mode,
            config=run.config.model_dump(mode="json"),
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("*", step_metric="step")

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    evaluation = step

    def table(self, step: int, rows: Rows) -> None:
        columns, cells = table(rows)
        self._run.log({"step": step, "completions": self._table(columns=columns, data=cells, allow_mixed_types=True)})

    def close(self, failed: bool = False) -> None:
        self._run.finish(exit_code=int(failed))
