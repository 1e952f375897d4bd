"""Kept rollouts: the groups that a run drew, in files from which another run trains (docs/kept_rollouts.md).

`rollouts/replica_N.jsonl` has a line per group, `rollouts/replica_N.index.jsonl` the first byte of each line. A replica
writes its own files, and reads of all files only the lines of its own groups.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from pathlib import Path
from typing import Literal

import numpy as np

from megagrpo.records.rows.jsonl_file import JsonlFile, encoded
from megagrpo.records.rows.packed_groups import packed, unpacked
from megagrpo.types import Prompt, Rollout, ScoredRollout

ROLLOUTS = "rollouts"
INDEX_SUFFIX = ".index.jsonl"
Place = tuple[Path, int]  # a file, and the first byte of a group's line


class KeptFiles:
    """Writes the groups of one replica. A file that cannot be written, or the limit, ends it; the run goes on."""

    def __init__(
        self, folder: Path, replica: tuple[int, int], last_step: int, limit: float, say: Callable[[str], None]
    ):
        """Open the files of replica `replica[0]` of `replica[1]`, without the groups of steps after `last_step`, of
        which files of further replicas lose theirs too. All replicas together write at most `limit` bytes."""
        self._limit, self._say = limit / replica[1], say
        folder.mkdir(parents=True, exist_ok=True)
        for earlier in folder.glob("replica_*.jsonl"):
            number = int(earlier.name.removeprefix("replica_").split(".")[0])
            if number >= replica[1] and number % replica[1] == replica[0]:
                JsonlFile(earlier, last_step).close()
        path = folder / f"replica_{replica[0]}.jsonl"
        self._file, self._index = JsonlFile(path, last_step), JsonlFile(path.with_suffix(INDEX_SUFFIX), last_step)

    def keep(self, step: int, seed: int, scored: Sequence[ScoredRollout]) -> None:
        """Write the groups that this replica has sampled for step `step` with this seed."""
        if self._limit <= 0:
            return
        groups = [
            [one.rollout for one in group]
            for _, group in groupby(scored, key=lambda one: _key(one.rollout.prompt, seed))
        ]
        keys = [_key(group[0].prompt, seed) for group in groups]
        names = "seed", "prompt_id", "occurrence"
        lines = [
            encoded([{"step": step} | dict(zip(names, key, strict=True)) | _prompt_sum(group[0]) | packed(group)])
            for key, group in zip(keys, groups, strict=True)
        ]
        if (wanted := sum(map(len, lines))) > self._limit:
            self._end(f"run.keep_rollouts_gb is reached: rollouts up to step {step - 1} are kept")
            return
        try:
            start = self._file.store(lines).start
            places = list(accumulate(map(len, lines[:-1]), initial=start))
            self._index.append(
                [{"step": step, "groups": [[*key, place] for key, place in zip(keys, places, strict=True)]}]
            )
        except OSError as error:
            self._end(f"warning: rollouts are kept up to step {step - 1} only: {error}")
        self._limit -= wanted

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        self._index.close()

    def _end(self, why: str) -> None:
        self._limit = 0.0
        self._say(why)


def _prompt_sum(rollout: Rollout) -> dict[str, int]:
    """Return the CRC-32 of the prompt's tokens as int32. A conversation may begin with other tokens than its row."""
    tokens = np.array(rollout.prompt.token_ids, np.int32)
    return {} if rollout.dialogue else {"prompt_crc32": zlib.crc32(tokens.tobytes())}


def _key(prompt: Prompt, seed: int) -> tuple[int, int, int]:
    return seed, prompt.prompt_id, prompt.occurrence


@dataclass
class KeptRollouts:
    """Reads the groups that a run has kept, or that another program has written.

    `by` step finds the group that the run drew in the same step; `by` prompt any group of the same row of `data.train`.
    """

    path: Path
    by: Literal["step", "prompt"]
    decode: Callable[[Sequence[int]], str]
    step: int = -1  # whose groups `_found` has
    _found: dict[tuple[int, int, int], Place] = field(default_factory=dict, init=False)
    _of_prompts: dict[int, list[Place]] = field(default_factory=dict, init=False)
    _indices: list[Iterator[tuple[int, list[list[int]], Path]]] = field(default_factory=list, init=False)
    _next: dict[int, tuple[int, list[list[int]], Path]] = field(default_factory=dict, init=False)  # read too early

    def __post_init__(self) -> None:
        files = _files(self.path)
        if self.by == "step":
            self._indices = [_steps(path) for path in files]
            return
        places = defaultdict[int, list[Place]](list)
        for path in files:
            for _, groups, file in _steps(path):
                for _, prompt_id, _, place in groups:
                    places[prompt_id].append((file, place))
        self._of_prompts = dict(places)

    @property
    def prompt_ids(self) -> set[int]:
        """With `by` prompt: the rows that have groups."""
        return set(self._of_prompts)

    def group(self, step: int, seed: int, prompt: Prompt, n: int) -> list[Rollout]:
        """Return `n` rollouts of a prompt for step `step`, which has this seed. Raises LookupError."""
        if self.by == "prompt":
            places = self._of_prompts.get(prompt.prompt_id, [])
            place = places[(seed + prompt.occurrence) % len(places)] if places else None
        else:
            self._read(step)
            place = self._found.get(_key(prompt, seed))
        if place is None:
            raise LookupError(
                f"{self.path} has no rollouts of row {prompt.prompt_id} in step {step}. A run that draws other prompts "
                "than the kept one (data, run.seed, rollout.prompts_per_step, curriculum, dynamic sampling) needs "
                "rollout.kept.by=prompt"
            )
        path, start = place
        with open(path, "rb") as file:
            file.seek(start)
            line = json.loads(file.readline())
        try:
            for row in line["rollouts"]:
                if "text" not in row:
                    row["text"] = self.decode(row["response_ids"])
            group = unpacked(line, prompt)[:n]
            if line.get("prompt_crc32", prompt_sum := _prompt_sum(group[0]).get("prompt_crc32")) != prompt_sum:
                raise ValueError("its prompt has other tokens now: the data, the template or the tokenizer has changed")
            return self._checked(group, n)
        except (KeyError, TypeError, ValueError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise LookupError(f"{path}, the line at byte {start}, row {prompt.prompt_id}: {what}") from None

    @staticmethod
    def _checked(group: list[Rollout], n: int) -> list[Rollout]:
        if len(group) < n:
            raise ValueError(f"{len(group)} rollouts where rollout.num_generations is {n}")
        for rollout in group:
            if not 0 < len(rollout.response_ids) == len(rollout.rollout_logprobs):
                sizes = len(rollout.response_ids), len(rollout.rollout_logprobs)
                raise ValueError(
                    f"{sizes[0]} response_ids and {sizes[1]} rollout_logprobs; it needs one each, at least one"
                )
        return group

    def _read(self, step: int) -> None:
        """Find the groups of a step. Steps are asked for in order."""
        if step == self.step:
            return
        self.step, self._found = step, {}
        for number, steps in enumerate(self._indices):
            line = self._next.pop(number, None) or next(steps, None)
            while line is not None and line[0] <= step:
                if line[0] == step:
                    self._found |= {(seed, row, time): (line[2], place) for seed, row, time, place in line[1]}
                line = next(steps, None)
            if line is not None:
                self._next[number] = line


def last_kept_step(path: Path) -> int:
    """Return the last step with kept rollouts; 0: they have no steps. Raises ValueError without any."""
    return max((step for file in _files(path) for step, _, _ in _steps(file)), default=0)


def _files(path: Path) -> list[Path]:
    """Return the files of rollouts below a run's folder, in a folder, or the file itself. Raises ValueError."""
    folder = path / ROLLOUTS if (path / ROLLOUTS).is_dir() else path
    files = [folder] if folder.is_file() else sorted(folder.glob("*.jsonl"))
    files = [file for file in files if not file.name.endswith(INDEX_SUFFIX)]
    if not files:
        raise ValueError(f"{path} has no kept rollouts; name the folder of a run with run.keep_rollouts_gb above 0")
    return files


def _steps(path: Path) -> Iterator[tuple[int, list[list[int]], Path]]:
    """Yield the step and the groups of each index line: seed, row, occurrence, first byte. A file of another program
    has no index, and is read line by line."""
    index = path.with_suffix(INDEX_SUFFIX)
    if index.exists():
        for line in index.open("rb"):
            if line.endswith(b"\n"):
                row = json.loads(line)
                yield row["step"], row["groups"], path
        return
    start = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                yield (
                    row.get("step", 0),
                    [[row.get("seed", 0), row["prompt_id"], row.get("occurrence", 0), start]],
                    path,
                )
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{path}, line {number}: not a group of rollouts ({error})") from None
            start += len(line)
