"""Workers that read while a rank writes: they wait for data not written yet, but not for a rank that will not write
it."""

import multiprocessing
import os
import signal
import threading
import time

import numpy as np
import pytest

from megagrpo.sync.wire.ledger import HEADER, Ledger, Ledgers, ledger_path
from megagrpo.sync.wire.manifest import WeightSyncError

VERSION = 5


def ledger(folder, blocks=4):
    """The ledger of rank 2."""
    path = ledger_path(folder, 2, VERSION)
    path.write_bytes(bytes(8 * (HEADER + blocks)))
    return Ledger(path, np.memmap(path, np.uint64))


def test_a_reader_waits_for_its_block_and_for_no_more(tmp_path):
    written, places = ledger(tmp_path), []
    written.begin(VERSION)
    written.note(VERSION, 0, 17, 100)
    ledgers = Ledgers(tmp_path, VERSION, 20.0, places.append)
    ledgers.wait_for(2, 100, "a")
    assert places == []
    later = threading.Timer(0.3, lambda: written.note(VERSION, 1, 2**64 - 1, 300))
    later.start()
    started = time.monotonic()
    ledgers.wait_for(2, 300, "b")
    assert 0.2 < time.monotonic() - started < 10 and places == ["the load of b, which rank 2 has not written"]
    assert [int(word) for word in written.words[HEADER : HEADER + 2]] == [17, 2**64 - 1]


def test_what_was_written_of_an_older_version_is_not_taken_for_this_one(tmp_path):
    written = ledger(tmp_path)
    written.begin(VERSION - 2)
    written.note(VERSION - 2, 3, 1, 10**9)
    with pytest.raises(WeightSyncError, match="rank 2 aborted weight version 5, which contains w"):
        Ledgers(tmp_path, VERSION, 20.0).wait_for(2, 1, "w")
    written.begin(VERSION)
    with pytest.raises(WeightSyncError, match=r"rank 2 has not written w within 0\.2 s"):
        Ledgers(tmp_path, VERSION, 0.2).wait_for(2, 1, "w")


def test_a_rank_that_fails_and_one_without_a_ledger_are_named_at_once(tmp_path):
    written, started = ledger(tmp_path), time.monotonic()
    written.begin(VERSION)
    threading.Timer(0.2, written.withdraw).start()
    with pytest.raises(WeightSyncError, match="rank 2 aborted weight version 5, which contains w"):
        Ledgers(tmp_path, VERSION, 60.0).wait_for(2, 1, "w")
    with pytest.raises(WeightSyncError, match=r"rank 3: .*ledger1 cannot be read: No such file"):
        Ledgers(tmp_path, VERSION, 60.0).wait_for(3, 1, "w")
    assert time.monotonic() - started < 10


def test_a_rank_that_is_killed_is_told_within_a_second_and_what_it_has_written_can_be_read(tmp_path):
    ready = multiprocessing.get_context("fork").Event()

    def write():
        written = ledger(tmp_path)
        written.begin(VERSION)
        written.note(VERSION, 0, 17, 64)
        ready.set()
        time.sleep(60)

    rank = multiprocessing.get_context("fork").Process(target=write)
    rank.start()
    ready.wait()
    threading.Timer(0.3, lambda: os.kill(rank.pid, signal.SIGKILL)).start()
    ledgers, started = Ledgers(tmp_path, VERSION, 60.0), time.monotonic()
    with pytest.raises(WeightSyncError, match="rank 2 died and has not written b"):
        ledgers.wait_for(2, 65, "b")
    assert 0.2 < time.monotonic() - started < 1.3
    ledgers.wait_for(2, 64, "a")
    rank.join()
