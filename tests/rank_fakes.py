"""The messages of a layout without one: of a process that is alone, and of the ranks of a process group."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megagrpo.platform.parallel import host_messages


@dataclass(frozen=True)
class OneRank:
    """A world of one process."""

    world_rank: int = 0
    world_size: int = 1

    def all_gather_objects(self, obj, within=None):
        return [obj]

    def all_reduce(self, values, reduction="sum", within=None):
        return values

    def broadcast_object(self, obj, source=0):
        return obj


@dataclass(frozen=True)
class GroupRanks:
    """The ranks of a group, the world if None."""

    world_rank: int
    group: Any = None

    @property
    def world_size(self):
        return dist.get_world_size(self.group)

    def all_gather_objects(self, obj, within=None):
        everyone = [None] * self.world_size
        dist.all_gather_object(everyone, obj, group=self.group)
        return everyone

    def all_reduce(self, values, reduction="sum", within=None):
        return host_messages.all_reduce(values, reduction, self.group or dist.group.WORLD)

    def broadcast_object(self, obj, source=0):
        objects = [obj]
        dist.broadcast_object_list(objects, group_src=source, group=self.group)
        return objects[0]
