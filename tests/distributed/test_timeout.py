"""`parallel.timeout_minutes` is the timeout of the process groups of the axes."""

import torch
from ranks import run_ranks

from megagrpo.config import ParallelSection
from megagrpo.platform.parallel.layout import init_layout


def _minutes(minutes):
    layout = init_layout(ParallelSection(tp=2, timeout_minutes=minutes))
    timeout = layout.tp_group._get_backend(torch.device("cpu")).options._timeout
    layout.close()
    return timeout.total_seconds() / 60


def test_collectives_end_after_the_timeout_of_the_config():
    assert run_ranks(_minutes, 2, 7) == [7.0, 7.0]
