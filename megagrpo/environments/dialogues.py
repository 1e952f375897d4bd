"""An engine for multi-turn responses. After a tool or scheduler message the policy continues from its exact tokens."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from collections.abc import Generator as Stream
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megagrpo.config import DataSection, MultiTurnSection
from megagrpo.data.images.prompt_images import PromptImages
from megagrpo.data.tokens.sampling import own_sampling
from megagrpo.data.tokens.tokenizer import Tokenizer, as_messages, read_chat_template
from megagrpo.data.tokens.turn_tokens import FollowUps
from megagrpo.engine.client import Respond, VllmEngine
from megagrpo.engine.http.protocol import Group, derive_seed
from megagrpo.engine.load_balancing import Generation, Home
from megagrpo.engine.tool_parsing import ToolParserFailed
from megagrpo.environments.agents.address import Address
from megagrpo.environments.agents.agent import Agent, first_ask, first_request
from megagrpo.environments.agents.renderer import Renderer
from megagrpo.environments.agents.seat import Seat
from megagrpo.environments.agents.trajectory import Trajectory
from megagrpo.environments.agents.turn_sampler import TurnSampler
from megagrpo.environments.episodes.conversation import Conversation
from megagrpo.environments.episodes.tool_calls import CALL_OPENING, as_message, hermes, named_call
from megagrpo.environments.responders import Responders
from megagrpo.environments.wrapped_engine import WrappedEngine
from megagrpo.rewards.functions.text_rewards import encodable
from megagrpo.rewards.math.answers import after_thought
from megagrpo.types import Prompt, Rollout, SamplingParams

Read = tuple[str, list[dict[str, Any]]]  # the text of a turn, and its tool calls
CHARACTERS = 4  # of a token, usually
RETRY_SECONDS = 0.5  # before the first retry of a failed conversation; doubles with each one


@dataclass(frozen=True)
class Dialogues:
    """Multi-turn configuration: scheduler, tools and environment (`responders`), and tokenization of messages.

    `max_response_length` limits response tokens, tool results and follow-ups included. None: sampling's `max_tokens`.
    """

    responders: Responders
    tokenizer: Tokenizer
    follow_ups: FollowUps
    max_prompt_length: int
    max_response_length: int | None = None
    system_prompt: str | None = None
    chat_template: str | None = None

    @property
    def tools(self) -> list[dict[str, Any]]:
        """JSON schemas of the tools, for the prompts."""
        return self.responders.tools

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raise ValueError when the agent needs a column not in `columns`."""
        if self.responders.agent:
            self.responders.agent.check_columns(columns)

    def first_request(self, prompt: Prompt, max_completion_length: int) -> tuple[int, str] | None:
        """Return tokens and text of the agent's first request about a prompt; None without an agent. Raises ValueError
        if there is none."""
        if self.responders.agent is None:
            return None
        response = self.max_response_length or max_completion_length
        renderer = Renderer(self.tokenizer, self.chat_template)
        agent, limits = self.responders.agent, (self.max_prompt_length + response, response)
        ids = first_request(agent, Trajectory(prompt, 0, renderer, *limits, roles=agent.roles))
        return len(ids), self.tokenizer.decode(ids, special=True)

    @property
    def reward_names(self) -> list[str]:
        """Names of the rewards that scheduler and environment give."""
        return self.responders.reward_names

    def wrap(self, engine: VllmEngine) -> DialogueEngine:
        """Wrap `engine` in a DialogueEngine with this configuration."""
        return DialogueEngine(engine, self)


def make_dialogues(
    section: MultiTurnSection,
    data: DataSection,
    names: Sequence[str],
    max_prompt_length: int,
    tokenizer: Tokenizer,
    base_folder: Path,
    resources: ExitStack,
) -> Dialogues | None:
    """Build the Dialogues of the section `multi_turn`, to be closed with `resources`; None when it is disabled. Raises
    ValueError for a setting that cannot be used."""
    if not section.enabled:
        return None
    template = read_chat_template(data.chat_template)
    responders = resources.enter_context(Responders(section, base_folder))
    if taken := sorted(set(names) & set(responders.reward_names)):
        raise ValueError(
            f"rewards.functions: `{taken[0]}` is already the name of a multi_turn reward; give the function another "
            "name"
        )
    if not names and not responders.reward_names:
        raise ValueError(
            "rewards.functions: the run has no rewards; name a function, or give the environment a method `get_reward`"
        )
    follow_ups = FollowUps(tokenizer, template, responders.tools, users=responders.has_scheduler)
    limits = max_prompt_length, section.max_response_length
    return Dialogues(responders, tokenizer, follow_ups, *limits, data.system_prompt, template)


class DialogueEngine(WrappedEngine):
    """An engine whose rollouts have several turns (`Rollout.dialogue`).

    Each conversation is one task: it takes its next turn as soon as its own tools, scheduler or environment have
    answered. Each turn is one request with the whole prefix; the prefix cache of the conversation's server holds
    everything before the new messages. Seeds depend only on prompt, response and turn, so a run is reproducible
    whatever other requests are in flight.
    """

    def __init__(self, engine: VllmEngine, dialogues: Dialogues):
        super().__init__(engine)
        self._dialogues, self.responders = dialogues, dialogues.responders
        self._tokenizer, self._follow_ups = dialogues.tokenizer, dialogues.follow_ups
        self._limits = dialogues.responders.section
        self._numbers = itertools.count()  # of conversations
        self._renderer = Renderer(dialogues.tokenizer, dialogues.chat_template)
        # (event loop, timer) of each conversation that waits for an answer -> `Prompt.position`
        self._answering: dict[tuple[asyncio.AbstractEventLoop, asyncio.Timeout], int | None] = {}

    def cut(self, positions: Collection[int]) -> None:
        """Truncate conversations in progress about the prompts at these `Prompt.position`s: a turn ends with its tokens
        so far, and a conversation that waits for tools, a scheduler or an environment ends without their answer."""
        self.engine.cut(positions)
        for loop, timer in [waiting for waiting in [*self._answering] if self._answering.get(waiting) in positions]:
            with contextlib.suppress(RuntimeError):  # the event loop has just ended in another thread
                loop.call_soon_threadsafe(self._end_wait, loop, timer)

    def _end_wait(self, loop: asyncio.AbstractEventLoop, timer: asyncio.Timeout) -> None:
        if (loop, timer) in self._answering:
            timer.reschedule(loop.time())

    def groups(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: SamplingParams,
        seed: int,
        on_begun: Callable[[], None] = lambda: None,
    ) -> Stream[Group]:
        """Generate `n` rollouts of each prompt; see `VllmEngine.groups`. `sampling.max_tokens` limits each turn of the
        policy, and also the whole response without `max_response_length`."""
        return self.engine.converse(prompts, n, self.responses(prompts, n, sampling, seed), on_begun)

    def responses(self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams, seed: int) -> Respond:
        """Return what gives `VllmEngine.converse` the responses of `groups`."""
        self.responders.log_next_failure()
        agent = self.responders.agent
        address = agent.address() if agent else Address()

        def respond(session: Generation, home: Home, index: int, number: int) -> Coroutine[None, None, Rollout]:
            prompt = prompts[index]
            ordinal = prompt.occurrence * prompt.group_size(n) + number
            own_seed = prompt.sampling.get("seed", seed)
            if agent:
                turns = TurnSampler(session, home, ordinal, own_seed)
                return self._host(agent, address, turns, prompt, sampling)
            return self._converse(session, home, prompt, ordinal, sampling, own_seed)

        return respond

    async def _converse(
        self, session: Generation, home: Home, prompt: Prompt, index: int, sampling: SamplingParams, seed: int
    ) -> Rollout:
        """Hold the conversation `index` of a prompt. One that fails is held again, up to `multi_turn.retries` times,
        with a new environment and the same seeds."""
        await home.granted  # an episode starts when its server has room for the first turn
        opening = as_messages(prompt.messages, self._dialogues.system_prompt)
        limit, retries = self._dialogues.max_response_length or sampling.max_tokens, self._limits.retries
        for attempt in range(retries + 1):
            conversation = Conversation(prompt, index, next(self._numbers), opening, limit, retries=attempt)
            try:
                await self._hold(session, home, conversation, sampling, seed)
            except BaseException:
                self.responders.abandon(conversation)
                raise
            if conversation.ended != "failed" or self.engine.is_cut(prompt):
                break
            if attempt < retries:
                await asyncio.sleep(RETRY_SECONDS * 2**attempt)
        return await self._decoded(len(conversation.ids), conversation.rollout)

    async def _decoded[T](self, count: int, work: Callable[[Callable[[Sequence[int]], str]], T]) -> T:
        """Return `work(decode)`, which decodes `count` tokens, without stopping other conversations."""
        return await self._renderer.threads.run(CHARACTERS * count, partial(work, self._tokenizer.decode))

    async def _host(
        self, agent: Agent, address: Address, turns: TurnSampler, prompt: Prompt, sampling: SamplingParams
    ) -> Rollout:
        """Let the agent hold a conversation, with retries as in `_converse`."""
        await turns.home.granted
        response, retries = self._dialogues.max_response_length or sampling.max_tokens, self._limits.retries
        limits = self._dialogues.max_prompt_length + response, response, self._limits.max_turns

        async def read_calls(prompt: Prompt, rollout: Rollout, tools: Sequence[dict[str, Any]]) -> Read:
            return await self._parsed(turns.session, turns.home, rollout.response_ids.tolist(), prompt.opened, tools)

        for attempt in range(retries + 1):
            trajectory = Trajectory(prompt, turns.index, self._renderer, *limits, retries=attempt, roles=agent.roles)
            opening = CALL_OPENING if self._limits.vllm_parser is None else None
            own = own_sampling(sampling, prompt.sampling)
            seat = Seat(trajectory, own, turns.take, read_calls, opening)
            await self._unless_cut(prompt, partial(agent.converse, address, seat, self.responders.fail))
            trajectory.ended = trajectory.ended or "length"  # it was cut
            if not trajectory.samples:  # every response has a token
                await seat.reply(first_ask(prompt))
            if trajectory.ended != "failed" or self.engine.is_cut(prompt):
                break
            if attempt < retries:
                await asyncio.sleep(RETRY_SECONDS * 2**attempt)
        size = sum(len(sample.ids) for sample in trajectory.samples)
        return await self._renderer.threads.run(CHARACTERS * size, trajectory.rollout)

    async def _hold(
        self, session: Generation, home: Home, conversation: Conversation, sampling: SamplingParams, seed: int
    ) -> None:
        """Take turns until the conversation ends."""

        async def take_turn(max_tokens: int) -> None:
            params, number = replace(sampling, max_tokens=max_tokens), len(conversation.turns)
            own_seed = derive_seed(seed, conversation.prompt.prompt_id, conversation.index, number)
            asked, begun, queued = time.time(), time.monotonic(), home.queued
            turn = await session.turn(conversation.prefix, params, own_seed, home)
            times = dict(began=asked, generated=time.monotonic() - begun, queued=home.queued - queued)
            text = await self._decoded(len(conversation.ids) + turn.length, partial(conversation.turn_text, turn))
            conversation.add_turn(turn, text, **times)

        try:
            async with asyncio.timeout(self._limits.max_seconds) as limit:
                await self._open(conversation)
                while not conversation.ended:
                    await take_turn(min(sampling.max_tokens, conversation.room))
                    began = time.monotonic()
                    await self._answer_or_cut(session, home, conversation)
                    conversation.note(answered=time.monotonic() - began)
        except TimeoutError:
            if not limit.expired():
                raise
            conversation.ended = "time_limit"
        if not conversation.turns:  # every response has a token
            await take_turn(1)
        await self.responders.finish(conversation)

    async def _open(self, conversation: Conversation) -> None:
        """Start the conversation's episode, and append the text of its `reset` to the prompt."""
        longest = self._dialogues.max_prompt_length
        reset_text = await self.responders.begin(conversation)
        if reset_text is None:
            return
        reset_text, opening = encodable(reset_text), [*conversation.opening]
        last = opening[-1]["content"]
        last = last + reset_text if isinstance(last, str) else [*last, {"type": "text", "text": reset_text}]
        opening[-1] = opening[-1] | {"content": last}
        template, kwargs = self._dialogues.chat_template, conversation.prompt.template_kwargs
        inputs = conversation.prompt.inputs
        images = inputs if isinstance(inputs, PromptImages) else None
        expand = str if images is None else images.expanded
        render = partial(self._tokenizer.render, opening, None, template, self.responders.tools, kwargs, expand)
        size = len(reset_text) + CHARACTERS * len(conversation.prompt.token_ids)
        token_ids = await self._renderer.threads.run(size, render)
        if images is not None:
            try:
                token_ids = images.placed(token_ids)
            except ValueError as error:
                self.responders.fail(conversation, f"its prompt with the text of `reset` {error}", "messages")
                return
        if len(token_ids) > longest:
            length = f"its prompt has {len(token_ids)} tokens with the text of `reset`"
            self.responders.fail(
                conversation, f"{length}; the limit is {longest} (rollout.max_prompt_length)", "prompt_length"
            )
            return
        prompt = conversation.prompt
        shown = prompt.messages + reset_text if isinstance(prompt.messages, str) else opening
        conversation.prompt, conversation.opening = replace(prompt, token_ids=token_ids, messages=shown), opening

    async def _answer_or_cut(self, session: Generation, home: Home, conversation: Conversation) -> None:
        """Like `_answer`. A conversation that `cut` truncates ends like one that reaches its greatest length."""
        await self._unless_cut(conversation.prompt, partial(self._answer, session, home, conversation))
        if self.engine.is_cut(conversation.prompt) and not conversation.ended:
            conversation.ended = conversation.finish_reason = "length"

    async def _unless_cut(self, prompt: Prompt, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Run `work` until `cut` truncates the conversations about the prompt."""
        waiting = asyncio.get_running_loop(), asyncio.timeout(None)
        try:
            async with waiting[1]:
                self._answering[waiting] = prompt.position
                if not self.engine.is_cut(prompt):  # check after adding to `_answering`: see `cut`
                    await work()
        except TimeoutError:
            if not waiting[1].expired():
                raise
        finally:
            self._answering.pop(waiting, None)

    async def _answer(self, session: Generation, home: Home, conversation: Conversation) -> None:
        """Run tools or the scheduler on the conversation's last turn, or end the conversation."""
        if conversation.finish_reason == "length":
            conversation.ended = "length"
            return
        calls = await self._read_calls(session, home, conversation)
        if calls and self._within_limits(conversation):
            await self._call_tools(conversation, calls)
        elif not calls and self.responders.has_scheduler:
            await self._ask_scheduler(conversation)
        elif not conversation.ended:
            conversation.ended = "done"

    async def _read_calls(self, session: Generation, home: Home, conversation: Conversation) -> list[dict[str, Any]]:
        """Return the tool calls of the last turn, and replace its message by one with parsed calls."""
        if not self.responders.tools:
            return []
        ids = conversation.ids[conversation.message_start :]
        opened = conversation.prompt.opened
        content, calls = await self._parsed(session, home, ids, opened, self.responders.tools)
        if calls:
            conversation.messages[-1] = as_message(content, calls)
        return calls

    async def _parsed(
        self, session: Generation, home: Home, ids: Sequence[int], opened: str, tools: Sequence[dict[str, Any]]
    ) -> Read:
        """Return the text of a turn outside of its tool calls, and the calls; invalid ones have only `error`. `opened`
        is as in `Prompt`."""
        if self._limits.vllm_parser is None:
            return await self._renderer.threads.run(CHARACTERS * len(ids), partial(self._read_hermes, ids, opened))
        try:
            content, found = await session.read_tool_calls(ids, tools, home)
        except ToolParserFailed as error:
            self.responders.note_parser_failure(str(error))
            return await self._decoded(len(ids), lambda decode: decode(ids)), [{"error": str(error)}]
        return content, [named_call(**call) for call in found]

    def _read_hermes(self, ids: Sequence[int], opened: str) -> Read:
        content = self._tokenizer.decode(ids)  # not the message: a stop string may close the call
        return (content, []) if after_thought(content, opened) is None else hermes(content)

    def _within_limits(self, conversation: Conversation) -> bool:
        """Whether further tool calls are allowed. Ends the conversation if not."""
        limit = self._limits.max_tool_calling_iterations
        if limit is not None and sum(bool(turn.calls) for turn in conversation.turns) >= limit:
            conversation.ended = "tool_limit"
        elif self._has_no_turns_left(conversation):
            conversation.ended = "max_turns"
        return not conversation.ended

    def _has_no_turns_left(self, conversation: Conversation) -> bool:
        return self._limits.max_turns is not None and len(conversation.turns) >= self._limits.max_turns

    async def _call_tools(self, conversation: Conversation, calls: Sequence[dict[str, Any]]) -> None:
        messages = await self.responders.use_tools(conversation, calls)
        if not conversation.ended:
            try:
                size = sum(len(message["content"]) for message in messages)
                suffix = partial(conversation.suffix, messages, self._follow_ups)
                conversation.add_suffix(*await self._renderer.threads.run(size, suffix))
            except ValueError as error:  # with a row's own variables the template may rewrite earlier turns
                self.responders.fail(conversation, str(error), "messages")

    async def _ask_scheduler(self, conversation: Conversation) -> None:
        answer = await self.responders.schedule(conversation)
        if answer is None:
            return
        messages, done, reward = answer
        conversation.note(reward=reward)
        if done:
            conversation.ended = "done"
        elif self._has_no_turns_left(conversation):
            conversation.ended = "max_turns"
        else:
            added = messages[len(conversation.opening) + len(conversation.messages) - 1 :]  # and the policy's last one
            size = CHARACTERS * len(conversation.ids) + sum(len(str(message.get("content"))) for message in added)
            follow = partial(conversation.following, messages, self._follow_ups)
            try:
                (await self._renderer.threads.run(size, follow))()
            except ValueError as error:
                self.responders.fail(conversation, str(error), "messages")
