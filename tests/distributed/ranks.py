"""`run_ranks` for tests: `results = run_ranks(function, 4, *args)`. What starts threads (loading with transformers, servers) or a process
group belongs into a rank, not into pytest's own process, which the ranks are forks of."""

from __future__ import annotations

import torch

from megagrpo.parallel.spawn import RankFailed as RankFailed
from megagrpo.parallel.spawn import run_ranks as run_ranks

torch.set_num_threads(1)  # a fork cannot use its parent's OpenMP pool, so there must be none
