"""The order of the prompts of 200 tasks, which every rank computes."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator

from benchmarks.scaling.table import Point, Series
from megagrpo.config import DataSection, RunConfig, Task
from megagrpo.data.sources.prompt_order import PromptOrder
from megagrpo.data.sources.task_mixture import Mixture
from megagrpo.train_types import TrainState
from megagrpo.trainer.run_inputs import check_rows

TASKS, DRAWN = 200, 1024
ROWS = (1_000_000, 10_000_000, 100_000_000)  # of the whole run


def series() -> Iterator[Series]:
    """Yield the time to draw, save and resume the prompts of a step, and the memory that the order then takes."""
    drawn = Series("order", f"{DRAWN} prompts of {TASKS} tasks", "rows")
    data = DataSection(train={"source": "rows.jsonl"})
    config = RunConfig.model_construct(data=data)
    tasks = [Task(f"task{i}", 1.0 + i % 7, config, {}) for i in range(TASKS)]
    for rows in ROWS:

        def draw(rows: int = rows) -> tuple[float, Mixture]:
            sizes = [rows // 2 if i == 0 else rows // 2 // TASKS for i in range(TASKS)]
            orders = [PromptOrder(range(size), data, seed=i) for i, size in enumerate(sizes)]
            begun, state = time.perf_counter(), TrainState()
            (mixture := Mixture(tasks, orders, seed=0)).next(DRAWN)
            mixture.store(state)
            mixture.restore(state)
            for order in orders:
                check_rows("data.train", range(len(order)), order.rows)
            return time.perf_counter() - begun, mixture

        seconds, _ = draw()
        tracemalloc.start()
        _, held = draw()
        drawn.points.append(Point(rows, seconds, tracemalloc.get_traced_memory()[0]))
        tracemalloc.stop()
        del held
    drawn.note = "the first task has half of the rows; the rows of tasks with up to 16,384 are sorted in each epoch"
    yield drawn
