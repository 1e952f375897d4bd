"""`run_ranks` for tests: `results = run_ranks(function, 4, *args)`. The ranks are forks of pytest's process. Start threads (loading with
transformers, servers) and process groups in a rank, never in pytest's process."""

from __future__ import annotations

import torch

from megagrpo.parallel.spawn import RankFailed as RankFailed
from megagrpo.parallel.spawn import run_ranks as run_ranks

torch.set_num_threads(1)  # a fork cannot use its parent's OpenMP pool, so the parent must have none
