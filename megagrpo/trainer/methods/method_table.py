"""One row per method: what it differs in, and what builds its training loop. `Loss.method` names the row."""

from collections.abc import Callable
from functools import partial

from megagrpo.config import RunConfig
from megagrpo.trainer import wiring
from megagrpo.trainer.methods import preference, reward_training, supervised
from megagrpo.trainer.methods.row_wiring import Method, build_rows
from megagrpo.trainer.rank import Build

ROW_METHODS: dict[str, Callable[[RunConfig], Method]] = {
    "sft": supervised.method,
    "dpo": preference.method,
    "reward": reward_training.method,
}
BUILDERS: dict[str, Build] = {"grpo": wiring.build}
BUILDERS |= {name: partial(build_rows, method) for name, method in ROW_METHODS.items()}
