"""Reads a row's own settings: variables of the chat template, and sampling parameters."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import ValidationError

from megagrpo.config import RunConfig
from megagrpo.config.rules.extra_args import REFUSED_BESIDE_DRAFTS, drafts_tokens, options_of
from megagrpo.config.sections.rollout import RowSampling, constraint_of
from megagrpo.data.images.prompt_images import IMAGE_COLUMNS
from megagrpo.data.tokens.request_trial import shared_trial
from megagrpo.data.tokens.sampling import bias_ids, sampling_of, token_problem
from megagrpo.data.tokens.tokenizer import Tokenizer
from megagrpo.suggestions import did_you_mean

# Parameters of vLLM's requests that a row cannot have, with the reason.
NOT_OF_ROWS = {
    "n": "set rollout.num_generations",
    "include_stop_str_in_output": "set rollout.include_stop_str_in_output",
    "min_tokens": "the trainer does not repeat it; use structured_outputs",
    "stop_token_ids": "name the special token in rollout.stop",
    "thinking_token_budget": "it is max_thinking_tokens here",
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice"), "vLLM calls it structured_outputs now"),
}


def row_mapping(value: Any, content: str, said: str) -> dict[str, Any]:
    """Return a cell's mapping, {} for an empty cell. JSON text is read: it keeps the types of files with one schema for
    all rows. Raises ValueError, which begins with `said`, for a value that is no mapping of `content`."""
    try:
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = json.loads(value)
        else:
            value = _without_fillers(value)
    except RecursionError:
        raise ValueError(f"{said} is nested too deeply; flatten it") from None
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{said} must be a mapping of {content} (got {value!r:.100}); correct or remove it")
    return {name: v for name, v in (value or {}).items() if v is not None}


def _without_fillers(value: Any) -> Any:
    """Return a value of a table without the None that Arrow adds for keys that only other rows have, at any depth, and
    without the mappings that have nothing else. Arrays become lists."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list):
        return [_without_fillers(part) for part in value]
    if not isinstance(value, dict):
        return value
    kept = {name: _without_fillers(part) for name, part in value.items()}
    fillers = [name for name, part in kept.items() if part is None or (part == {} and value[name] != {})]
    return {name: part for name, part in kept.items() if name not in fillers}


@dataclass
class RowReader:
    """Reads and checks the sampling parameters of rows, and their columns. `config` and `tokenizer` are the run's,
    `vocab_size` the model's; None skips its check. With `tries` constraints are tried in a process that imports vLLM:
    one rank does. `needs` are `RewardScorer.needs`: for each function, tuples of columns of which it needs one."""

    config: RunConfig
    tokenizer: Tokenizer
    vocab_size: int | None = None
    tries: bool = True
    needs: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    _checked: set[tuple[str, str]] = field(default_factory=set)  # constraints

    def check_columns(self, columns: Mapping[str, Any]) -> None:
        """Raise ValueError with a phrase for a row that no function can score, because each needs a value that the row
        lacks. Images may be absent, and a column that no row has is another error."""
        problems = []
        for function, needs in self.needs.items():
            known = [[name for name in names if name in columns and name not in IMAGE_COLUMNS] for names in needs]
            lacking = [names for names in known if names and all(columns[name] is None for name in names)]
            if not lacking:
                return
            names = "` or `".join(lacking[0])
            problems.append(f"has no value in column `{names}`, which reward `{function}` needs")
        if problems:
            raise ValueError(f"{problems[0]}; fill it, or remove the row")

    def read(self, own: Mapping[str, Any], said: str) -> dict[str, Any]:
        """Return the parameters of a row as `Prompt.sampling` has them: with token ids in `logit_bias`. Raises
        ValueError, which begins with `said`, for parameters that a row cannot have."""
        if not own:
            return {}
        values = self._typed(own, said)
        limit = self.config.rollout.max_completion_length
        if values.get("max_tokens", 0) > limit:
            fix = "lower it, or raise the limit, for which memory is planned"
            raise ValueError(
                f"{said}: max_tokens {values['max_tokens']} is above rollout.max_completion_length {limit}; {fix}"
            )
        self._check(values, said)
        if "logit_bias" in values:
            bias = bias_ids(values["logit_bias"], self.tokenizer, f"{said}: logit_bias")
            values["logit_bias"] = {str(token): added for token, added in bias.items()}
        stops = [*values.get("stop", ()), *self.config.rollout.stop]
        for name in ("logit_bias", "allowed_token_ids"):
            ids = [int(token) for token in values.get(name, ())]
            if problem := token_problem(name, ids, self.vocab_size, self.tokenizer.eos_token_ids, stops):
                raise ValueError(f"{said}: {problem}")
        return values

    def _typed(self, own: Mapping[str, Any], said: str) -> dict[str, Any]:
        known = list(RowSampling.model_fields)
        for name in own:
            if name in NOT_OF_ROWS:
                raise ValueError(f"{said}: a row cannot have its own `{name}`: {NOT_OF_ROWS[name]}")
            if name not in known:
                raise ValueError(f"{said} has `{name}`{did_you_mean(name, known)}; a row may have {', '.join(known)}")
        try:
            return RowSampling(**own).model_dump(exclude_unset=True)
        except ValidationError as error:
            (first, *_) = error.errors()
            raise ValueError(f"{said}: {first['loc'][0]}: {first['msg']} (got {first['input']!r:.100})") from None

    def _check(self, values: Mapping[str, Any], said: str) -> None:
        """Raise ValueError for parameters that servers or trainer of this run cannot apply."""
        rollout = self.config.rollout
        for name in REFUSED_BESIDE_DRAFTS:
            if values.get(name) and drafts_tokens(rollout.extra_args):
                fix = "remove it from the rows, or the drafts from rollout.extra_args"
                raise ValueError(f"{said}: vLLM's speculative decoding refuses {name}; {fix}")
        self._check_thinking(values, said)
        again = rollout.max_staleness and (rollout.in_flight == "resume" or self.config.lora.syncs_adapters)
        if again and values.get("structured_outputs"):
            raise ValueError(
                f"{said}: structured_outputs starts again with each request, but an interrupted response is requested "
                f"again with its tokens as the prompt (rollout.in_flight {rollout.in_flight}); choose keep, or remove "
                "it"
            )
        algorithm = self.config.algorithm
        for name in filter(values.get, ("top_p", "top_k", "min_p") if algorithm.compares_all_tokens else ()):
            reason = f"algorithm.teacher, or kl_estimator {algorithm.kl_estimator}, needs all tokens"
            raise ValueError(f"{said}: {name}: {reason}; leave out the teacher and choose k3, or remove it")
        special = [self.tokenizer.token_text(i) for i in self.tokenizer.special_ids()] if values.get("stop") else []
        for token in special:
            if token and any(token in text for text in values["stop"]):
                raise ValueError(f"{said}: stop has the special token {token}; name it in rollout.stop, for all rows")
        constraint = constraint_of(values.get("structured_outputs", {}))
        if constraint is None or constraint in self._checked:
            return
        if "--reasoning-parser" in options_of(rollout.extra_args):
            reason = "vLLM would begin after a thought; leave --reasoning-parser out of rollout.extra_args"
            raise ValueError(f"{said}: structured_outputs: {reason}")
        if self.tries and (problem := constraint_problem(constraint)):
            raise ValueError(f"{said}: {problem}")
        self._checked.add(constraint)

    def _check_thinking(self, values: Mapping[str, Any], said: str) -> None:
        key, budget = "max_thinking_tokens", self.config.rollout.max_thinking_tokens
        if key in values and budget is None:
            raise ValueError(f"{said}: {key} needs a budget of the run; set rollout.{key}, for rows without their own")
        if budget and values.get("structured_outputs"):
            reason = f"starts again with each request, and a thought's end begins one; remove it, or rollout.{key}"
            raise ValueError(f"{said}: structured_outputs {reason}")

    def check_run(self) -> None:
        """Raise ValueError, with a line for each problem, for parameters of `rollout` that vLLM refuses, or
        with which no response ends."""
        rollout, ends = self.config.rollout, self.tokenizer.eos_token_ids
        bias = dict(sampling_of(rollout, self.tokenizer).logit_bias)
        ids = {"logit_bias": bias, "allowed_token_ids": rollout.allowed_token_ids}
        problems = [token_problem(name, ids[name], self.vocab_size, ends, rollout.stop) for name in ids]
        problems.append(constraint_problem(constraint_of(rollout.structured_outputs)))
        if found := [f"rollout.{problem}" for problem in problems if problem]:
            raise ValueError("\n".join(found))

    def check_tools(self, tools: Sequence[dict[str, Any]], model_folder: str) -> None:
        """Raise ValueError for a tool, or a tool parser of vLLM, that a server of this run refuses."""
        if (parser := self.config.multi_turn.vllm_parser) is None:
            return
        tokenizer = self.config.model.tokenizer or model_folder
        if refusal := shared_trial().refusal({"parser": parser, "tools": list(tools), "tokenizer": tokenizer}):
            raise ValueError(f"multi_turn.tool_parser: {refusal}; correct the tool, or choose another parser")


def constraint_problem(constraint: tuple[str, str] | None) -> str | None:
    """Return what is wrong with a constraint, with the parameter's name; None for a valid one."""
    refusal = None if constraint is None else shared_trial().refusal(dict([constraint]))
    return refusal and f"structured_outputs: {refusal}"
