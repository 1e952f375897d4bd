"""The worker's end of the p2p transport: receives weights that trainer ranks send directly.

An update has four steps: join the trainer's board, agree with all ranks and workers, plan the messages, and receive
them.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from megagrpo.sync.vllm_side.received_blocks import BoxCounts, ReceivedBlocks, ReceivePlan
from megagrpo.sync.wire.exchange import Board, Deadline, Exchange
from megagrpo.sync.wire.manifest import DTYPES, Manifest, WeightSyncError
from megagrpo.sync.wire.messages import rounds
from megagrpo.sync.wire.notes import DirectRequest, Members, content_key
from megagrpo.sync.wire.roster import Roster, boxes_of_json, by_tensor, wanted_by
from megagrpo.sync.wire.sync_plan import plan_transfers


class Receiver:
    """A worker's part in updates. Its connection to the board, its process group, the boxes of its loaders and its plan
    are reused.

    `device` holds the buffers of messages. In the methods, `number` is the index of this worker, counted over all
    servers.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.address: tuple[str, int, str] | None = None  # host, port and secret of `board`
        self.board: Board | None = None
        self.exchange: Exchange | None = None
        self.roster: Roster | None = None
        self.roster_key = ""
        self.boxes: BoxCounts = Counter()
        self.boxes_key = ""  # "" while the boxes are unknown
        self.planned: tuple[Any, ReceivePlan] | None = None  # the arguments of the last plan, and the plan
        self.received: ReceivedBlocks | None = None

    def start(
        self, request: DirectRequest, version: int, worker: int, dry_run: Callable[[Manifest], BoxCounts]
    ) -> tuple[Manifest, ReceivedBlocks]:
        """Take part in an update, and return the manifest of the trainer's weights and the source of their values.

        `worker` is this worker's index within its server. `dry_run` returns the boxes that the loaders fetch. Raises
        WeightSyncError.
        """
        number, deadline = request.first_worker + worker, Deadline(request.seconds)
        manifest = self.join(request, version, deadline)
        members = self.agree(request, number, lambda: dry_run(manifest), deadline)
        plan = self.plan(request, number, members, deadline)
        return manifest, self.receive(request, number, members, plan, deadline)

    def join(self, request: DirectRequest, version: int, deadline: Deadline) -> Manifest:
        """Step 1: connect to the trainer's board and return the manifest of the trainer's weights.

        Raises WeightSyncError when the board cannot be reached, or when the weights and this worker are on different
        kinds of device.
        """
        if request.device != self.device.type:
            raise WeightSyncError(
                f"the trainer's weights are on {request.device} and this worker is on {self.device.type}; p2p requires "
                f"the same device type"
            )
        board = self._board_of(request, deadline)
        if self.roster is None or request.roster != self.roster_key:
            self.roster = Roster.of_json(board.take(request.roster, "the trainer's roster", deadline))
            self.roster_key, self.boxes, self.boxes_key, self.planned = request.roster, Counter(), "", None
        return self.roster.manifest(version, request.dtype)

    def agree(
        self, request: DirectRequest, number: int, dry_run: Callable[[], BoxCounts], deadline: Deadline
    ) -> Members:
        """Step 2: leave this worker's boxes and group on the board, and return rank 0's decision about all workers.

        `dry_run` is called when the boxes are not known yet.
        """
        assert self.board is not None, "`join` connects to the board"
        if not self.boxes_key:
            self.boxes = dry_run()
            note = by_tensor(self.boxes)
            self.boxes_key = content_key("boxes", note)
            self.board.put(self.boxes_key, note)
        group = self.exchange.name if self.exchange is not None else ""
        self.board.put(request.keys.worker(number), {"boxes": self.boxes_key, "group": group})
        what = "the other workers and the trainer's decision"
        return Members(**self.board.take(request.keys.members, what, deadline, stop=request.keys.stop))

    def plan(self, request: DirectRequest, number: int, members: Members, deadline: Deadline) -> ReceivePlan:
        """Step 3: compute the messages of this worker from the boxes of all ranks and workers."""
        assert self.board is not None and self.roster is not None, "`join` reads the roster"
        arguments = self.roster_key, members.boxes, request.limit, number
        if self.planned is None or self.planned[0] != arguments:
            notes = {
                key: boxes_of_json(self.board.take(key, "another worker's boxes", deadline))
                for key in set(members.boxes)
            }
            wanted = wanted_by([notes[key] for key in members.boxes], self.roster.tensors)
            messages = rounds(plan_transfers(self.roster.holders, wanted), request.limit, destination=number)
            blocks = {name: tuple(boxes) for name, boxes in self.roster.holders.items()}
            self.planned = arguments, ReceivePlan.of(messages, blocks, self.boxes, request.limit)
        return self.planned[1]

    def receive(
        self, request: DirectRequest, number: int, members: Members, plan: ReceivePlan, deadline: Deadline
    ) -> ReceivedBlocks:
        """Step 4: join the process group, unless this worker is in it, and start to receive the plan's first rounds.

        The rest arrives as the loaders read from the result.
        """
        assert self.board is not None, "`join` connects to the board"
        if self.exchange is None or self.exchange.name != members.group:
            self.close_group()
            size = request.ranks + len(members.boxes)
            self.exchange = Exchange(self.board, members.group, request.ranks + number, size, self.device, deadline)
        self.received = ReceivedBlocks(plan, self.exchange, DTYPES[request.dtype], deadline)
        return self.received

    def report(self, request: DirectRequest, worker: int, report: dict[str, Any]) -> None:
        """Leave this worker's report on the board. Does nothing when the board is gone, because then no process reads
        it."""
        if self.board is not None:
            with contextlib.suppress(WeightSyncError):
                self.board.put(request.keys.report(request.first_worker + worker), report)

    def close_group(self) -> None:
        """Leave the group; ranks that send to this worker get an error."""
        if self.received is not None:
            self.received.release()
            self.received = None
        if self.exchange is not None:
            self.exchange.close()
            self.exchange = None

    def close(self) -> None:
        """Leave the group and the board."""
        self.close_group()
        self.board = None

    def _board_of(self, request: DirectRequest, deadline: Deadline) -> Board:
        """Return the connection to the board that `request` names; connect when it is another board, or no longer
        responds."""
        address = request.host, request.port, request.secret
        if self.board is None or address != self.address or not self.board.answers():
            self.close()
            self.board = Board(request.host, request.port, deadline, request.secret)
            self.address, self.roster_key = address, ""
        return self.board
