"""Groups generated ahead, in a checkpoint of some number of replicas and read by another number."""

import json
from pathlib import Path

import pytest
from ranks import run_ranks

from megagrpo.config import ParallelSection
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.records.checkpoints.ahead_files import read_ahead, sums_of_ahead, write_ahead
from megagrpo.weights.files.file_checksums import CHECKSUMS, checksums, verify_others, verify_tensors


def groups(places) -> list[dict]:
    return [{"place": place, "prompt_id": 2 * place, "rollouts": [{"text": f"é {place}"}]} for place in places]


def write(folder: Path) -> dict[str, str]:
    layout = init_layout(ParallelSection())
    mine = groups(range(layout.dp_rank, 12, layout.dp_size)) if layout.dp_rank != 1 else []
    return sums_of_ahead(write_ahead(mine, folder, layout.dp_rank), layout)


def test_each_replica_of_any_number_finds_the_groups_whose_place_is_its_own(tmp_path):
    sums = run_ranks(write, 3, tmp_path)
    written = checksums(tmp_path, sorted(tmp_path.iterdir()))
    assert sums == [written] * 3 and list(written) == ["ahead_0.jsonl", "ahead_2.jsonl"]  # replica 1 had none
    places = [place for place in range(12) if place % 3 != 1]
    for size in (1, 2, 3, 5):
        found = [list(read_ahead(tmp_path, rank, size)) for rank in range(size)]
        assert [sorted(g["place"] for g in of_rank) for of_rank in found] == [
            [place for place in places if place % size == rank] for rank in range(size)
        ]
        assert sorted((g for of_rank in found for g in of_rank), key=lambda g: g["place"]) == groups(places)


def test_a_damaged_file_is_found_by_the_rank_that_verifies_it(tmp_path):
    crc = write_ahead(groups([1, 3]), tmp_path, 1)
    (tmp_path / CHECKSUMS).write_text(json.dumps({"ahead_1.jsonl": f"{crc:08x}"}))
    verify_tensors(tmp_path, 1, 2)
    (tmp_path / "ahead_1.jsonl").write_bytes(b"x" + (tmp_path / "ahead_1.jsonl").read_bytes()[1:])
    verify_others(tmp_path)
    verify_tensors(tmp_path, 0, 2)
    with pytest.raises(ValueError, match=r"ahead_1.jsonl is corrupt: its CRC-32 is \w+; \w+ was written"):
        verify_tensors(tmp_path, 1, 2)
    with pytest.raises(ValueError, match="has a line without a place; remove the file"):
        list(read_ahead(tmp_path, 0, 1))
