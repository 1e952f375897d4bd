"""Writes to an MLflow server or local database: metrics, the config as parameters, completions tables as artifacts.

    run:
      trackers: [tensorboard, examples/trackers/mlflow_sink.py:MlflowSink]

Needs `megagrpo install mlflow`. MLFLOW_TRACKING_URI names the server, or a store such as sqlite:////data/mlflow.db;
without it the database is mlflow.db in `run.output_dir`. MLFLOW_EXPERIMENT_NAME names the experiment.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from pathlib import Path

from megagrpo.config.io import as_yaml, flat
from megagrpo.config.sections.tracker_options import PROJECT
from megagrpo.records.rows.completions import Rows, table
from megagrpo.records.sinks.sink import TrackedRun, TrackerSink

LONGEST_PARAM = 6000  # characters
_ODD = re.compile(r"[^\w./ :-]")  # characters that MLflow does not allow in names


class MlflowSink(TrackerSink):
    """Continues the same MLflow run after a restart. The step of a metric is the run's step."""

    def __init__(self, run: TrackedRun):
        from mlflow import MlflowClient, entities  # not always installed

        super().__init__(run)
        for noisy in ("mlflow", "alembic"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        local, uri = Path(run.config.run.output_dir).absolute(), os.environ.get("MLFLOW_TRACKING_URI")
        self._entities = entities
        self._client = MlflowClient(uri or f"sqlite:///{local / 'mlflow.db'}")
        self._artifacts = None if uri else (local / "mlruns").as_uri()  # else in the current folder
        self._id = self._resumed(run) or self._new(run)

    def _resumed(self, run: TrackedRun) -> str | None:
        """Return the id of this run in MLflow if an earlier process of the run has created it."""
        file = run.folder / "mlflow_id"
        if not file.exists():
            return None
        run_id = file.read_text().strip()
        self._client.update_run(run_id, status="RUNNING")
        return run_id

    def _new(self, run: TrackedRun) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        created = self._client.create_run(self._experiment(name), run_name=run.name)
        run_id: str = created.info.run_id
        params = [
            self._entities.Param(_ODD.sub("_", key), str(value)[:LONGEST_PARAM])
            for key, value in flat(run.config).items()
        ]
        self._client.log_batch(run_id, params=params)  # in batches of its own
        self._client.log_text(run_id, as_yaml(run.config), "config.yaml")
        run.folder.mkdir(parents=True, exist_ok=True)
        (run.folder / "mlflow_id").write_text(run_id)
        return run_id

    def _experiment(self, name: str) -> str:
        """Return the id of the experiment, which another run may create at the same moment."""
        known = self._client.get_experiment_by_name(name)
        if known is None:
            try:
                return str(self._client.create_experiment(name, self._artifacts))
            except Exception:
                known = self._client.get_experiment_by_name(name)
                if known is None:
                    raise
        return str(known.experiment_id)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        metric, now = self._entities.Metric, int(time.time() * 1000)
        self._client.log_batch(
            self._id, metrics=[metric(metric_name(name), value, now, step) for name, value in metrics.items()]
        )

    evaluation = step

    def table(self, step: int, rows: Rows) -> None:
        columns, cells = table(rows)
        text = json.dumps({"columns": columns, "data": cells}, ensure_ascii=False)
        self._client.log_text(self._id, text, f"completions/step_{step:06d}.json")

    def close(self, failed: bool = False) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


def metric_name(name: str) -> str:
    """Return the name of a metric in MLflow, which allows no `@`: `pass@1` is `pass_at_1`."""
    return _ODD.sub("_", name.replace("@", "_at_"))
