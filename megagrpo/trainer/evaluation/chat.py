"""Prompts a model, a checkpoint or an adapter, once or in a conversation: `megagrpo generate`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megagrpo.config import ConfigError, RunConfig
from megagrpo.data.tokens.row_settings import RowReader
from megagrpo.data.tokens.sampling import sampling_of
from megagrpo.data.tokens.tokenizer import Tokenizer, read_chat_template, tokenizer_of
from megagrpo.engine.client import VllmEngine
from megagrpo.engine.http.protocol import derive_seed
from megagrpo.engine.servers.serving import Serving
from megagrpo.families.hf_config import load_hf_config
from megagrpo.platform.process.terminal import show, warn, write_output
from megagrpo.types import Prompt, SamplingParams

PROMPT_ROOM = 2048  # prompt tokens of a conversation when there is no config


@dataclass
class Chat:
    """A conversation: `say` returns the answer to a text and stores both."""

    engine: VllmEngine
    tokenizer: Tokenizer
    sampling: SamplingParams
    system: str | None
    template: str | None
    limit: int  # greatest number of tokens of the whole conversation
    seed: int
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: int = 0

    def say(self, text: str) -> str:
        """Return the answer. Raises ValueError when the conversation is too long or cannot be rendered."""
        history = [*self.messages, {"role": "user", "content": text}]
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        # Without a template a prompt is plain text, and there is no conversation.
        prompt = text if len(history) == 1 else [*system, *history]
        token_ids = self.tokenizer.render(prompt, self.system, self.template)
        room = self.limit - len(token_ids)
        if room < 1:
            raise ValueError(
                f"the conversation has {len(token_ids)} tokens and the server holds {self.limit}; start over with "
                "/reset"
            )
        sampling = replace(self.sampling, max_tokens=min(room, self.sampling.max_tokens))
        seed = derive_seed(self.seed, self.turns)
        answer = self.engine.generate([Prompt(0, token_ids, prompt)], 1, sampling, seed)[0][0].text
        self.messages, self.turns = [*history, {"role": "assistant", "content": answer}], self.turns + 1
        return answer

    def reset(self) -> None:
        """Clear the conversation."""
        self.messages = []


def answer(options: argparse.Namespace) -> None:
    """Start the servers and run the prompt or conversation. `options` are those of `megagrpo generate` with the config.

    Raises ConfigError for mistakes in the command line or config.
    """
    try:
        with Serving(options.config, warn) as serving:
            chat = connect(serving, options)
            if options.prompt is None:
                converse(chat)
            else:
                _print(chat.say(sys.stdin.read().strip() if options.prompt == "-" else options.prompt))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def connect(serving: Serving, options: argparse.Namespace) -> Chat:
    """Start the servers and return a conversation. The config's training settings fill gaps of the command line."""
    config: RunConfig = options.config
    rollout, seed = config.rollout, config.run.seed if options.seed is None else options.seed
    folder = serving.find(options.checkpoint, options.adapter)
    tokenizer = tokenizer_of(config, folder)
    template = read_chat_template(config.data.chat_template)
    model = load_hf_config(folder)
    RowReader(config, tokenizer, model.vocab_size).check_run()
    sampling = with_options(sampling_of(rollout, tokenizer), vars(options))
    limit = config.longest_sequence
    if not rollout.urls:
        wanted = max(limit, (rollout.max_prompt_length if options.is_config else PROMPT_ROOM) + sampling.max_tokens)
        limit = min(wanted, model.max_positions)
    serving.start(limit)
    system = config.data.system_prompt if options.system is None else options.system
    return Chat(serving.engine(tokenizer), tokenizer, sampling, system, template, limit, seed)


def with_options(trained: SamplingParams, options: Mapping[str, Any]) -> SamplingParams:
    """Return the training's sampling with the options in place of its values; None stands for an option left out."""
    given = {name: value for name, value in options.items() if value is not None}
    of_sampling = {name: given[name] for name in ("temperature", "max_tokens") if name in given}
    cuts = {name: given[name] for name in ("top_p", "top_k", "min_p") if name in given}
    return replace(trained, **of_sampling, truncation=replace(trained.truncation, **cuts))


def _print(response: str) -> None:
    """Print a response: unchanged to a file or a program, made printable on a terminal."""
    show(response) if sys.stdout.isatty() else write_output(f"{response}\n")


def converse(chat: Chat) -> None:
    """Answer line by line until the input ends. An error is printed, and the conversation goes on."""
    while True:
        write_output("> ", sys.stderr)
        line = sys.stdin.readline()
        text = line.strip()
        if not line or text == "/exit":
            return
        if text == "/reset":
            chat.reset()
        elif text:
            try:
                _print(chat.say(text))
            except ValueError as error:
                warn(error)
