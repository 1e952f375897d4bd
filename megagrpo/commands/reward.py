"""Trains a reward model on pairs of responses, a chosen and a rejected one, without vLLM.

    megagrpo reward megagrpo:quickstart_reward
    megagrpo reward my_reward.yaml algorithm.loss_args={center:0.01}

It is `megagrpo train` with `algorithm.loss_type: bradley_terry`: the same layouts, checkpoints and jobs. After the last
step RUN/model is a folder that transformers loads as AutoModelForSequenceClassification, and that `rewards.functions`
of another run names as model:RUN/model.
"""

from __future__ import annotations

import argparse

from megagrpo.commands.arguments.config_arguments import add_config, add_resume, method_words


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megagrpo reward`."""
    add_config(parser)
    add_resume(parser)


def run(options: argparse.Namespace) -> int:
    """Train, and return the exit code. Raises ConfigError for a config that cannot run here."""
    from megagrpo.commands.api.train_call import run_training

    return run_training(options.config, method_words(options, "reward", "bradley_terry"))
