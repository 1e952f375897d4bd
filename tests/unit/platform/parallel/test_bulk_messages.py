"""Parts of bytes go to rank 0 in the order of turns. Real ranks with gloo."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import run_ranks

from megagrpo.config import ParallelSection
from megagrpo.platform.parallel.bulk_messages import PartError, parts_to_first_rank
from megagrpo.platform.parallel.layout import init_layout

SIZES = (1, 70_000, 0, 3_000_000, 5)  # bytes of the parts of a turn


def part(turn: int, index: int) -> bytes:
    return bytes([turn + 1, index + 1]) * SIZES[index]


def made_ahead(folder: Path) -> list[bytes]:
    """Rank 0, in its own turn, waits until both others have made two parts."""
    layout = init_layout(ParallelSection())

    def parts(turn: int) -> Iterator[bytes]:
        for index in range(len(SIZES)):
            if turn == 0 and index == 1:
                deadline = time.monotonic() + 20
                while len(list(folder.glob("*"))) < 4:
                    assert time.monotonic() < deadline, f"parts made ahead: {sorted(folder.glob('*'))}"
                    time.sleep(0.01)
                made = {(folder / f"{rank} {number}").exists() for rank in (1, 2) for number in (0, 1)}
                assert made == {True} and len(list(folder.glob("*"))) == 4, "a rank holds more than two parts"
            if layout.world_rank:
                (folder / f"{layout.world_rank} {index}").touch()
            yield part(turn, index)

    return list(parts_to_first_rank(layout, [0, 1, 2, 1], parts))


def test_ranks_make_a_part_ahead_and_rank_0_gets_all_in_order(tmp_path):
    first, *others = run_ranks(made_ahead, 3, tmp_path)
    assert [p for p in first if p] == [part(t, i) for t in range(4) for i in range(len(SIZES)) if SIZES[i]]
    assert others == [[], []]


def fails(failing: int) -> tuple[list[bytes], str]:
    layout = init_layout(ParallelSection())

    def parts(turn: int) -> Iterator[bytes]:
        for index in range(len(SIZES)):
            if index == failing and turn == 1:
                raise ValueError("a row \udc80")
            yield part(turn, index)

    taken = []
    try:
        for one in parts_to_first_rank(layout, [0, 1, 1], parts):
            taken.append(one)
    except PartError as error:
        return taken, str(error)
    return taken, ""


@pytest.mark.parametrize("failing", [0, 1, 4])
def test_a_part_that_cannot_be_made_ends_its_turn_alone(failing):
    (taken, error), (none, nothing) = run_ranks(fails, 2, failing)
    counts = [len(SIZES), failing, len(SIZES)]
    assert [p for p in taken if p] == [part(t, i) for t in range(3) for i in range(counts[t]) if SIZES[i]]
    assert error == "rank 1: ValueError: a row \\udc80" and (none, nothing) == ([], "")
