"""Layouts of planned worlds: the layout of each of, say, a thousand ranks, in one process and without communication."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

from torch.distributed import distributed_c10d

from megagrpo.config import ParallelSection
from megagrpo.platform.parallel.layout import Layout


@dataclass(frozen=True)
class Group:
    """A stand-in for a process group while a model is built. It has a size and this rank's index, no communication."""

    num_ranks: int
    index: int

    def size(self) -> int:
        return self.num_ranks

    def rank(self) -> int:
        return self.index


def imagined_layouts(alone: Layout, parallel: ParallelSection, world_size: int) -> Iterator[tuple[list[int], Layout]]:
    """Yield (ranks, layout) for each set of ranks that hold the same weights, stage by stage.

    `alone` is this process's own layout of one rank. Ranks are numbered tp, cp, dp, pp from fastest to slowest; a
    stage's ranks are etp, ep, copies for the experts.
    """
    a_stage = world_size // parallel.pp
    without_cp = parallel.model_copy(update=dict(cp=1))  # context parallelism shards no weight
    for stage in range(parallel.pp):
        same: dict[tuple[int, int, int], list[int]] = {}
        for index in range(a_stage):
            coordinates = index % parallel.tp, index // parallel.expert_tp % parallel.ep, index % parallel.expert_tp
            same.setdefault(coordinates, []).append(stage * a_stage + index)
        for (tp_rank, ep_rank, etp_rank), ranks in same.items():
            tp, ep = _known(parallel.tp, tp_rank), _known(parallel.ep, ep_rank)
            etp = _known(parallel.expert_tp, etp_rank)
            yield (
                ranks,
                replace(
                    alone,
                    parallel=without_cp,
                    world_size=world_size,
                    world_rank=ranks[0],
                    tp_rank=tp_rank,
                    pp_rank=stage,
                    ep_rank=ep_rank,
                    etp_rank=etp_rank,
                    process_groups=_groups(tp, _known(parallel.pp, stage), ep, etp),
                ),
            )


def _known(num_ranks: int, index: int) -> Group:
    """Return a group that is registered in torch's group table, where Megatron looks up this process's rank. torch has
    no public way to register it."""
    group = Group(num_ranks, index)
    cast("dict[object, dict[int, int]]", distributed_c10d._world.pg_group_ranks)[group] = {0: index}
    return group


def _groups(tp: Group, pp: Group, ep: Group, etp: Group) -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection

    one = _known(1, 0)
    tp_ep = _known(etp.num_ranks * ep.num_ranks, ep.index * etp.num_ranks + etp.index)
    groups = dict.fromkeys(("cp", "dp", "dp_cp", "expt_dp", "gtp_remat", "expt_gtp_remat", "embd", "pos_embd"), one)
    return ProcessGroupCollection(**groups, tp=tp, tp_cp=tp, pp=pp, mp=tp, ep=ep, expt_tp=etp, tp_ep=tp_ep, tp_dp_cp=tp)
