import json
from pathlib import Path

import pytest

from megagrpo.platform.process import user_code
from tests.unit.records.sinks.tracked import COLUMNS, ENCODED, write

FILE = Path(__file__).parents[4] / "examples" / "trackers" / "mlflow_sink.py"
TRACKED = f"run.trackers=[{FILE}:MlflowSink]"


@pytest.mark.full
@pytest.mark.slow  # MLflow is slow to import, and to create a database
def test_a_run_and_its_continuation_are_one_run_in_a_database_beside_the_runs(tmp_path, monkeypatch):
    for package in ("mlflow", "sqlalchemy", "alembic"):
        pytest.importorskip(package)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    elsewhere, runs = tmp_path / "elsewhere", tmp_path / "größe 1"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "sums")
    write(runs / "mine", TRACKED)
    write(runs / "mine", TRACKED, restored_step=1)

    from mlflow import MlflowClient

    assert (
        not list(elsewhere.iterdir())
        and sorted(path.name for path in runs.iterdir()) == "mine mlflow.db mlruns".split()
    )
    client = MlflowClient(f"sqlite:///{runs / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    assert run.info.run_name == "mine" and run.info.status == "FINISHED"
    assert run.data.params["run.name"] == "mine" and run.data.params["algorithm.beta"] == "0.0"
    rewards = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "reward")]
    assert sorted(rewards) == [(1, 0.1), (2, 0.2), (2, 0.2), (3, 0.3)]
    assert [m.value for m in client.get_metric_history(run.info.run_id, "eval/pass_at_1")] == [0.5]
    assert {f.path for f in client.list_artifacts(run.info.run_id, "completions")} == {
        f"completions/step_00000{i}.json" for i in (1, 2, 3)
    }
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME")
    with pytest.raises(SystemExit):
        write(runs / "broken", TRACKED, fails=True)
    (broken,) = client.search_runs([client.get_experiment_by_name("megagrpo").experiment_id])
    assert (broken.info.run_name, broken.info.status) == ("broken", "FAILED")
    table = json.loads(open(client.download_artifacts(run.info.run_id, "completions/step_000003.json")).read())
    assert table["columns"] == COLUMNS and table["data"][1] == [3, "3 + 4?", ENCODED, 1.0, None, "7", 1.0, 1.0]


def test_names_that_mlflow_does_not_allow_are_changed():
    metric_name = user_code.load_named(f"{FILE}:metric_name")
    assert metric_name("eval/a set/pass@4") == "eval/a set/pass_at_4" and metric_name("a%b(c)") == "a_b_c_"
