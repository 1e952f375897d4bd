"""When a run stops for its time limit, and the time that it reserves for its end."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from megagrpo.__main__ import main
from megagrpo.config import ConfigError, load_config
from megagrpo.engine.servers.launcher import Launcher
from megagrpo.trainer.saving import time_limit
from megagrpo.trainer.saving.time_limit import (
    OUT_OF_TIME,
    TIME_LIMIT_KEY,
    End,
    TimeLimit,
    end_of_run,
    process_start,
    seconds_of,
)
from tests.unit.config.test_placement import QUICKSTART


@pytest.fixture
def clock(monkeypatch):
    """A fake clock; set it by `clock[0]`. Timers are only recorded."""
    now, timers = [1000.0], []
    monkeypatch.setattr(time_limit.time, "time", lambda: now[0])

    class Timer:
        def __init__(self, seconds, function, arguments):
            timers.append(self)
            self.seconds, self.fire, self.cancelled = seconds, lambda: function(*arguments), False

        def start(self): ...

        def cancel(self):
            self.cancelled = True

    monkeypatch.setattr(time_limit.threading, "Timer", Timer)
    now.append(timers)
    return now


def test_a_step_that_would_not_be_finished_is_not_begun(clock):
    stopped = []
    limit = TimeLimit(End(1000 + 400, TIME_LIMIT_KEY), stopped.append)
    limit.step_begins()
    limit.saved(10)  # then 1.5 x 10 + 15 seconds must be left
    assert limit.lead_seconds == 30
    for seconds in (100, 80, 80):
        clock[0] += seconds
        limit.step_begins()
        assert stopped == []
    clock[0] += 11  # 129 seconds before the end; the checkpoint takes 30 of them, and the longest step took 100
    limit.step_begins()
    assert stopped == [OUT_OF_TIME]


def test_a_step_that_takes_too_long_is_interrupted(clock):
    stopped = []
    limit = TimeLimit(End(1000 + 400, TIME_LIMIT_KEY), stopped.append)
    limit.step_begins()
    (timer,) = clock[1]
    assert timer.seconds == 400 - (1.5 * time_limit.FIRST_SAVE_SECONDS + time_limit.SPARE_SECONDS)
    limit.saved(2)
    clock[0] += 1
    limit.step_begins()
    assert timer.cancelled and clock[1][1].seconds == 399 - 18
    clock[1][1].fire()
    assert stopped == [OUT_OF_TIME]
    limit.close()
    assert clock[1][1].cancelled


def test_a_run_without_time_for_a_step_is_not_tried_again_and_again(clock):
    limit = TimeLimit(End(1000 + 100, "SLURM_JOB_END_TIME"), lambda number: pytest.fail("stopped"))
    with pytest.raises(
        ConfigError, match=r"SLURM_JOB_END_TIME: when the first step begins, 100 s are left, of which 105 s are"
    ):
        limit.step_begins()


def test_the_longest_checkpoint_counts(clock):
    limit = TimeLimit(End(5000, TIME_LIMIT_KEY), lambda number: None)
    assert limit.lead_seconds == 1.5 * time_limit.FIRST_SAVE_SECONDS + time_limit.SPARE_SECONDS
    for seconds, longest in ((4, 4), (8, 8), (2, 8)):
        limit.saved(seconds)
        assert limit.lead_seconds == 1.5 * longest + time_limit.SPARE_SECONDS


def test_without_a_limit_nothing_happens(clock):
    limit = TimeLimit(None, lambda number: pytest.fail("stopped"))
    limit.step_begins()
    assert clock[1] == []


def test_slurm_knows_the_end_else_the_config(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    assert end_of_run(None) is None
    age = 3600 + time.time() - process_start()  # of pytest's process
    limit = f"{int(age // 3600) + 1}:00:00"
    assert end_of_run(limit) == End(pytest.approx(process_start() + seconds_of(limit), abs=1), TIME_LIMIT_KEY)
    for wrong in ("", "NONE", "0", "1700000000"):
        monkeypatch.setenv("SLURM_JOB_END_TIME", wrong)
        assert end_of_run(limit).key == TIME_LIMIT_KEY
    soon = int(time.time()) + 7200
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(soon))
    assert end_of_run(limit) == End(float(soon), "SLURM_JOB_END_TIME")


def test_a_run_without_time_for_a_step_ends_before_a_server_starts(monkeypatch, capsys):
    monkeypatch.setattr(Launcher, "start", pytest.fail)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 60))
    assert main(["train", str(QUICKSTART)]) == 2
    assert re.match(
        r"SLURM_JOB_END_TIME: \d+: \d+ s are left, of which 105 s are for a checkpoint, .* unset",
        capsys.readouterr().err,
    )


def test_a_run_begins_when_its_first_process_starts(tmp_path):
    """The script stands for a rank: its parent is the launcher, which sleeps before it starts the rank."""
    code = "import time; from megagrpo.trainer.saving.time_limit import process_start; print(time.time() - process_start())"
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "ranks"}
    launcher = (
        f"import subprocess, sys, time; time.sleep(5); subprocess.run([sys.executable, '-c', {code!r}], check=True)"
    )
    for more, least in (({}, 0.0), (rank, 5.0)):
        said = subprocess.run(
            [sys.executable, "-c", launcher], env=os.environ | more, capture_output=True, text=True, check=True
        ).stdout
        assert float(said) >= least
    alone = subprocess.run(
        [sys.executable, "-c", f"import time; time.sleep(2); {code}"], capture_output=True, text=True, check=True
    ).stdout
    assert float(alone) >= 2.0


def test_time_limits_are_written_as_slurm_has_them():
    assert [seconds_of(text) for text in ("0:00:30", "04:00:00", "2-01:00:01")] == [30, 4 * 3600, 49 * 3600 + 1]
    for text in ("90", "1:30", "1:90:00", "x"):
        with pytest.raises(ConfigError, match=r"run\.time_limit"):
            load_config(QUICKSTART, [f"run.time_limit={text}"])
    assert OUT_OF_TIME != signal.SIGTERM
