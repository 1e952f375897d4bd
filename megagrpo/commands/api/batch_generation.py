"""Generates all responses to a list of prompts, with servers that are started for it or those of `rollout.urls`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megagrpo.config import ConfigError, RunConfig
from megagrpo.data.tokens.row_settings import RowReader
from megagrpo.data.tokens.sampling import sampling_of
from megagrpo.data.tokens.tokenizer import read_chat_template, tokenizer_of
from megagrpo.engine.http.protocol import derive_seed
from megagrpo.engine.servers.serving import Serving
from megagrpo.families.hf_config import load_hf_config
from megagrpo.platform.process.terminal import warn
from megagrpo.types import Prompt, SamplingParams


def respond(
    config: RunConfig,
    messages: Sequence[Any],
    n: int,
    checkpoint: str | None,
    options: Mapping[str, Any],
    adapter: str | None = None,
) -> list[list[str]]:
    """Return `n` texts for each of `messages`, texts or conversations. `options` are sampling options and `seed`, in
    place of the config's. Raises ConfigError when the checkpoint does not exist or a prompt is too long."""
    try:
        with Serving(config, warn) as serving:
            folder = serving.find(checkpoint, adapter)
            tokenizer = tokenizer_of(config, folder)
            template = read_chat_template(config.data.chat_template)
            prompts = [
                Prompt(i, tokenizer.render(text, config.data.system_prompt, template), text)
                for i, text in enumerate(messages)
            ]
            model = load_hf_config(folder)
            RowReader(config, tokenizer, model.vocab_size).check_run()
            sampling = with_options(sampling_of(config.rollout, tokenizer), options)
            most = config.longest_sequence if config.rollout.urls else model.max_positions
            limit = _longest_sequence(prompts, sampling.max_tokens, most)
            serving.start(limit)
            seed = config.run.seed if options.get("seed") is None else options["seed"]
            calls = [(prompt, derive_seed(seed, prompt.prompt_id, i)) for prompt in prompts for i in range(n)]
            limits = [
                replace(sampling, max_tokens=min(sampling.max_tokens, limit - len(prompt.token_ids)))
                for prompt, _ in calls
            ]
            rollouts = serving.engine(tokenizer).extend([prompt for prompt, _ in calls], limits, [s for _, s in calls])
    except ValueError as error:
        raise ConfigError(str(error)) from error
    texts = [rollout.text for rollout in rollouts]
    return [texts[i : i + n] for i in range(0, len(texts), n)]


def _longest_sequence(prompts: Sequence[Prompt], max_tokens: int, most: int) -> int:
    """Return the token limit of the longest prompt plus response. Raises ValueError without room for a response."""
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    num_tokens = len(longest.token_ids)
    limit = min(num_tokens + max_tokens, most)
    if num_tokens >= limit:
        raise ValueError(
            f"prompts.{longest.prompt_id}: has {num_tokens} tokens, and the model or its server takes {limit}, "
            "responses included; shorten it"
        )
    return limit


def with_options(trained: SamplingParams, options: Mapping[str, Any]) -> SamplingParams:
    """Return the training's sampling with the options in place of its values; None stands for an option left out."""
    given = {name: value for name, value in options.items() if value is not None}
    of_sampling = {name: given[name] for name in ("temperature", "max_tokens") if name in given}
    cuts = {name: given[name] for name in ("top_p", "top_k", "min_p") if name in given}
    return replace(trained, **of_sampling, truncation=replace(trained.truncation, **cuts))
