"""`close` of an environment: called once, within its time limit, whatever ends the episode; nothing is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.suites import usual
from tests.unit.environments.test_environments import (  # noqa: F401 - fixtures
    KINDS,
    conversation,
    documented,
    each,
    gone,
    mine,
    responders,
    runtime,
    used,
)

CLOSING = '''
"""An environment that writes what happens to it, a line per event, into a file."""

import asyncio
import multiprocessing
import os
import subprocess
import time


class Room:
    def __init__(self, log, close="writes"):
        self.log, self.how = log, close
        self.child = subprocess.Popen(["sleep", "600"])
        self._write("opened", self.child.pid)

    def _write(self, *words):
        with open(self.log, "a") as log:
            print(os.getpid(), *words, file=log)

    def reset(self):
        self._write("reset")

    def work(self, how: str) -> str:
        """Works.

        Args:
            how: What happens.
        """
        if how == "sleep":
            time.sleep(600)
        if how == "stubborn":
            while True:
                try:
                    time.sleep(600)
                except BaseException:
                    break
        if how == "forks":
            process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
            process.start()
            time.sleep(0.5)  # a signal during the fork is lost
            process.terminate()
            process.join()
            return str(process.exitcode)
        if how == "exit":
            os._exit(3)
        return how

    async def wait(self) -> str:
        """Waits."""
        await asyncio.sleep(600)

    def close(self):
        print("noise while closing", flush=True)
        self._write("closing")
        if self.how == "hangs":
            time.sleep(600)
        if self.how == "raises":
            raise RuntimeError("it cannot close")
        time.sleep(0.3)
        self._write("closed")


class AsyncRoom(Room):
    async def close(self):
        await asyncio.sleep(0)
        super().close()
'''


@pytest.fixture
def room(responders, mine, tmp_path):  # noqa: F811
    """A factory of responders with the environment above, and a function that reads its events."""
    (mine.parent / "closing.py").write_text(CLOSING)
    log = tmp_path / "events"
    log.touch()

    def make(close="writes", kind="Room", **section):
        arguments = {"log": str(log), "close": close}
        return responders(f"{mine.parent / 'closing.py'}:{kind}", environment_args=arguments, **section)

    return make, log


def begun(table, number=0):
    one = conversation(number)
    each(table.begin, [one])
    assert not one.ended
    return one


def events(log):
    """Process id -> its events in order, of processes that have begun an episode; and the ids of all children."""
    of: dict[int, list[str]] = {}
    children = []
    for line in log.read_text().splitlines():
        pid, event, *more = line.split()
        of.setdefault(int(pid), []).append(event)
        children += map(int, more)
    return {pid: seen for pid, seen in of.items() if "reset" in seen}, children


def ended(log, *expected):
    """Wait until the processes with these events, and their children, are gone."""
    deadline = time.monotonic() + 15
    while sorted(events(log)[0].values()) != sorted(map(list, expected)) and time.monotonic() < deadline:
        time.sleep(0.05)
    of, children = events(log)
    assert sorted(of.values()) == sorted(map(list, expected))
    gone(*of, *children)


CLOSED = "opened", "reset", "closing", "closed"


def test_close_is_called_at_the_end_of_an_episode_and_is_no_tool(room):
    table, log = room[0](kind="AsyncRoom"), room[1]
    assert {tool["function"]["name"] for tool in table.tools} == {"wait", "work"}
    both = [begun(table, number) for number in range(2)]
    assert used(table, both[0], "work", how="forks") == "-15"  # the handler of SIGTERM is this process's alone
    each(table.finish, both)
    ended(log, CLOSED, CLOSED)


@pytest.mark.parametrize("fault", ["sleep", "stubborn", "wait"])
def test_close_is_called_after_a_timeout_in_the_middle_of_the_call(room, fault):
    table, log = room[0](timeout=2.0), room[1]
    one = begun(table)
    text = used(table, one, "wait") if fault == "wait" else used(table, one, "work", how=fault)
    assert "no answer in time" in text and one.ended == "failed"
    ended(log, CLOSED)


def test_a_process_that_died_is_not_closed_and_its_children_are_killed(room):
    table, log = room[0](), room[1]
    one = begun(table)
    assert "its process died" in used(table, one, "work", how="exit")
    ended(log, CLOSED[:2])


@pytest.mark.parametrize("close", ["hangs", "raises"])
def test_a_close_that_hangs_or_raises_ends_with_its_process(room, capfd, close):
    table, log = room[0](close, timeout=2.0), room[1]
    each(table.finish, [begun(table)])
    ended(log, CLOSED[:3])
    table.close()
    assert ("`Room.close` failed: RuntimeError: it cannot close" in capfd.readouterr().err) == (close == "raises")


def test_the_end_of_the_run_closes_reused_and_running_environments_before_it_returns(room):
    table, log = room[0](reuse_environments=True, workers=2), room[1]
    both = [begun(table, number) for number in range(2)]
    each(table.finish, both[:1])
    assert "closed" not in log.read_text()
    again = begun(table, 2)
    assert used(table, again, "work", how="back") == "back"
    table.close()
    assert sorted(events(log)[0].values()) == [[*CLOSED], ["opened", "reset", *CLOSED[1:]]]
    ended(log, CLOSED, ("opened", "reset", *CLOSED[1:]))


def test_an_environment_that_is_closing_counts_as_open(room):
    table, log = room[0](), room[1]
    for number in range(3):
        each(table.finish, [begun(table, number)])
    ended(log, CLOSED, CLOSED, CLOSED)
    # without the one that was constructed to describe the environment
    words = [line.split()[1] for line in log.read_text().splitlines()][-12:]
    assert words == [*CLOSED] * 3


RUN = """
import asyncio, sys, time
from megagrpo.config import MultiTurnSection
from megagrpo.environments.responders import Responders
from tests.unit.environments.test_environments import conversation, each

if __name__ == "__main__":
    options = {"container": sys.argv[3]} if sys.argv[3:] else {}
    arguments = {"log": sys.argv[2]}
    table = Responders(MultiTurnSection(environment=sys.argv[1], environment_args=arguments, timeout=20.0, **options))
    each(table.begin, [conversation(number) for number in range(3)])
    print("begun", flush=True)
    time.sleep(600)
"""


def killed(mine, log, *template):  # noqa: F811
    """Start a run with three episodes, and kill it by SIGKILL."""
    (mine.parent / "closing.py").write_text(CLOSING)
    log.touch()
    command = [sys.executable, "-c", RUN, f"{mine.parent / 'closing.py'}:Room", str(log), *template]
    run = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
        env=dict(os.environ, PYTHONPATH=str(Path(__file__).parents[3])),
    )
    assert run.stdout.readline() == "begun\n"
    run.send_signal(signal.SIGKILL)
    run.wait()
    run.stdout.close()
    run.stderr.close()


def test_sigkill_of_the_run_closes_environments_and_leaves_no_process(mine, tmp_path):  # noqa: F811
    killed(mine, tmp_path / "events")
    ended(tmp_path / "events", CLOSED, CLOSED, CLOSED)


@pytest.mark.parametrize("kind", usual(KINDS, 0))
def test_sigkill_of_the_run_closes_environments_in_containers(mine, runtime, tmp_path, kind):  # noqa: F811
    killed(mine, tmp_path / "events", documented(kind))
    ended(tmp_path / "events", CLOSED, CLOSED, CLOSED)
    deadline = time.monotonic() + 5
    while os.listdir(tmp_path / "state") and time.monotonic() < deadline:  # kubectl's command line removes its pod
        time.sleep(0.05)
    assert os.listdir(tmp_path / "state") == []
