"""A teacher behind vLLM servers (`algorithm.teacher.urls`): their log-probs of the tokens that it reads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megagrpo.config import TeacherSection
from megagrpo.data.tokens.tokenizer import Tokenizer
from megagrpo.engine.http.access import headers
from megagrpo.engine.http.connections import Answer, ConnectionFailed, Connections, ask
from megagrpo.engine.http.protocol import EngineError
from megagrpo.platform import device
from megagrpo.platform.parallel.agree import run_own_and_agree
from megagrpo.platform.parallel.bulk_messages import share_rows
from megagrpo.platform.parallel.layout import Layout
from megagrpo.platform.process.terminal import warn
from megagrpo.platform.process.variables import ENVIRONMENT
from megagrpo.train_types import MicroBatch, TopLogprobs, TrainBatch

MOST_TRIES, ANSWER_SECONDS, AT_ONCE = 4, 600.0, 32  # of a request; requests in flight per server
BYTES_PER_LOGPROB = 512  # of a response, at most; with the token's text
CHECKED_AT_ONCE = 4096  # token ids
KEY_VARIABLE = "OPENAI_API_KEY"


@dataclass(frozen=True)
class ServedTeacher:
    """The servers of one teacher. All methods are collective; the leader of each replica asks for its samples."""

    section: TeacherSection
    key: str
    layout: Layout

    def logprobs(self, batch: TrainBatch) -> list[Tensor | None]:
        """Return the log-probs [T] float32 of every micro-batch's labels, 0 where the loss mask is 0; None outside the
        last pipeline stage."""
        return [None if top is None else top.logprobs[:, 0] for top in self.top_logprobs(batch, 0)]

    def top_logprobs(self, batch: TrainBatch, k: int) -> list[TopLogprobs | None]:
        """Return the k largest log-probs [T, k] float32 and their token ids; with k = 0 those of the labels."""
        layout, masks = self.layout, [m.loss_mask for m in batch.micro_batches]
        empty = np.zeros((sum(int(mask.sum()) for mask in masks), 2, max(k, 1)), np.float32)
        leads = layout.is_dp_leader
        table = run_own_and_agree(layout, lambda: asyncio.run(self._table(batch, k, empty)) if leads else empty)
        if layout.ends is not None:
            table = share_rows(layout, table.view(np.int32), layout.ends).view(np.float32)
        if not layout.is_last_stage:
            return [None] * len(masks)
        parts = torch.from_numpy(table).split([int(mask.sum()) for mask in masks])
        return [self._spread(mask, part) for mask, part in zip(masks, parts, strict=True)]

    def _spread(self, mask: Tensor, part: Tensor) -> TopLogprobs:
        whole = part.new_zeros(mask.numel(), *part.shape[1:])
        whole[mask] = part
        moved = whole.to(device.device())
        return TopLogprobs(moved[:, 0], moved[:, 1].contiguous().view(torch.int32).long())

    async def _table(self, batch: TrainBatch, k: int, table: np.ndarray) -> np.ndarray:
        """Fill the table [n, 2, k] of all loss tokens, in order: log-probs, and token ids as int32 words."""
        asked, begin = [], 0
        for ids, places in (one for m in batch.micro_batches for one in sequences(m)):
            asked.append((ids, places, table[begin : begin + len(places)]))
            begin += len(places)
        dead, free = dict[str, str](), asyncio.Semaphore(AT_ONCE * len(self.section.urls))
        async with Connections(headers(ENVIRONMENT.get(KEY_VARIABLE)), ANSWER_SECONDS) as connections:
            await asyncio.gather(*(self._ask(connections, i, k, one, dead, free) for i, one in enumerate(asked)))
        return table

    async def _ask(
        self,
        connections: Connections,
        number: int,
        k: int,
        one: tuple[list[int], list[int], np.ndarray],
        dead: dict[str, str],
        free: asyncio.Semaphore,
    ) -> None:
        """Fill the rows of a sequence, from the first server that responds. Raises EngineError if none does."""
        (ids, places, rows), said = one, ""
        async with free:
            for attempt in range(MOST_TRIES):
                urls = [url for url in self.section.urls if url not in dead] or self.section.urls
                url = urls[(number + attempt) % len(urls)]
                try:
                    body = json.dumps(self._body(ids, k)).encode()
                    most = BYTES_PER_LOGPROB * (k + 2) * (len(ids) + 2)
                    answer = await connections.post(url, "/v1/completions", body, most=most)
                    if answer.status == 200:
                        fill(rows, answer, ids, places, k)
                        return
                    said = f"{url}: {answer.error()}"
                    if 400 <= answer.status < 500 and answer.status not in (408, 429):
                        break
                except (ConnectionFailed, TimeoutError) as error:
                    said = f"{url} does not respond: {error!r:.200}"
                    if url not in dead and len(self.section.urls) > 1:
                        dead[url] = said
                        warn(f"warning: {self.key}.urls: {said}; its requests go to the other servers in this step")
                except (ValueError, KeyError, TypeError, IndexError) as error:
                    said = f"{url} sent invalid log-probs: {error!r:.200}"
                await asyncio.sleep(min(2**attempt / 2, 4))
        raise EngineError(f"{self.key}.urls: {said}; restart the server, and resume the run")

    def _body(self, ids: Sequence[int], k: int) -> dict[str, Any]:
        return {"model": self.section.path, "prompt": ids, "max_tokens": 1, "prompt_logprobs": k, "temperature": 1.0}

    def check(self, tokenizer: Tokenizer, longest: int) -> None:
        """Raise ValueError for a server that does not respond, is another model, or has other tokens."""
        k = self.section.over if isinstance(self.section.over, int) else 0
        for url in self.section.urls:
            models = self._checked(url, "/v1/models", None)["data"]
            found = {str(model["id"]): model for model in models}
            if self.section.path not in found:
                raise ValueError(f"{self.key}.path: {url} serves {', '.join(found)}, not {self.section.path}; name it")
            limit = found[self.section.path].get("max_model_len") or longest + 1
            if limit <= longest:
                fix = "raise its --max-model-len, or lower the run's lengths"
                raise ValueError(f"{self.key}.urls: {url} reads {limit} tokens, but {longest + 1} are needed; {fix}")
            for first in range(0, len(tokenizer), CHECKED_AT_ONCE):
                ids = [*range(first, min(first + CHECKED_AT_ONCE, len(tokenizer)))]
                text = self._checked(url, "/detokenize", {"model": self.section.path, "tokens": ids})["prompt"]
                if text != tokenizer.decode(ids, special=True):
                    reason = f"its tokens {ids[0]} to {ids[-1]} are not the policy's"
                    raise ValueError(f"{self.key}.urls: {url}: {reason}; serve a teacher with the policy's tokens")
            trial = self._checked(url, "/v1/completions", self._body([1, 2, 3], k))
            if len(trial["choices"][0]["prompt_logprobs"][-1]) < k:
                raise ValueError(f"{self.key}.urls: {url} sends fewer than {k} log-probs of a token; lower over")

    def _checked(self, url: str, route: str, body: dict[str, Any] | None) -> dict[str, Any]:
        method, sent = "GET" if body is None else "POST", headers(ENVIRONMENT.get(KEY_VARIABLE))
        try:
            answer = ask(url, route, body, method, headers=sent, seconds=60)
        except (ConnectionFailed, TimeoutError) as error:
            raise ValueError(f"{self.key}.urls: {url} does not respond ({error!r:.100}); start the server") from None
        if answer.status != 200:
            fix = f"start it with --max-logprobs {self.section.over}" if "logprobs" in answer.error() else ""
            fix = fix or f"serve with vLLM, and set {KEY_VARIABLE} if it has a key"
            raise ValueError(f"{self.key}.urls: {url}{route}: {answer.status} {answer.error():.200}; {fix}")
        found: dict[str, Any] = json.loads(answer.content)
        return found


def sequences(m: MicroBatch) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the token ids of each sequence with loss tokens, after the prompt that it shares, and these tokens' indices
    in the ids."""
    ids, borders = m.token_ids.tolist(), m.cu_seqlens.tolist()
    prefixes = [-1] * m.num_sequences if m.prefixes is None else m.prefixes.tolist()
    for prefix, start, stop in zip(prefixes, borders, borders[1:], strict=False):
        before = ids[borders[prefix] : borders[prefix + 1]] if prefix >= 0 else []
        if places := m.loss_mask[start:stop].nonzero()[:, 0].tolist():
            whole = [*before, *ids[start : start + places[-1] + 1], int(m.labels[start + places[-1]])]
            yield whole, [len(before) + place + 1 for place in places]


def fill(rows: np.ndarray, answer: Answer, ids: Sequence[int], places: Sequence[int], k: int) -> None:
    """Write a response's log-probs at `places` into rows [n, 2, k]. Raises ValueError for numbers that are none."""
    found = json.loads(answer.content)["choices"][0]["prompt_logprobs"]
    for row, place in zip(rows, places, strict=True):
        entry = found[place]
        ranked = sorted((one["rank"], int(token), one["logprob"]) for token, one in entry.items())[:k]
        pairs = [(token, value) for _, token, value in ranked] or [(ids[place], entry[str(ids[place])]["logprob"])]
        row[0], row[1] = [v for _, v in pairs], np.array([t for t, _ in pairs], np.int32).view(np.float32)
        if not (row[0] <= 1e-3).all():
            raise ValueError(f"log-probs {[value for _, value in pairs][:3]} at token {place}")
