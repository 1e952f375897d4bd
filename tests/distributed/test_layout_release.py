"""A layout that is released leaves no process groups, threads or connections."""

import os

from ranks import run_ranks

from megagrpo.config import ParallelSection

SIZES = [dict(tp=2, pp=2), dict(ep=2, etp=2), dict(pp=4), dict(cp=2)]


def threads_of_layouts(times: int) -> list[int]:
    """Threads of this rank after each round of layouts in the same world."""
    from megagrpo.platform.parallel.layout import init_layout

    counts = []
    for _ in range(times):
        for sizes in SIZES:
            layout = init_layout(ParallelSection(**sizes))
            layout.barrier()
            layout.release()
            layout.release()  # a second one finds nothing
        counts.append(len(os.listdir("/proc/self/task")))
    layout.close()
    return counts


def test_a_released_layout_keeps_no_threads():
    for first, *later in run_ranks(threads_of_layouts, 4, 3):
        assert max(later) <= first, (first, later)
