"""The plan of one weight sync of DeepSeek-V3, from 1,024 trainer ranks to engines of 16 workers (tp 16, ep 16)."""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks.scaling.loader_slices import EngineLayout
from benchmarks.scaling.sync_size import LINK_GB_PER_S, plan_sync
from benchmarks.scaling.table import Point, Series, peak_bytes, reset_peak
from megagrpo.config import ParallelSection
from megagrpo.families.hf_config import load_hf_config
from megagrpo.families.weight_sources import shape_folder

RANKS, ENGINES = 1024, (8, 64)
LAYOUT = ParallelSection(tp=8, pp=16, ep=64, etp=1, pipeline_layers=[3, *[4] * 14, 2])


def series() -> Iterator[Series]:
    """Yield the time and memory of making the plan, and the seconds of the sync that it predicts."""
    model = load_hf_config(shape_folder("deepseek-ai/DeepSeek-V3"))
    making = Series("weight sync", f"making the plan, {RANKS:,} ranks", "engines")
    syncing = Series("weight sync", f"the sync itself, {LINK_GB_PER_S:g} GB/s a link", "engines")
    for engines in ENGINES:
        before, begun = reset_peak(), time.perf_counter()
        made = plan_sync(model, LAYOUT, RANKS, EngineLayout(tp=16, ep=16, servers=engines), 2)
        making.points.append(Point(engines, time.perf_counter() - begun, peak_bytes() - before))
        seconds, busiest = made.seconds(LINK_GB_PER_S)
        moved = made.transfers.total * made.element_bytes
        syncing.points.append(Point(engines, seconds, moved, computed=True))
        sent, received = made.transfers.sent(RANKS), made.transfers.received(made.num_workers)
        syncing.note += (
            f"{engines} engines: {busiest} is the busiest; largest over mean: senders {sent.max() / sent.mean():.2f}, "
            f"receivers {received.max() / received.mean():.2f}; a rank sends {sent.max() / received.max():.2f} times "
            "what a worker receives. "
        )
    yield making
    yield syncing
