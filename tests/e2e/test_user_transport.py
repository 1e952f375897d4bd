"""A transport of the user's own, the example of docs/transports.md: real weights reach a real vLLM server through plain
files, and what is damaged on the way is named."""

import re
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import run_ranks

from megagrpo.sync.trainer_side.sync import WeightSync
from megagrpo.sync.trainer_side.transport import transport_class
from megagrpo.types import WeightSyncError
from tests.e2e import world
from tests.e2e.test_weight_sync import is_paused
from tests.e2e.tiny_servers import sampled, shards, tied_llamas, weights
from tests.rank_fakes import GroupRanks, OneRank

PAGE = Path(__file__).parents[2] / "docs" / "transports.md"
FILES = {"folder_transport.py": "class Folder(Transport)", "folder_receiver.py": "class FolderReceiver(Receiver)"}


@pytest.fixture(scope="module")
def transport(tmp_path_factory) -> str:
    """The page's transport, as `rollout.weight_sync_transport` names it."""
    folder = tmp_path_factory.mktemp("folder_transport")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for file, text in FILES.items():
        (folder / file).write_text(next(block for block in blocks if text in block))
    return f"{folder}/folder_transport.py:Folder"


def push(transport, engine, folder, version):
    """Two tensor-parallel ranks in two replicas: ranks 0 and 2 hold the same weights, and so do 1 and 3."""
    ranks = GroupRanks(dist.get_rank())
    way = transport_class(transport)(ranks, "float32")
    with WeightSync(engine if ranks.world_rank == 0 else None, ranks, "float32", way) as sync:
        report = sync.push(shards(folder, 2, ranks.world_rank % 2), version)
    return report.bytes_published, report.bytes_read


def test_weights_reach_a_server_through_a_transport_of_ones_own(transport):
    synced, fresh = tied_llamas()
    version = synced.engine.weight_version + 1
    results = run_ranks(push, 4, transport, synced.engine, fresh.folder, version)
    synced.engine.weight_version = version  # the ranks' copy of the client has counted, this one has not
    total = sum(tensor.nbytes for tensor in weights(fresh.folder).values())
    assert results == [(total, total)] * 4 and sampled(synced.engine) == fresh.sampled
    assert {path.name for path in Path(transport).parent.glob("version*")} == set()


class Damaged:
    """Wrapper of an engine that flips one bit of one written file before the engine loads it."""

    def __init__(self, engine, name):
        self.engine, self.name = engine, name

    def load_weights(self, update, only=None):
        block = update.index.tensors[self.name].blocks[0]
        path = update.folder / block.file
        world.wait_for(path.exists, "the block")
        data = bytearray(path.read_bytes())
        data[-3] ^= 4
        path.write_bytes(data)
        return self.engine.load_weights(update, only)

    def resume(self, update, only=None):
        self.engine.resume(update, only)


def test_a_file_that_was_damaged_is_named_and_the_next_push_arrives(transport):
    synced, fresh = tied_llamas()
    name, version = "model.layers.1.mlp.up_proj.weight", synced.engine.weight_version + 1
    way = transport_class(transport)(OneRank(), "float32")
    with WeightSync(Damaged(synced.engine, name), OneRank(), "float32", way) as sync:
        with pytest.raises(WeightSyncError, match=rf"rank 0, {re.escape(name)}\[0:192, 0:128\]: checksum \w+ was read"):
            sync.push(shards(fresh.folder), version)
        assert is_paused(synced.engine)
        sync.engine = synced.engine
        sync.push(shards(fresh.folder), version)
    assert not is_paused(synced.engine) and sampled(synced.engine) == fresh.sampled
