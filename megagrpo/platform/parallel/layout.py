"""Owns the parallel geometry: the ranks, their process groups, and the small messages between them.

Only this file and `platform/device/` use `megatron.core.parallel_state`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor
from torch.distributed import distributed_c10d

from megagrpo.config import ParallelSection, ProblemError
from megagrpo.platform import device
from megagrpo.platform.parallel import host_messages
from megagrpo.platform.parallel.host_messages import Reduction
from megagrpo.platform.parallel.rank_rendezvous import LAZY_CONNECTIONS, join_world
from megagrpo.platform.process.variables import changed


@dataclass(frozen=True)
class Layout:
    """Sizes, ranks and groups of tensor (tp), context (cp), data (dp), pipeline (pp) axes, in rank order, tp fastest.

    `parallel` has the sizes of all axes but the data axis, and the layers of each stage.
    A replica is the tp x cp x pp ranks that work on the same micro-batches; dp x cp ranks hold the same weights.
    Experts use the same ranks in other groups: each stage's tp x cp x dp ranks are etp (inside an expert) x ep (over
    experts) x copies.
    Tensors and objects on the host travel over three gloo groups: `cpu_group` spans the world, `leaders` the first rank
    of each replica in the order of `dp_rank` (None on other ranks), `replica` the ranks of this rank's replica. `ends`
    has those of its first and last stage, which read tokens (None on other ranks).
    """

    parallel: ParallelSection
    world_size: int
    world_rank: int
    tp_rank: int
    tp_group: dist.ProcessGroup
    cp_rank: int
    cp_group: dist.ProcessGroup
    pp_rank: int
    dp_size: int
    dp_rank: int
    dp_cp_group: dist.ProcessGroup
    ep_rank: int
    etp_rank: int
    expert_copy: int  # this rank's index among the ranks with the same experts
    cpu_group: dist.ProcessGroup
    leaders: dist.ProcessGroup | None
    replica: dist.ProcessGroup
    ends: dist.ProcessGroup | None
    process_groups: ProcessGroupCollection

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis by its name, as records and checkpoints have it."""
        p = self.parallel
        return dict(tp=p.tp, cp=p.cp, pp=p.pp, dp=self.dp_size, ep=p.ep)

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank embeds the tokens (with its first chunk)."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes logits (with its last chunk)."""
        return self.pp_rank == self.parallel.pp - 1

    @property
    def is_dp_leader(self) -> bool:
        """Whether this rank represents its replica, for example towards the engine."""
        return self.tp_rank == 0 and self.cp_rank == 0 and self.pp_rank == 0

    @property
    def dp_cp_size(self) -> int:
        """Number of ranks that hold the same weights."""
        return self.dp_size * self.parallel.cp

    @property
    def dp_cp_rank(self) -> int:
        """This rank's index among the ranks that hold the same weights."""
        return self.dp_rank * self.parallel.cp + self.cp_rank

    def chunk_is_first(self, chunk: int) -> bool:
        """Whether model chunk `chunk` of this rank embeds the tokens."""
        return self.is_first_stage and chunk == 0

    def chunk_is_last(self, chunk: int) -> bool:
        """Whether model chunk `chunk` of this rank computes logits."""
        return self.is_last_stage and chunk == self.parallel.vpp - 1

    def leader_of(self, dp_rank: int, stage: int = 0) -> int:
        """Return the world rank of the leader of replica `dp_rank`, or of the first rank of its pipeline stage."""
        return (stage * self.dp_size + dp_rank) * self.parallel.tp * self.parallel.cp

    def all_reduce(self, values: Tensor, reduction: Reduction = "sum", within: float | None = None) -> Tensor:
        """Return `values`, on the host, reduced over the world: the same bits on every rank. Collective.

        `reduction` names an operation, or merges two tensors, the first one of lower ranks.

        Raises LateRanks when some ranks have not joined `within` this many seconds; the world is then unusable. Without
        `within` the world's own timeout applies.
        """
        if within is None:
            return host_messages.all_reduce(values, reduction, self.cpu_group)
        joined = time.time()
        try:
            return host_messages.all_reduce(values, reduction, self.cpu_group, within)
        except RuntimeError as error:
            late = host_messages.late_ranks(self.world_rank, self.world_size, joined, within)
            raise LateRanks(late, within) from error

    def broadcast_object(self, obj: Any, source: int = 0) -> Any:
        """Return the `obj`, which must be picklable, of rank `source`. Collective."""
        objects = [obj]
        dist.broadcast_object_list(objects, src=source, group=self.cpu_group)
        return objects[0]

    def all_gather_objects(self, obj: Any, within: float | None = None) -> list[Any]:
        """Gather `obj`, which must be picklable, from every rank of the world, in rank order. Collective.

        Every rank receives as many bytes as the largest object has, times the world. Not for a training step. Raises
        LateRanks as `all_reduce` does.
        """
        if within is not None:
            self.all_reduce(torch.tensor(0), within=within)
        everyone = [None] * self.world_size
        dist.all_gather_object(everyone, obj, group=self.cpu_group)
        return everyone

    def barrier(self) -> None:
        """Wait for every rank of the world."""
        dist.barrier(group=self.cpu_group)

    def release(self) -> None:
        """Destroy the groups of the axes, so that another layout can be initialised in the same world."""
        own = self.cpu_group, self.replica, self.leaders, self.ends
        groups = (*(parallel_state._global_process_group_list or ()), *own)
        for group in dict.fromkeys(groups):  # in the order of creation, which is that of every rank
            if group in distributed_c10d._world.pg_map and group is not dist.group.WORLD:
                dist.destroy_process_group(group)  # else its threads and connections stay
        parallel_state.destroy_model_parallel()
        # Megatron-Core 0.19 keeps some groups. In a fork of this process their destructors would wait for threads that
        # a fork lacks.
        left = [name for name, value in vars(parallel_state).items() if isinstance(value, dist.ProcessGroup)]
        vars(parallel_state).update(dict.fromkeys(left))

    def close(self) -> None:
        """Destroy all process groups. Exiting without this may abort in the communication library's destructor."""
        self.release()
        if dist.is_initialized():
            dist.destroy_process_group()


class LateRanks(TimeoutError):
    """Raised when some ranks missed a timeout. On rank 0 `ranks` holds their numbers; on other ranks it is empty."""

    def __init__(self, ranks: list[int], seconds: float):
        self.ranks = ranks
        who = f"rank {', '.join(map(str, ranks))}" if ranks else "rank 0, or a rank that rank 0 reports,"
        super().__init__(f"{who} did not join within {seconds:g} s")


def init_layout(parallel: ParallelSection, seed: int = 42) -> Layout:
    """Create the process groups of this job and seed each rank's generators.

    The world comes from a launcher with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, from an existing default process
    group, or is this process. Raises ValueError when tp x cp x pp or ep x etp x pp does not divide it.
    """
    timeout = timedelta(minutes=parallel.timeout_minutes)
    device.select_local_device()
    if not dist.is_initialized():
        join_world(device.backend(), timeout)
    if problems := parallel.world_problems(dist.get_world_size()):
        raise ProblemError(*problems)
    with changed(LAZY_CONNECTIONS):
        # Megatron sets a timeout for every subgroup and ignores the world's.
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tp,
            pipeline_model_parallel_size=parallel.pp,
            context_parallel_size=parallel.cp,
            virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
            expert_model_parallel_size=parallel.ep,
            expert_tensor_parallel_size=parallel.expert_tp,
            distributed_timeout_minutes=parallel.timeout_minutes,
        )
        layout = _describe(parallel, timeout)
    model_parallel_cuda_manual_seed(seed)
    return layout


def _describe(parallel: ParallelSection, timeout: timedelta) -> Layout:
    ps, world_size, world_rank = parallel_state, dist.get_world_size(), dist.get_rank()
    dp_size, dp_rank = ps.get_data_parallel_world_size(), ps.get_data_parallel_rank()
    cpu_group, replicas = _cpu_world(timeout), _replica_ranks(parallel, world_size, dp_size)
    leaders = [ranks[0] for ranks in replicas]
    # Every rank calls new_group for every group: torch numbers the groups by its calls. 10 us for a group of others.
    replica_groups = [_host_group(ranks, cpu_group, timeout) for ranks in replicas]
    leaders_group = _host_group(leaders, cpu_group, timeout)
    tp_cp, ends = parallel.tp * parallel.cp, replica_groups
    if parallel.pp > 2:
        ends = [_host_group([*ranks[:tp_cp], *ranks[-tp_cp:]], cpu_group, timeout) for ranks in replicas]
    return Layout(
        parallel=parallel,
        world_size=world_size,
        world_rank=world_rank,
        tp_rank=ps.get_tensor_model_parallel_rank(),
        tp_group=ps.get_tensor_model_parallel_group(),
        cp_rank=ps.get_context_parallel_rank(),
        cp_group=ps.get_context_parallel_group(),
        pp_rank=ps.get_pipeline_model_parallel_rank(),
        dp_size=dp_size,
        dp_rank=dp_rank,
        dp_cp_group=ps.get_data_parallel_group(with_context_parallel=True),
        ep_rank=ps.get_expert_model_parallel_rank(),
        etp_rank=ps.get_expert_tensor_parallel_rank(),
        expert_copy=ps.get_expert_data_parallel_rank(),
        cpu_group=cpu_group,
        leaders=leaders_group if world_rank in leaders else None,
        replica=replica_groups[dp_rank],
        ends=ends[dp_rank] if ps.get_pipeline_model_parallel_rank() in (0, parallel.pp - 1) else None,
        process_groups=ProcessGroupCollection.use_mpu_process_groups(),
    )


def _cpu_world(timeout: timedelta) -> dist.ProcessGroup:
    """Return a gloo group over all ranks: the default group if it uses gloo, else a new one."""
    world = dist.group.WORLD
    if dist.get_backend() == "gloo":
        assert world is not None, "a world with a backend has a default group"
        return world
    return dist.new_group(timeout=timeout, backend="gloo")


def _replica_ranks(parallel: ParallelSection, world_size: int, dp_size: int) -> list[list[int]]:
    """Return the world ranks of each replica, its leader first."""
    tp_cp = parallel.tp * parallel.cp
    stages = range(0, world_size, dp_size * tp_cp)
    return [[stage + dp_rank * tp_cp + i for stage in stages for i in range(tp_cp)] for dp_rank in range(dp_size)]


def _host_group(ranks: list[int], cpu_group: dist.ProcessGroup, timeout: timedelta) -> dist.ProcessGroup:
    """Return a gloo group of `ranks`, which is `cpu_group` if these are the world. Collective over the world."""
    world = len(ranks) == dist.get_world_size(cpu_group)
    return cpu_group if world else dist.new_group(ranks, timeout=timeout, backend="gloo")
