"""Writes to trackio: a database on this machine (`trackio show` displays it) or a Hugging Face Space."""

from __future__ import annotations

import contextlib
import io

from megagrpo.config.sections.tracker_options import PROJECT
from megagrpo.platform.process.variables import ENVIRONMENT
from megagrpo.records.rows.completions import Rows, table
from megagrpo.records.sinks.sink import TrackedRun, TrackerSink


class TrackioSink(TrackerSink):
    """Continues the trackio run of the same name after a restart from a checkpoint. No server is started."""

    def __init__(self, run: TrackedRun):
        import trackio  # not always installed

        super().__init__(run)
        self._table, self._finish, options = trackio.Table, trackio.finish, run.config.run.trackio
        with contextlib.redirect_stdout(io.StringIO()):  # hints of several lines
            self._run = trackio.init(
                project=options.project or ENVIRONMENT.get("TRACKIO_PROJECT") or PROJECT,
                name=options.name or run.name,
                group=options.group,
                space_id=options.space_id,
                config=run.config.model_dump(mode="json"),
                resume="allow" if run.restored_step else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    evaluation = step

    def table(self, step: int, rows: Rows) -> None:
        columns, cells = table(rows)
        self._run.log(
            {"completions": self._table(data=[dict(zip(columns, line, strict=True)) for line in cells])}, step=step
        )

    def close(self, failed: bool = False) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._finish()  # not the run's own method, after which the exit of the process would finish it again
