"""Fine-tunes a model on conversations, or on prompts with responses, without vLLM.

    megagrpo sft megagrpo:quickstart_sft
    NPROC=4 megagrpo sft my_sft.yaml parallel.tp=2 train.learning_rate=1e-5
    megagrpo sft my_sft.yaml --resume

It is `megagrpo train` with `algorithm.loss_type: sft`: the same layouts, checkpoints and jobs. After the last step the
run's folder holds the trained model as a Hugging Face folder, RUN/model, which `model.path` of another run names.
"""

from __future__ import annotations

import argparse

from megagrpo.commands.arguments.config_arguments import add_config, add_resume, method_words


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megagrpo sft`."""
    add_config(parser)
    add_resume(parser)


def run(options: argparse.Namespace) -> int:
    """Train, and return the exit code. Raises ConfigError for a config that cannot run here."""
    from megagrpo.commands.api.train_call import run_training

    return run_training(options.config, method_words(options, "sft", "sft"))
