"""Pressing Ctrl-C twice, at any interval, ends a process that generates."""

import asyncio
import contextlib
import os
import signal
import time

import pytest

from megagrpo.trainer import rank

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
DELAYS = [0.0, 0.0002, 0.0005, 0.001, 0.001, 0.001, 0.002, 0.005] * 2  # seconds between the two signals


def generate(stop_on_signals):
    """A rank's work while servers generate: many tasks that wake each other, and a stop that cancels them."""
    running = []

    def stop(number):
        for loop, task in running:
            loop.call_soon_threadsafe(task.cancel)

    async def turns(event):
        while True:
            event.set()
            event.clear()
            await asyncio.sleep(0)

    async def waits(event):
        while True:
            await event.wait()

    async def work():
        running.append((asyncio.get_running_loop(), asyncio.current_task()))
        os.write(1, b".")
        event = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for _ in range(20):
                group.create_task(waits(event))
            group.create_task(turns(event))

    stop_on_signals(stop)
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(work())
    time.sleep(0.5)  # the run saves


def signalled_twice(delay, work):
    """Exit code of a fork that runs `work` and gets two SIGINT, `delay` seconds apart; None when it does not end within
    10 s."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.dup2(writer, 1)
            work()
            code = 0
        except KeyboardInterrupt:
            code = 130
        finally:
            os._exit(code)
    os.read(reader, 1)
    time.sleep(0.005)
    os.kill(child, signal.SIGINT)
    time.sleep(delay)
    os.kill(child, signal.SIGINT)
    deadline = time.monotonic() + 10
    try:
        while time.monotonic() < deadline:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.001)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    finally:
        os.close(reader), os.close(writer)


@pytest.fixture(autouse=True)
def forced_soon(monkeypatch):
    monkeypatch.setattr(rank, "FORCE_SECONDS", 1.0)


def test_a_second_ctrl_c_ends_generation_at_any_distance_from_the_first():
    codes = [signalled_twice(delay, lambda: generate(rank.stop_on_signals)) for delay in DELAYS]
    # 0: the kernel merged the two signals, because this process got no CPU between them; then the run saves as after
    # one signal.
    assert set(codes) <= {130, 0} and 130 in codes, codes


def test_a_second_ctrl_c_ends_a_process_whose_main_thread_does_not_listen():
    def deaf():
        rank.stop_on_signals(lambda number: None)
        os.write(1, b".")
        while True:
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(60)

    assert signalled_twice(0.05, deaf) == 130


def test_one_ctrl_c_asks_the_run_to_stop_and_nothing_else():
    asked = []

    def work():
        rank.stop_on_signals(asked.append)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1.5)
        raise KeyboardInterrupt if asked == [signal.SIGINT] else AssertionError

    child = os.fork()
    if child == 0:
        try:
            work()
        except KeyboardInterrupt:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
