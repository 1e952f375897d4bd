"""Servers that die or hang in the middle of a sync over p2p: the sync restarts when the server has restarted, and sends
it no requests before. A hung server is named with its phase."""

import os
import re
import signal
import threading
import time

import pytest

from megagrpo.engine.http.fleet import State
from megagrpo.platform.rendezvous.store_exchange import Exchange
from megagrpo.sync.trainer_side.point_to_point import PointToPoint
from megagrpo.sync.trainer_side.sync import WeightSync
from megagrpo.sync.trainer_side.transport import TransportSettings
from megagrpo.types import WeightSyncError
from tests.e2e.test_restarts import Kept, wait_for
from tests.e2e.test_weight_sync import OneRank, is_paused
from tests.e2e.tiny_servers import (
    PROMPTS,
    below,
    connect,
    greedy,
    halt,
    is_halted,
    launch,
    model_folder,
    sampled,
    shards,
    tied_llamas,
)


def over_p2p(engine, say=print, seconds=60.0, relay=False):
    """A sync of one rank. Its messages are small, so a server can die between two of them."""
    transport = PointToPoint(OneRank(), "float32", TransportSettings(seconds=seconds, megabytes=0.05, relay=relay))
    return WeightSync(engine, OneRank(), "float32", transport, say)


class KeptOverP2p(Kept):
    """Like `Kept`; `synced` holds the messages of the sync."""

    relay = False

    def make_sync(self):
        self.synced = []
        return over_p2p(self.server.engine, self.synced.append, relay=self.relay)


class KeptInChain(KeptOverP2p):
    """Like `KeptOverP2p`; one server passes the weights on to the next."""

    relay = True


def push_and_kill(kept, folder, worker, read, victims):
    """Push, and SIGKILL `victims` of the halted process when this worker has read this number of weight slices."""
    halted = halt(kept.server.engine.urls[0], worker, "update", read)

    def kill():
        wait_for(lambda: is_halted(halted))
        for pid in victims(halted):
            os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    kept.push(folder)
    killer.join()


def test_a_worker_that_gets_something_else_than_was_sent_refuses_it_and_takes_the_next_push(monkeypatch):
    synced, fresh = tied_llamas()
    send = Exchange.send

    def damaging(self, buffers):
        for buffer in buffers:
            # vLLM packs this tensor, and is in the middle of that when it fails
            if "layer 1 (model.layers.1.mlp.down_proj" in buffer.what:
                buffer.values[3] ^= 16
        return send(self, buffers)

    with over_p2p(synced.engine) as sync:
        monkeypatch.setattr(Exchange, "send", damaging)
        with pytest.raises(
            WeightSyncError,
            match=r"worker 0 of http\S+: .*rank 0, model\.layers\.1\.mlp\.down_proj\.weight\[.*: checksum",
        ):
            sync.push(shards(fresh.folder), synced.engine.weight_version + 1)
        monkeypatch.setattr(Exchange, "send", send)
        sync.push(shards(fresh.folder), synced.engine.weight_version + 2)
    assert sampled(synced.engine) == fresh.sampled


@pytest.mark.full
@pytest.mark.parametrize(
    "read", [pytest.param(0, marks=pytest.mark.full), 10, pytest.param(19, marks=pytest.mark.full)]
)
def test_a_push_whose_server_dies_is_done_over_when_it_is_back(read):
    synced, fresh = tied_llamas()
    with KeptOverP2p(synced, fresh) as kept:
        began = kept.server.engine.weight_version
        push_and_kill(kept, synced.folder, 0, read, lambda halted: below(synced.launcher.servers[0].supervisor.pid))
        assert synced.engine.weight_version == began + 1 and kept.asked_before == [0] and not is_paused(synced.engine)
        kept.push(fresh.folder)
        assert sampled(synced.engine) == fresh.sampled
    (told,) = kept.synced
    assert re.search(
        r"^warning: a vLLM server died during a weight sync; restarting the sync: .*phase (update|finish): vLLM server "
        r"http",
        told,
    )
    assert (
        "restarting it, 1 of 3 times" in kept.said[0] and "is back and waits for the next weight sync" in kept.said[1]
    )


@pytest.mark.full
def test_a_push_one_of_whose_two_workers_dies_is_done_over_when_the_server_is_back():
    fresh = tied_llamas()[1]
    folder = model_folder("llama", 0)
    two_workers = connect(launch(folder, "llama_loses_worker", tp=2), folder)
    with KeptOverP2p(two_workers, fresh) as kept:
        push_and_kill(kept, folder, 1, 5, lambda halted: [halted])
        (told,) = kept.synced
        assert "sending" in told and "to worker 1 of http" in told and "phase update: vLLM server http" in told
        first = greedy(two_workers.engine)
        kept.push(fresh.folder)
        second = greedy(two_workers.engine)
        assert second != first and [ids for ids, _ in second] == [ids for ids, _ in fresh.sampled[: len(PROMPTS)]]
        assert kept.asked_before == [0]
    two_workers.launcher.stop()


@pytest.mark.full
@pytest.mark.parametrize("kept_by", [KeptOverP2p, KeptInChain])
def test_a_push_to_two_servers_one_of_which_dies_goes_on_with_the_other(kept_by):
    fresh = tied_llamas()[1]
    folder = model_folder("llama", 0)
    two_servers = connect(launch(folder, f"llama_of_two_{kept_by.relay}", num_servers=2), folder)
    with kept_by(two_servers, fresh) as kept:
        push_and_kill(kept, folder, 0, 5, lambda halted: below(two_servers.launcher.servers[0].supervisor.pid))
        assert len(kept.synced) == 1 and two_servers.engine.fleet.serving() == two_servers.engine.urls[1:]
        kept.push(fresh.folder)  # to the other server alone: its workers have other numbers now
        assert greedy(two_servers.engine) == fresh.sampled[: len(PROMPTS)]
        wait_for(lambda: State.NEEDS_WEIGHTS in two_servers.engine.fleet.states().values(), 120)
        kept.push(folder)
        kept.push(fresh.folder)
        assert two_servers.engine.fleet.serving() == two_servers.engine.urls and kept.asked_before == [0]
        assert sampled(two_servers.engine) == fresh.sampled
    two_servers.launcher.stop()


@pytest.mark.full
@pytest.mark.parametrize(
    ("path", "told"),
    [
        (
            "/pause?mode=wait",
            r"rank 0: waiting for worker 0 of {url}: .*; phase pause: vLLM server {url} .*did not respond to /pause",
        ),
        (
            "/update_weight_version",
            r"phase resume: vLLM server {url} .*did not respond to /update_weight_version within 4 s",
        ),
    ],
    ids=["pause", "resume"],
)
def test_a_server_that_hangs_before_or_after_the_weights_is_named_with_the_phase(path, told, monkeypatch):
    synced, fresh = tied_llamas()
    engine, version = synced.engine, synced.engine.weight_version
    processes, post = below(synced.launcher.servers[0].supervisor.pid), engine._request
    monkeypatch.setattr(engine, "sync_timeout", 4.0)

    def stop_and_post(client, url, asked, *args, **kwargs):
        if asked == path:
            for pid in processes:
                os.kill(pid, signal.SIGSTOP)
        return post(client, url, asked, *args, **kwargs)

    with over_p2p(engine, seconds=4.0) as sync:
        sync.push(shards(synced.folder), version + 1)
        monkeypatch.setattr(engine, "_request", stop_and_post)
        began = time.monotonic()
        with pytest.raises(WeightSyncError) as failed:
            sync.push(shards(fresh.folder), version + 2)
        assert re.search(told.format(url=engine.urls[0]), str(failed.value)) and time.monotonic() - began < 10, (
            failed.value
        )
        monkeypatch.setattr(engine, "_request", post)
        for pid in processes:
            os.kill(pid, signal.SIGCONT)
        sync.push(shards(fresh.folder), version + 3)
        assert sampled(engine) == fresh.sampled
