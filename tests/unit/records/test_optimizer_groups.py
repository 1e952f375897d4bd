"""The parameter groups of a resumed optimizer follow the config, and are written as those of a run that never
stopped."""

import pickle

from megagrpo.config import TrainSection
from megagrpo.records.checkpoints.trained_state import follow_config

TRAIN = TrainSection(learning_rate=1e-4, adam_beta2=0.95)


def fresh() -> dict:
    """The state that a new optimizer and its schedule save: groups share objects, and names are literals."""
    betas = (TRAIN.adam_beta1, TRAIN.adam_beta2)
    group = dict(max_lr=TRAIN.learning_rate, min_lr=TRAIN.min_learning_rate, betas=betas, eps=TRAIN.adam_epsilon)
    return {
        "optimizer": {"param_groups": [group | {"wd_mult": 1.0}, group | {"wd_mult": 0.0}]},
        "scheduler": schedule(),
    }


def schedule() -> dict:
    return {"max_lr": TRAIN.learning_rate, "min_lr": TRAIN.min_learning_rate, "lr_decay_style": "linear"}


def test_a_resumed_optimizer_is_saved_in_the_same_bytes():
    loaded = pickle.loads(pickle.dumps(fresh()))["optimizer"]
    follow_config(loaded, TRAIN)
    assert pickle.dumps({"optimizer": loaded, "scheduler": schedule()}) == pickle.dumps(fresh())


def test_groups_of_several_optimizers_take_the_config_s_options_and_keep_the_others():
    old = TrainSection(learning_rate=1.0, adam_epsilon=1.0)
    saved = [
        {"param_groups": [{"max_lr": old.learning_rate, "momentum": None, "wd_mult": 0.0}]},
        {0: {"param_groups": [{"eps": 1.0}]}},
    ]
    follow_config(saved, TRAIN)
    assert saved[0]["param_groups"] == [{"max_lr": 1e-4, "momentum": None, "wd_mult": 0.0}]
    assert saved[1][0]["param_groups"] == [{"eps": TRAIN.adam_epsilon}]
