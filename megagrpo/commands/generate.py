"""`megagrpo generate`: prompts a model, a checkpoint or an adapter, once or in a conversation."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from megagrpo.config import ConfigError, RunConfig, load_config
from megagrpo.data.tokenizer import Tokenizer, load_tokenizer, read_chat_template
from megagrpo.engine.protocol import Engine, derive_seed
from megagrpo.families.config import load_hf_config
from megagrpo.process.terminal import show, warn
from megagrpo.rollout.collector import sampling_params
from megagrpo.servers.serving import Serving, exit_code
from megagrpo.types import Prompt, SamplingParams

USAGE = """\
megagrpo generate CONFIG_OR_MODEL [PROMPT | -] [--interactive] [--checkpoint C] [--adapter FOLDER] [--set key=value ...]
                  [--temperature T] [--top-p P] [--top-k K] [--min-p P] [--max-tokens N] [--seed S] [--system TEXT]

CONFIG_OR_MODEL is the YAML of a run, whose template, system prompt and sampling are used, or a model as in model.path. - reads the prompt
from standard input; --interactive, also what happens without a prompt, holds a conversation (/reset starts over, /exit or Ctrl-D ends it).
--checkpoint is latest, best, a checkpoint of a run, or a Hugging Face folder; --adapter a LoRA adapter as PEFT saves it. --set replaces
values of the config. Responses go to standard output, everything else to standard error. Exit code 2: the config or the command line is
wrong."""
PROMPT_ROOM = 2048  # prompt tokens of a conversation when there is no config


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}\n\n{USAGE}")


@dataclass
class Chat:
    """A conversation: `say` returns the answer to a text and stores both."""

    engine: Engine
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
            raise ValueError(f"the conversation has {len(token_ids)} tokens and the server holds {self.limit}; start over with /reset")
        sampling = replace(self.sampling, max_tokens=min(room, self.sampling.max_tokens))
        seed = derive_seed(self.seed, self.turns)
        answer = self.engine.generate([Prompt(0, token_ids, prompt)], 1, sampling, seed)[0][0].text
        self.messages, self.turns = [*history, {"role": "assistant", "content": answer}], self.turns + 1
        return answer

    def reset(self) -> None:
        """Clear the conversation."""
        self.messages = []


def main(arguments: list[str]) -> int:
    """Run `megagrpo generate`; return 0, 1 when a server failed, 128 + the signal's number after a signal.

    Raises ConfigError for a wrong command line or config.
    """
    parsed = parse(arguments)
    if parsed is None:
        print(USAGE)
        return 0
    return exit_code(lambda: answer(parsed), "generation")


def answer(parsed: argparse.Namespace) -> None:
    """Start the servers and run the prompt or the conversation. Raises ConfigError for mistakes in the command line or config."""
    try:
        with Serving(parsed.config, warn) as serving:
            chat = connect(serving, parsed)
            if parsed.prompt is None:
                converse(chat)
            else:
                _print(chat.say(sys.stdin.read().strip() if parsed.prompt == "-" else parsed.prompt))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def parse(arguments: list[str]) -> argparse.Namespace | None:
    """Parse the command line; its config becomes the attribute `config`. Returns None after --help."""
    parser = _Parser(prog="megagrpo generate", add_help=False)
    parser.add_argument("model", nargs="?")
    parser.add_argument("prompt", nargs="?")
    parser.add_argument("--interactive", action="store_true")
    for text in ("checkpoint", "adapter", "system"):
        parser.add_argument(f"--{text}")
    for number in ("temperature", "top-p", "min-p"):
        parser.add_argument(f"--{number}", type=float)
    for count in ("top-k", "max-tokens", "seed"):
        parser.add_argument(f"--{count}", type=int)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("-h", "--help", action="store_true")
    parsed = parser.parse_intermixed_args(arguments)
    if parsed.help:
        return None
    if parsed.model is None:
        parser.error("needs the YAML of a run, or a model")
    if parsed.interactive and parsed.prompt is not None:
        parser.error(f"--interactive: cannot be combined with the prompt {parsed.prompt!r}; leave one out")
    for name, fits, rule in (
        ("temperature", lambda value: value >= 0, "0 (greedy) or more"),
        ("top_p", lambda value: 0 < value <= 1, "above 0, 1 at most"),
        ("min_p", lambda value: 0 <= value <= 1, "from 0 to 1"),
        ("top_k", lambda value: value >= 0, "0 (all tokens) or more"),
        ("max_tokens", lambda value: value > 0, "above 0"),
        ("seed", lambda value: value >= 0, "0 or more"),
    ):
        if (value := getattr(parsed, name)) is not None and not fits(value):
            raise ConfigError(f"--{name.replace('_', '-')}: must be {rule} (got {value})")
    parsed.is_config = parsed.model.endswith((".yaml", ".yml"))
    parsed.config = load_config(parsed.model, parsed.set) if parsed.is_config else _config_of(parsed)
    return parsed


def _config_of(parsed: argparse.Namespace) -> RunConfig:
    """Return a config with the model's name and defaults otherwise."""
    if parsed.set:
        raise ConfigError("--set: replaces values of a config; CONFIG_OR_MODEL is a model")
    if parsed.checkpoint:
        raise ConfigError("--checkpoint: needs the config of its run; or name the checkpoint's Hugging Face folder as the model")
    values: dict[str, Any] = {"model": {"path": parsed.model}, "data": {"train": {"source": "none"}}}
    return RunConfig.model_validate(values | {"rewards": {"functions": [{"function": "format"}]}})


def connect(serving: Serving, parsed: argparse.Namespace) -> Chat:
    """Start the servers and return a conversation with them. The config's training settings fill in what the command line does not set."""
    config: RunConfig = parsed.config
    rollout, seed = config.rollout, config.run.seed if parsed.seed is None else parsed.seed
    folder = serving.find(parsed.checkpoint, parsed.adapter)
    tokenizer = load_tokenizer(config.model.tokenizer or folder, folder)
    template = read_chat_template(config.data.chat_template)
    max_tokens = parsed.max_tokens or rollout.max_completion_length
    limit = config.longest_sequence
    if not rollout.urls:
        wanted = max(limit, (rollout.max_prompt_length if parsed.is_config else PROMPT_ROOM) + max_tokens)
        limit = min(wanted, load_hf_config(folder).max_positions)
    serving.start(limit)
    trained = sampling_params(rollout, tokenizer.eos_token_ids)
    chosen = {name: getattr(parsed, name) for name in ("top_p", "top_k", "min_p") if getattr(parsed, name) is not None}
    temperature = trained.temperature if parsed.temperature is None else parsed.temperature
    sampling = replace(trained, temperature=temperature, max_tokens=max_tokens, truncation=replace(trained.truncation, **chosen))
    system = config.data.system_prompt if parsed.system is None else parsed.system
    return Chat(serving.engine(tokenizer), tokenizer, sampling, system, template, limit, seed)


def _print(response: str) -> None:
    """Print a response: unchanged to a file or a program, made printable on a terminal."""
    if sys.stdout.isatty():
        show(response)
    else:
        print(response, flush=True)


def converse(chat: Chat) -> None:
    """Answer line by line until the input ends. An error is printed, and the conversation goes on."""
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
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
