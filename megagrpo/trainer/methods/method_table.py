"""One row per method: what builds its training loop. `Loss.method` names the row."""

from megagrpo.trainer import wiring
from megagrpo.trainer.methods import preference, reward_training, supervised
from megagrpo.trainer.rank import Build

BUILDERS: dict[str, Build] = {
    "grpo": wiring.build,
    "sft": supervised.build,
    "dpo": preference.build,
    "reward": reward_training.build,
}
