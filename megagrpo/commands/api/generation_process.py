"""The process behind `Run.generate`: `main([REQUEST, ANSWER])` reads a JSON file and writes one.

The request has the config's path, prompts, the number of responses per prompt, the checkpoint and sampling options; the
answer is a list of texts per prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megagrpo.config import ConfigError, RunConfig, load_config
from megagrpo.data.tokenizer import read_chat_template, tokenizer_of
from megagrpo.engine.protocol import derive_seed
from megagrpo.engine.servers.serving import Serving, exit_code
from megagrpo.models.families.hf_config import load_hf_config
from megagrpo.platform.process.scratch import temporary_files
from megagrpo.platform.process.terminal import log_to_stderr, warn
from megagrpo.trainer.rollout.collector import sampling_params
from megagrpo.types import Prompt, SamplingParams, Truncation

OWN_SERVERS = ["rollout.urls=[]", "rollout.urls_file=null"]  # a run's servers may have other weights by now


@temporary_files()
def main(arguments: list[str]) -> int:
    """Answer the request and return the exit code: 0, 1 when vLLM failed, 2 when the request is wrong."""
    log_to_stderr()
    request_file, answer_file = map(Path, arguments)
    request = json.loads(request_file.read_text())

    def command() -> None:
        answer_file.write_text(json.dumps(answer(request)))

    try:
        return exit_code(command, "generation")
    except ConfigError as error:
        warn(error)
        return 2


def answer(request: Mapping[str, Any]) -> list[list[str]]:
    """Return the texts. Raises ConfigError when the checkpoint does not exist or a prompt is too long."""
    config = load_config(request["config"], OWN_SERVERS)
    try:
        with Serving(config, warn) as serving:
            return respond(serving, config, request)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def respond(serving: Serving, config: RunConfig, request: Mapping[str, Any]) -> list[list[str]]:
    """Start the servers and generate all responses. Raises ValueError for a prompt that is too long."""
    folder = serving.find(request["checkpoint"], None)
    tokenizer = tokenizer_of(config, folder)
    template = read_chat_template(config.data.chat_template)
    prompts = [
        Prompt(i, tokenizer.render(prompt, config.data.system_prompt, template), prompt)
        for i, prompt in enumerate(request["prompts"])
    ]
    options, n = request["options"], request["n"]
    sampling = _sampling(sampling_params(config.rollout, tokenizer.eos_token_ids), options)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    limit = min(longest + sampling.max_tokens, load_hf_config(folder).max_positions)
    if longest >= limit:
        index = max(range(len(prompts)), key=lambda i: len(prompts[i].token_ids))
        raise ValueError(
            f"prompts.{index}: has {longest} tokens, and the model takes {limit}, responses included; shorten it"
        )
    serving.start(limit)
    seed = options.get("seed", config.run.seed)
    calls = [(prompt, derive_seed(seed, prompt.prompt_id, i)) for prompt in prompts for i in range(n)]
    limits = [
        replace(sampling, max_tokens=min(sampling.max_tokens, limit - len(prompt.token_ids))) for prompt, _ in calls
    ]
    rollouts = serving.engine(tokenizer).extend([prompt for prompt, _ in calls], limits, [own for _, own in calls])
    texts = [rollout.text for rollout in rollouts]
    return [texts[i : i + n] for i in range(0, len(texts), n)]


def _sampling(trained: SamplingParams, options: Mapping[str, Any]) -> SamplingParams:
    """Return the training's sampling with the options in place of its values."""
    own = {name: options[name] for name in ("temperature", "max_tokens") if name in options}
    cuts = {name: options[name] for name in ("top_p", "top_k", "min_p") if name in options}
    truncation: Truncation = replace(trained.truncation, **cuts)
    return replace(trained, **own, truncation=truncation)
