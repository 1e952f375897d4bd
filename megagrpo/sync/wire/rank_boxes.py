"""The inputs of a `p2p` plan: the boxes that each trainer rank holds and each worker wants, and their JSON form.

Both ends exchange them through the store (`exchange.Store`), and each computes the plan (`sync_plan.py`) from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megagrpo.models.families.boxes import Box
from megagrpo.sync.wire.exchange import Deadline, Store
from megagrpo.sync.wire.sync_plan import Transfers, plan_transfers
from megagrpo.sync.wire.tensor_index import SharedBlock, SharedTensor, TensorIndex

WorkerBoxes = Mapping[str, Sequence[Box]]  # tensor -> the boxes of it that one worker wants


class RankBoxes:
    """All tensors of a policy, and the ranks that hold each box of them; the store holds it as JSON."""

    def __init__(self, tensors: dict[str, tuple[tuple[int, ...], dict[Box, list[int]]]]):
        self.tensors = tensors

    @property
    def holders(self) -> dict[str, dict[Box, list[int]]]:
        """Tensor -> box -> the ranks that hold the box."""
        return {name: boxes for name, (_, boxes) in self.tensors.items()}

    def index(self, version: int, dtype: str) -> TensorIndex:
        """Return the index for readers: each block once, however many ranks hold it."""
        tensors = {
            name: SharedTensor(shape, tuple(SharedBlock(ranks[0], "", 0, box, 0) for box, ranks in boxes.items()))
            for name, (shape, boxes) in self.tensors.items()
        }
        return TensorIndex(version, dtype, tensors)

    def transfers_to(self, workers: Sequence[WorkerBoxes]) -> Transfers:
        """Return the plan that sends every worker its boxes. Raises LookupError for a box that no rank holds."""
        return plan_transfers(self.holders, wanted_by(workers, self.tensors))

    def as_json(self) -> dict[str, Any]:
        """Return the JSON form that `of_json` reads."""
        return {name: [shape, list(boxes.items())] for name, (shape, boxes) in self.tensors.items()}

    @staticmethod
    def of_json(data: dict[str, Any]) -> RankBoxes:
        """Return the boxes from their JSON form."""
        return RankBoxes(
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
    """Return the boxes that a worker wants, from their JSON form, which `by_tensor` makes."""
    return {name: [box_of_json(box) for box in boxes] for name, boxes in data.items()}


def take_boxes(store: Store, keys: Sequence[str], deadline: Deadline) -> list[WorkerBoxes]:
    """Return the boxes of each worker. `keys` are the keys of the workers' boxes in the store; alike workers share a
    key, and then one object. Raises WeightSyncError."""
    boxes = {key: boxes_of_json(store.wait_for(key, "a worker's boxes", deadline)) for key in set(keys)}
    return [boxes[key] for key in keys]


def by_tensor(boxes: Iterable[tuple[str, Box]]) -> WorkerBoxes:
    """Return the (tensor, box) pairs by tensor, sorted: what a worker leaves in the store."""
    sorted_boxes: dict[str, list[Box]] = {}
    for name, box in sorted(boxes):
        sorted_boxes.setdefault(name, []).append(box)
    return sorted_boxes


def wanted_by(boxes_of: Sequence[WorkerBoxes], names: Iterable[str]) -> dict[str, dict[Box, list[int]]]:
    """Return tensor -> box -> the workers that want it, in order of `names`. `boxes_of` holds each worker's boxes."""
    wanted: dict[str, dict[Box, list[int]]] = {}
    for name in names:
        for worker, boxes in enumerate(boxes_of):
            for box in boxes.get(name, ()):
                wanted.setdefault(name, {}).setdefault(box, []).append(worker)
    return wanted
