"""Trains a model on pairs of responses, a chosen and a rejected one, without vLLM.

    megagrpo dpo megagrpo:quickstart_dpo
    megagrpo dpo my_dpo.yaml algorithm.loss_type=simpo algorithm.beta=2
    megagrpo dpo my_dpo.yaml --resume

It is `megagrpo train` with one of the losses on pairs as `algorithm.loss_type`, by default sigmoid, the loss of DPO:
the same layouts, checkpoints and jobs. After the last step the run's folder holds the trained model as a Hugging Face
folder, RUN/model, which `model.path` of another run names.
"""

from __future__ import annotations

import argparse

from megagrpo.commands.arguments.config_arguments import add_config, add_resume, method_words


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megagrpo dpo`."""
    add_config(parser)
    add_resume(parser)


def run(options: argparse.Namespace) -> int:
    """Train, and return the exit code. Raises ConfigError for a config that cannot run here."""
    from megagrpo.commands.api.train_call import run_training

    return run_training(options.config, method_words(options, "dpo", "sigmoid"))
