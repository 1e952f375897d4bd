"""A group of rollouts as JSON values, in checkpoints and in the kept rollouts of a run."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megagrpo.types import Dialogue, Prompt, Rollout, Routes


def packed(group: Sequence[Rollout]) -> dict[str, Any]:
    """Convert a group to JSON values; arrays are in base64, token ids as int32, log-probs as float32."""
    return {
        "prompt_id": group[0].prompt.prompt_id,
        "sampling": group[0].prompt.sampling,
        "rollouts": [_packed(rollout) for rollout in group],
    }


def _packed(rollout: Rollout) -> dict[str, Any]:
    row: dict[str, Any] = vars(rollout) | {
        name: _encoded(getattr(rollout, name)) for name in ("response_ids", "rollout_logprobs")
    }
    del row["prompt"]
    if (routes := row.pop("routes")) is not None:
        row["routes"] = {"dtype": routes.dtype.name, "shape": routes.shape, "values": _encoded(routes)}
    if (dialogue := row.pop("dialogue")) is not None:
        row["dialogue"] = dialogue.record() | {"written": _encoded(dialogue.written), "outputs": dialogue.outputs}
        # the text of an episode's `reset` is part of the prompt, and an agent's requests are prompts
        row["prompt"] = {name: getattr(rollout.prompt, name) for name in ("token_ids", "messages", "opened")}
    if branches := row.pop("branches"):
        row["branches"] = [_packed(branch) for branch in branches]
    return row


def unpacked(saved: Mapping[str, Any], prompt: Prompt, later: int = 0) -> list[Rollout]:
    """Restore a group from its JSON values, with the sampling parameters that its row had. Weight versions grow by
    `later`. Arrays may also be lists of numbers."""
    prompt = replace(prompt, sampling=saved.get("sampling", prompt.sampling))
    return [_unpacked(row, prompt, later) for row in saved["rollouts"]]


def _unpacked(row: dict[str, Any], prompt: Prompt, later: int) -> Rollout:
    dialogue = None
    if (record := row.get("dialogue")) is not None:
        written = np.frombuffer(base64.b64decode(record["written"]), np.bool_)
        dialogue = Dialogue.of_record(written, {name: value for name, value in record.items() if name != "written"})
        shown = row["prompt"]
        prompt = replace(prompt, **shown | {"token_ids": tuple(shown["token_ids"])})
    return Rollout(
        prompt,
        *_decoded(row["response_ids"], row["rollout_logprobs"]),
        row["finish_reason"],
        row.get("weight_version", 0) + later,
        row["text"],
        dialogue,
        later_versions=tuple((start, version + later) for start, version in row.get("later_versions", ())),
        stop_string=row.get("stop_string"),
        forced=None if (forced := row.get("forced")) is None else tuple((start, stop) for start, stop in forced),
        routes=_decoded_routes(row.get("routes")),
        branches=tuple(_unpacked(branch, prompt, later) for branch in row.get("branches", ())),
    )


def _encoded(values: np.ndarray) -> str:
    return base64.b64encode(values.tobytes()).decode()


def _decoded(response_ids: str | list[int], logprobs: str | list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids int32 and log-probs float32 [Lr], each from base64 or from a list. Older checkpoints have
    log-probs in float64."""
    ids = np.frombuffer(_bytes(response_ids, np.int32), np.int32)
    numbers = _bytes(logprobs, np.float32)
    is_double = isinstance(logprobs, str) and len(numbers) == 8 * len(ids)
    return ids, np.frombuffer(numbers, np.float64 if is_double else np.float32).astype(np.float32)


def _bytes(values: str | list[Any], dtype: type) -> bytes:
    return base64.b64decode(values) if isinstance(values, str) else np.array(values, dtype).tobytes()


def _decoded_routes(saved: dict[str, Any] | None) -> Routes | None:
    """Return routes [tokens, M, k]; None for a group of a run without them."""
    if saved is None:
        return None
    return np.frombuffer(base64.b64decode(saved["values"]), saved["dtype"]).reshape(saved["shape"])
