"""Workers that read while a rank writes: they wait for data not written yet, but not for a rank that will not write
it."""

import multiprocessing
import os
import signal
import threading
import time

import numpy as np
import pytest

from megagrpo.sync.wire.progress_file import WORD_BYTES, ProgressFile, ProgressReader, progress_path
from megagrpo.types import WeightSyncError

VERSION = 5


def progress_file(folder):
    """The progress file of rank 2."""
    path = progress_path(folder, 2, VERSION)
    path.write_bytes(bytes(WORD_BYTES))
    return ProgressFile(path, np.memmap(path, np.uint64))


def test_a_reader_waits_for_its_block_and_for_no_more(tmp_path):
    written, activities = progress_file(tmp_path), []
    written.begin(VERSION)
    written.record(VERSION, 100)
    progress = ProgressReader(tmp_path, VERSION, 20.0, activities.append)
    progress.wait_for(2, 100, "a")
    assert activities == []
    later = threading.Timer(0.3, lambda: written.record(VERSION, 300))
    later.start()
    started = time.monotonic()
    progress.wait_for(2, 300, "b")
    assert 0.2 < time.monotonic() - started < 10 and activities == ["the load of b, which rank 2 has not written"]


def test_what_was_written_of_an_older_version_is_not_taken_for_this_one(tmp_path):
    written = progress_file(tmp_path)
    written.begin(VERSION - 2)
    written.record(VERSION - 2, 10**9)
    with pytest.raises(WeightSyncError, match="rank 2 aborted weight version 5, which contains w"):
        ProgressReader(tmp_path, VERSION, 20.0).wait_for(2, 1, "w")
    written.begin(VERSION)
    with pytest.raises(WeightSyncError, match=r"rank 2 has not written w within 0\.2 s"):
        ProgressReader(tmp_path, VERSION, 0.2).wait_for(2, 1, "w")


def test_a_rank_that_fails_and_one_without_a_progress_file_are_named_at_once(tmp_path):
    written, started = progress_file(tmp_path), time.monotonic()
    written.begin(VERSION)
    threading.Timer(0.2, written.withdraw).start()
    with pytest.raises(WeightSyncError, match="rank 2 aborted weight version 5, which contains w"):
        ProgressReader(tmp_path, VERSION, 60.0).wait_for(2, 1, "w")
    with pytest.raises(WeightSyncError, match=r"rank 3: .*progress1 cannot be read: No such file"):
        ProgressReader(tmp_path, VERSION, 60.0).wait_for(3, 1, "w")
    assert time.monotonic() - started < 10


def test_a_rank_that_is_killed_is_told_within_a_second_and_what_it_has_written_can_be_read(tmp_path):
    ready = multiprocessing.get_context("fork").Event()

    def write():
        written = progress_file(tmp_path)
        written.begin(VERSION)
        written.record(VERSION, 64)
        ready.set()
        time.sleep(60)

    rank = multiprocessing.get_context("fork").Process(target=write)
    rank.start()
    ready.wait()
    threading.Timer(0.3, lambda: os.kill(rank.pid, signal.SIGKILL)).start()
    progress, started = ProgressReader(tmp_path, VERSION, 60.0), time.monotonic()
    with pytest.raises(WeightSyncError, match="rank 2 died and has not written b"):
        progress.wait_for(2, 65, "b")
    assert 0.2 < time.monotonic() - started < 1.3
    progress.wait_for(2, 64, "a")
    rank.join()
