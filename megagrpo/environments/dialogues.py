"""An engine for multi-turn responses. After a tool or scheduler message the policy continues from its exact tokens."""

from __future__ import annotations

from collections.abc import Generator as Stream
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megagrpo.config import DataSection, MultiTurnSection
from megagrpo.data.follow_ups import FollowUps
from megagrpo.data.tokenizer import Tokenizer, as_messages, read_chat_template
from megagrpo.engine.client import VllmEngine
from megagrpo.engine.protocol import Generator, Group, derive_seed
from megagrpo.environments.conversation import Conversation
from megagrpo.environments.responders import Responders
from megagrpo.environments.tool_calls import as_message, hermes, named_call
from megagrpo.rewards.answers import after_thought
from megagrpo.rewards.functions.text_rewards import encodable
from megagrpo.types import Prompt, Rollout, SamplingParams


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


class DialogueEngine(Generator):
    """An engine whose rollouts have several turns (`Rollout.dialogue`).

    The conversations advance in lockstep, turn by turn. Each turn is one request with the whole prefix; vLLM's prefix
    cache already holds everything before the new messages. Seeds depend only on prompt, response and turn, so a run is
    reproducible whatever other requests are in flight.
    """

    def __init__(self, engine: VllmEngine, dialogues: Dialogues):
        self.engine, self._dialogues, self.responders = engine, dialogues, dialogues.responders
        self._tokenizer, self._follow_ups = dialogues.tokenizer, dialogues.follow_ups
        self._limits = dialogues.responders.section

    @property
    def weight_version(self) -> int:
        """The weight version of the wrapped engine."""
        return self.engine.weight_version

    @weight_version.setter
    def weight_version(self, version: int) -> None:
        self.engine.weight_version = version

    def interrupt(self) -> None:
        """Make `groups` raise EngineInterrupted, at the latest when the policy's next turn begins."""
        self.engine.interrupt()

    def groups(self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams, seed: int) -> Stream[Group]:
        """Generate `n` rollouts of each prompt; see `Generator.groups`. `sampling.max_tokens` limits each turn of the
        policy, and also the whole response without `max_response_length`."""
        limit = self._dialogues.max_response_length or sampling.max_tokens
        conversations = self._conversations(prompts, n, limit)
        self._open(conversations)
        finished: dict[int, Rollout] = {}
        active = conversations
        while active:
            self._take_turns(active, sampling, seed)
            self._respond(active)
            ended = [c for c in active if c.ended]
            self.responders.finish(ended)
            finished |= {c.number: c.rollout(self._tokenizer.decode) for c in ended}
            active = [c for c in active if not c.ended]
            for prompt_index in dict.fromkeys(c.prompt_index for c in ended):
                numbers = range(prompt_index * n, (prompt_index + 1) * n)
                if all(number in finished for number in numbers):
                    yield prompt_index, [finished[number] for number in numbers]

    def _conversations(self, prompts: Sequence[Prompt], n: int, limit: int) -> list[Conversation]:
        conversations = []
        for prompt_index, prompt in enumerate(prompts):
            opening = as_messages(prompt.messages, self._dialogues.system_prompt)
            for i in range(n):
                index, number = prompt.occurrence * n + i, prompt_index * n + i
                conversations.append(Conversation(prompt, prompt_index, index, number, opening, limit))
        return conversations

    def _open(self, conversations: Sequence[Conversation]) -> None:
        """Start the conversations' episodes, and append the text of each episode's `reset` to its prompt."""
        longest = self._dialogues.max_prompt_length
        for conversation, reset_text in zip(conversations, self.responders.begin(conversations), strict=True):
            if reset_text is None:
                continue
            reset_text, opening = encodable(reset_text), [*conversation.opening]
            opening[-1] = opening[-1] | {"content": opening[-1]["content"] + reset_text}
            template, kwargs = self._dialogues.chat_template, conversation.prompt.template_kwargs
            token_ids = self._tokenizer.render(opening, None, template, self.responders.tools, kwargs)
            if len(token_ids) > longest:
                length = f"its prompt has {len(token_ids)} tokens with the text of `reset`"
                self.responders.fail(conversation, f"{length}; the limit is {longest} (rollout.max_prompt_length)")
                continue
            prompt = conversation.prompt
            shown = prompt.messages + reset_text if isinstance(prompt.messages, str) else opening
            conversation.prompt, conversation.opening = replace(prompt, token_ids=token_ids, messages=shown), opening

    def _take_turns(self, conversations: Sequence[Conversation], sampling: SamplingParams, seed: int) -> None:
        """Generate one turn of the policy in each conversation."""
        params = [replace(sampling, max_tokens=min(sampling.max_tokens, c.room)) for c in conversations]
        seeds = [derive_seed(seed, c.prompt.prompt_id, c.index, c.turns) for c in conversations]
        turns = self.engine.extend([c.prefix for c in conversations], params, seeds)
        for conversation, turn in zip(conversations, turns, strict=True):
            conversation.add_turn(turn, self._tokenizer.decode)

    def _respond(self, conversations: Sequence[Conversation]) -> None:
        """Run tools or the scheduler on each conversation's last turn, or end the conversation."""
        calling: list[tuple[Conversation, list[dict[str, Any]]]] = []
        waiting: list[Conversation] = []
        for conversation in conversations:
            # a conversation may have failed before its first turn
            if not conversation.ended and conversation.finish_reason == "length":
                conversation.ended = "length"
        active = [c for c in conversations if not c.ended]
        for conversation, calls in zip(active, self._read_calls(active), strict=True):
            if calls and self._within_limits(conversation):
                calling.append((conversation, calls))
            elif not calls and self.responders.has_scheduler:
                waiting.append(conversation)
            elif not conversation.ended:
                conversation.ended = "done"
        self._call_tools(calling)
        self._ask_scheduler(waiting)

    def _read_calls(self, conversations: Sequence[Conversation]) -> list[list[dict[str, Any]]]:
        """Return the tool calls of each conversation's last turn, and replace its message by one with parsed calls."""
        if not self.responders.tools or not conversations:
            return [[] for _ in conversations]
        last_turns = [c.ids[c.message_start :] for c in conversations]
        if self._limits.vllm_parser is None:
            read = []
            for conversation, ids in zip(conversations, last_turns, strict=True):
                text = self._tokenizer.decode(ids)  # not the message: a stop string may close the call
                thinks = after_thought(text, conversation.prompt.opened) is None
                read.append((text, []) if thinks else hermes(text))
        else:
            answers = self.engine.read_tool_calls(last_turns, self.responders.tools)
            read = [(content, [named_call(**call) for call in calls]) for content, calls in answers]
        for conversation, (content, calls) in zip(conversations, read, strict=True):
            if calls:
                conversation.messages[-1] = as_message(content, calls)
        return [calls for _, calls in read]

    def _within_limits(self, conversation: Conversation) -> bool:
        """Whether another tool call is allowed. Ends the conversation if not."""
        rounds, limits = conversation.tool_rounds, self._limits
        if limits.max_tool_calling_iterations is not None and rounds >= limits.max_tool_calling_iterations:
            conversation.ended = "tool_limit"
        elif self._has_no_turns_left(conversation):
            conversation.ended = "max_turns"
        return not conversation.ended

    def _has_no_turns_left(self, conversation: Conversation) -> bool:
        return self._limits.max_turns is not None and conversation.turns >= self._limits.max_turns

    def _call_tools(self, calling: Sequence[tuple[Conversation, list[dict[str, Any]]]]) -> None:
        conversations = [conversation for conversation, _ in calling]
        results = self.responders.use_tools(conversations, [calls for _, calls in calling])
        for conversation, messages in zip(conversations, results, strict=True):
            conversation.tool_rounds += 1
            if not conversation.ended:
                try:
                    conversation.add_messages(messages, self._follow_ups)
                except ValueError as error:  # with a row's own variables the template may rewrite earlier turns
                    self.responders.fail(conversation, str(error))

    def _ask_scheduler(self, waiting: Sequence[Conversation]) -> None:
        for conversation, answer in zip(waiting, self.responders.schedule(waiting), strict=True):
            if answer is None:
                continue
            messages, done, reward = answer
            conversation.turn_rewards.append(reward)
            if done:
                conversation.ended = "done"
            elif self._has_no_turns_left(conversation):
                conversation.ended = "max_turns"
            else:
                try:
                    conversation.follow(messages, self._follow_ups)
                except ValueError as error:
                    self.responders.fail(conversation, str(error))
