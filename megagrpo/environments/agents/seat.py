"""One conversation at the agents' address: its requests become turns of the policy."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megagrpo.engine.requests import OnTokens
from megagrpo.environments.agents.agent_messages import Refused, read_body
from megagrpo.environments.agents.agent_requests import Ask, Reply
from megagrpo.environments.agents.trajectory import Start, Trajectory
from megagrpo.environments.episodes.tool_calls import CALL_OPENING
from megagrpo.rewards.functions.text_rewards import encodable
from megagrpo.types import Prompt, Rollout, SamplingParams

READS_AT_ONCE = 4  # requests of one conversation whose bodies are in memory or in threads
REQUESTS_AT_ONCE = 256  # of one conversation
Call = dict[str, Any]
# (prompt, sampling, number of the turn in its conversation, what gets its tokens as they come, if anything) -> the
# policy's next turn, and the seconds that it has waited for a slot of its server.
TakeTurn = Callable[[Prompt, SamplingParams, int, OnTokens | None], Awaitable[tuple[Rollout, float]]]
# The text and the tool calls of a turn: (prompt, rollout, tools). An invalid call has only `error`.
ReadCalls = Callable[[Prompt, Rollout, Sequence[Call]], Awaitable[tuple[str, list[Call]]]]


@dataclass(eq=False)
class _Turn:
    """A turn that the policy has taken. It is recorded when the agent has its reply."""

    reply: Reply
    start: Start
    rollout: Rollout
    times: dict[str, float]  # fields of `Turn`
    number: int
    is_recorded: bool = False


class Seat:
    """A conversation at the address. `broken` gets the error with which the engine failed; it ends the run, or is
    handled there. Any other error is the request's: the agent gets it. A tool call begins with the text `opening`;
    None: it is not known how."""

    def __init__(
        self,
        trajectory: Trajectory,
        sampling: SamplingParams,
        turn: TakeTurn,
        read_calls: ReadCalls,
        opening: str | None = CALL_OPENING,
    ):
        self.trajectory, self._sampling, self._turn, self._read_calls = trajectory, sampling, turn, read_calls
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._opening, self._tasks = opening, set[asyncio.Task[_Turn]]()
        self._failure: Exception | None = None  # of the engine
        self._entry = asyncio.Semaphore(READS_AT_ONCE)
        self._reading, self._is_closed = 0, False
        self._replies: dict[tuple[Any, ...], _Turn] = {}  # the last one to each request, by what it asks for
        self._lost: dict[tuple[Any, ...], _Turn] = {}  # those that did not reach the agent

    async def read(
        self, api: Any, size: int | None, body: Callable[[], AsyncIterator[bytes]], is_retry: bool
    ) -> tuple[Ask, dict[str, Any], Start]:
        """Read a request of `size` bytes, if its head names the size. Returns what it asks for, its body, and where the
        turn begins. Raises Refused."""
        if len(self._tasks) + self._reading >= REQUESTS_AT_ONCE:
            reason = f"the conversation has {REQUESTS_AT_ONCE} requests at once; wait for the first ones"
            raise Refused(reason, "rate_limit_exceeded", status=429)
        trajectory, data = self.trajectory, bytearray()

        def parsed() -> tuple[Ask, dict[str, Any], Start]:
            value = read_body(bytes(data))
            ask = replace(_ask_of(api, value, self._sampling), is_retry=is_retry)
            return ask, value, trajectory.find(ask.messages, ask.tools, trajectory.role_of(ask.model))

        self._reading += 1
        try:
            trajectory.check_size(size or 0)
            async with self._entry:
                async for part in body():
                    data += part
                    trajectory.check_size(len(data))
                trajectory.check_size(len(data), bytes(data))
                ask, value, start = await trajectory.renderer.threads.run(len(data), parsed)
        except Refused as error:
            trajectory.note_refusal(error)
            raise
        except (OSError, asyncio.CancelledError):
            raise
        except Exception as error:
            raise Refused(f"the request cannot be used: {error!r}", "invalid_request") from error
        finally:
            self._reading -= 1
        trajectory.counts.update(f"ignored/{name}" for name in ask.ignored)
        return ask, value, start

    async def stream(self, ask: Ask, start: Start) -> AsyncGenerator[str | Reply]:
        """Yield the text of the policy's turn as it comes if the request asks for a stream, then the turn. It is
        recorded when the caller comes back: then the agent has it. Raises Refused."""
        if self._is_closed:
            raise Refused("the conversation has ended", "invalid_api_key", status=401)
        texts = asyncio.Queue[str | None]()
        task = asyncio.ensure_future(self._taken(ask, start, texts.put_nowait if ask.stream else None))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: texts.put_nowait(None))
        try:
            while (text := await texts.get()) is not None:
                yield text
            turn = await task
            yield replace(turn.reply, ask=ask)
            self._record(turn)
        except (Refused, asyncio.CancelledError, GeneratorExit):
            raise
        except Exception as error:
            if error is not self._failure:
                raise Refused(f"the request cannot be used: {error!r}", "invalid_request") from error
            if not self.broken.done():
                self.broken.set_exception(error)
            raise Refused(f"the engine failed: {error}", "server_error", status=500) from error
        finally:
            task.cancel()
            if task.done() and not task.cancelled() and task.exception() is None:
                self._lose(task.result())

    async def reply(self, ask: Ask) -> None:
        """Take a turn of the policy that no agent has asked for, beyond `multi_turn.max_turns` too. Raises Refused, and
        the errors of the engine."""
        size = sum(len(message["content"]) for message in ask.messages)
        find = partial(self.trajectory.find, ask.messages, ask.tools, next(iter(self.trajectory.roles), ""))
        start = await self.trajectory.renderer.threads.run(size, find)
        self._record(await self._taken(ask, start, is_limited=False))

    def _record(self, turn: _Turn) -> None:
        if not turn.is_recorded:
            turn.is_recorded = True
            self.trajectory.record(turn.start, turn.rollout, turn.reply.message, **turn.times)

    def _lose(self, turn: _Turn) -> None:
        """Take back a turn whose reply did not reach the agent. A retry of its request gets the same reply."""
        if not turn.is_recorded:
            self.trajectory.give_up(turn.number)
            self._lost[_what(turn.reply.ask, turn.start)] = turn

    async def _of_engine[T](self, work: Awaitable[T]) -> T:
        try:
            return await work
        except Exception as error:
            self._failure = error
            raise

    async def _taken(
        self, ask: Ask, start: Start, send: Callable[[str], None] | None = None, is_limited: bool = True
    ) -> _Turn:
        """Return a turn of the policy: a new one, or that of an earlier request of which this one is a retry. `send`
        gets its text as it comes. Raises Refused, and the errors of the engine."""
        what = _what(ask, start)
        if ask.is_retry and (known := self._replies.get(what)) is not None and known.is_recorded:
            turn = known
        else:
            number, lost = self.trajectory.begin(start, is_limited), self._lost.pop(what, None)
            if lost is None:
                try:
                    turn = self._replies[what] = await self._take(ask, start, number, send)
                except BaseException:
                    self.trajectory.give_up(number)
                    raise
                return turn
            turn, lost.number = lost, number
        if send is not None and turn.reply.content:
            send(turn.reply.content)
        return turn

    async def _take(self, ask: Ask, start: Start, number: int, send: Callable[[str], None] | None) -> _Turn:
        trajectory = self.trajectory
        limit = min(trajectory.room(start), self._sampling.max_tokens, ask.max_tokens or self._sampling.max_tokens)
        sampling = replace(self._sampling, max_tokens=limit)
        if ask.stop:
            sampling = replace(sampling, stop=(*sampling.stop, *ask.stop), include_stop=False)
        prompt = replace(trajectory.prompt, token_ids=start.context, messages=ask.messages)
        has_calls = bool(ask.tools) and ask.parses_calls
        stream = TextStream(trajectory.decode, sampling.stop, self._opening if has_calls else "")

        def on_tokens(first: int, ids: list[int]) -> None:
            if (text := stream.add(first, ids)) and send is not None:
                send(text)

        asked, begun = time.time(), time.monotonic()
        rollout, queued = await self._of_engine(
            self._turn(replace(prompt, opened=""), sampling, number, on_tokens if send else None)
        )
        times = dict(began=asked, generated=time.monotonic() - begun, queued=queued)
        content, calls = rollout.text, list[Call]()
        if has_calls:
            text, found = await self._of_engine(self._read_calls(prompt, rollout, ask.tools))
            calls = [call for call in found if "error" not in call]
            trajectory.counts.update({"invalid_calls": len(found) - len(calls)} if len(calls) < len(found) else {})
            content = text if calls else content
        try:
            content, rest = stream.finish(content)
        except ValueError as error:
            trajectory.counts["broken_streams"] += 1
            raise Refused(str(error), "server_error", status=500) from error
        reply = Reply(
            ask=ask,
            content=content,
            calls=[_numbered(call, f"{trajectory.index}_{number}_{i}") for i, call in enumerate(calls)],
            finish_reason="tool_calls" if calls else rollout.finish_reason,
            prompt_tokens=len(start.context),
            completion_tokens=len(rollout.response_ids),
        )
        if rest and send is not None:
            send(rest)
        return _Turn(reply, start, rollout, times, number)

    def close(self) -> None:
        """Cancel the turns that are still under way."""
        self._is_closed = True
        for task in list(self._tasks):
            task.cancel()
        self.broken.cancel()


def _numbered(call: Call, number: str) -> Call:
    arguments = encodable(json.dumps(call["arguments"], ensure_ascii=False))
    function = {"name": encodable(call["name"]), "arguments": arguments}
    return {"id": f"call_{number}", "type": "function", "function": function}


def _ask_of(api: Any, body: Call, sampling: SamplingParams) -> Ask:
    """Return what the body of a request asks for. Raises Refused."""
    try:
        ask: Ask = api.read(body, sampling)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Refused(f"the request is malformed: {error!r}", "invalid_request") from error
    return ask


def _what(ask: Ask, start: Start) -> tuple[Any, ...]:
    """Return all that decides about a reply."""
    return start.history, start.tools, ask.max_tokens, ask.stop, ask.parses_calls


INCOMPLETE = "\ufffd"  # what a decoder gives for a character of which bytes are missing


class TextStream:
    """Turns tokens into text that the turn's text will begin with.

    Held back are incomplete characters, a possible beginning of a text of `stop`, and with `opening` everything from a
    possible tool call on, which begins with this text after spaces. None of the text is sent with `opening` None.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str], opening: str | None = ""):
        self._sent: list[str] = []
        self._decode, self._opening = decode, opening
        self._ends = [text for text in (*stop, opening) if text]
        self._is_over = opening is None  # nothing more is sent before the turn is complete
        self._ids: list[int] = []
        self._prefix = self._read = self._due = 0  # `_ids[_prefix:_read]` are decoded again, before those after them
        self._held = ""

    def add(self, first: int, ids: list[int]) -> str:
        """Take tokens of the response from index `first` on, and return the text to send. Tokens that were sent before,
        by a server that failed, must be the same; else nothing more is sent."""
        known = self._ids[first : first + len(ids)]
        self._is_over |= known != ids[: len(known)]
        self._ids += ids[len(known) :]
        if self._is_over or len(self._ids) < self._due:
            return ""
        before, after = (self._decode(self._ids[self._prefix : end]) for end in (self._read, None))
        if len(after) <= len(before) or after.endswith(INCOMPLETE):
            # look less often, the longer no character is complete: else the work grows with the square of the tokens
            self._due = len(self._ids) + (len(self._ids) - self._read) // 4
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return self._send(after[len(before) :])

    def _send(self, text: str) -> str:
        text = self._held + text
        found = [index for end in self._ends if (index := text.find(end)) >= 0]
        self._is_over = bool(found)
        count = min(found, default=len(text))
        if not found:
            count -= max((_overlap(text, end) for end in self._ends), default=0)
        if self._opening:
            count = len(text[:count].rstrip())
        self._held, text = text[count:], text[:count]
        self._sent.append(text)
        return text

    def finish(self, content: str) -> tuple[str, str]:
        """Return the turn's whole text, and what is left of it to send. `content` may lack spaces that were sent first.

        Raises ValueError if it begins with another text, because a server failed and the next one sampled other tokens.
        """
        sent = "".join(self._sent)
        if not content.startswith(sent):
            content = sent[: len(sent) - len(sent.lstrip())] + content
        if not content.startswith(sent):
            raise ValueError("a server failed during the response, and the one that replaces it sampled another one")
        return content, content[len(sent) :]


def _overlap(text: str, end: str) -> int:
    """Return the length of the longest end of `text` with which `end` begins; `text` does not contain `end`."""
    return next((n for n in range(min(len(text), len(end) - 1), 0, -1) if text.endswith(end[:n])), 0)
