"""A run's folder belongs to one run: a second one is refused, and a run whose folder disappears ends with an error."""

import shutil

from tests.e2e import world


def test_a_run_refuses_a_second_one_in_its_folder_and_ends_when_the_folder_is_deleted(tmp_path):
    with world.running(tmp_path, "run.max_steps=10000", "run.save_steps=1", "run.save_total_limit=1") as trainer:
        world.wait_for(lambda: world.steps_done(tmp_path) >= 2, "second step")
        for words in (["--resume"], ["run.overwrite=true"]):
            second = world.train(tmp_path, *words)
            assert second.code == 2 and f"run is in use by process {trainer.pid} on host " in second.err
            assert len(second.err.strip().splitlines()) == 1
        steps = world.steps_done(tmp_path)
        world.wait_for(lambda: world.steps_done(tmp_path) >= steps + 2, "steps after that")
        assert [line["step"] for line in second.metrics] == list(range(1, len(second.metrics) + 1))
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        run = trainer.wait(seconds=30)
    assert run.code == 1 and f"{tmp_path}/run was deleted, moved or taken over by another run" in run.err
    assert "Traceback" not in run.err
