"""The inputs of a `p2p` plan: the boxes that each trainer rank holds and each worker wants, and their JSON form.

Both ends exchange them as notes on the board (`exchange.Board`), and each computes the plan (`plan.py`) from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megagrpo.models.families.boxes import Box
from megagrpo.sync.wire.manifest import Manifest, SharedBlock, SharedTensor

WorkerBoxes = Mapping[str, Sequence[Box]]  # tensor -> the boxes of it that one worker wants


class Roster:
    """All tensors of a policy, and the ranks that hold each box of them; it is stored as JSON on the board."""

    def __init__(self, tensors: dict[str, tuple[tuple[int, ...], dict[Box, list[int]]]]):
        self.tensors = tensors

    @property
    def holders(self) -> dict[str, dict[Box, list[int]]]:
        """Tensor -> box -> the ranks that hold the box."""
        return {name: boxes for name, (_, boxes) in self.tensors.items()}

    def manifest(self, version: int, dtype: str) -> Manifest:
        """Return the manifest for readers: each block once, however many ranks hold it."""
        tensors = {
            name: SharedTensor(shape, tuple(SharedBlock(ranks[0], "", 0, box, 0) for box, ranks in boxes.items()))
            for name, (shape, boxes) in self.tensors.items()
        }
        return Manifest(version, dtype, tensors)

    def as_json(self) -> dict[str, Any]:
        """Return the JSON form that `of_json` reads."""
        return {name: [shape, list(boxes.items())] for name, (shape, boxes) in self.tensors.items()}

    @staticmethod
    def of_json(data: dict[str, Any]) -> Roster:
        """Return the roster from its JSON form."""
        return Roster(
            {
                name: (tuple(shape), {box_of_json(box): ranks for box, ranks in boxes})
                for name, (shape, boxes) in data.items()
            }
        )


def box_of_json(data: Any) -> Box:
    """Return the box from its JSON form."""
    lo, hi = data
    return tuple(lo), tuple(hi)


def boxes_of_json(data: Mapping[str, Iterable[Any]]) -> WorkerBoxes:
    """Return the boxes that a worker wants, from their JSON form: the note that `by_tensor` makes."""
    return {name: [box_of_json(box) for box in boxes] for name, boxes in data.items()}


def by_tensor(boxes: Iterable[tuple[str, Box]]) -> WorkerBoxes:
    """Return the (tensor, box) pairs by tensor, sorted: the note that a worker leaves on the board."""
    sorted_boxes: dict[str, list[Box]] = {}
    for name, box in sorted(boxes):
        sorted_boxes.setdefault(name, []).append(box)
    return sorted_boxes


def wanted_by(boxes_of: Sequence[WorkerBoxes], names: Iterable[str]) -> dict[str, dict[Box, list[int]]]:
    """Return tensor -> box -> the workers that want the box, with tensors in the order of `names`. `boxes_of` holds the
    boxes of each worker."""
    wanted: dict[str, dict[Box, list[int]]] = {}
    for name in names:
        for worker, boxes in enumerate(boxes_of):
            for box in boxes.get(name, ()):
                wanted.setdefault(name, {}).setdefault(box, []).append(worker)
    return wanted
