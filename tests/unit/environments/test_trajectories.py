"""What an agent's requests become: exact continuations of what the policy sampled, or samples of their own."""

import json
from pathlib import Path

import pytest

from megagrpo.data.tokens.tokenizer import load_tokenizer
from megagrpo.environments.agents.agent_messages import Refused, histories, plain
from megagrpo.environments.agents.renderer import Renderer
from megagrpo.environments.agents.trajectory import Trajectory
from megagrpo.types import Prompt, Rollout
from tests.unit.data.test_tokenizer import chat_folder  # noqa: F401

HERMES = (Path(__file__).parents[3] / "configs" / "templates" / "hermes_tools.jinja").read_text()
# As Qwen3's: thoughts before the last message of a user are dropped. Arguments of calls must be objects.
QWEN3 = """
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }} {{- ' ' + m.name if m.name }}
{% if m.role == 'assistant' and loop.index0 < ns.last %}{{ m.content.split('</think>')[-1].lstrip('\\n') }}
{%- else %}{{ m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}
{%- for name, value in call.function.arguments.items() %} {{ name }}={{ value }}{% endfor %}</tool_call>{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SEARCH = {"type": "function", "function": {"name": "search", "description": "Looks.", "parameters": {}}}
END = 2  # <|im_end|>


@pytest.fixture(scope="module")
def tokenizer(chat_folder):  # noqa: F811
    return load_tokenizer(chat_folder)


class Agent:
    """An agent that sends what its test says, and a policy whose turns are texts."""

    def __init__(self, tokenizer, template=HERMES, tools=(), **limits):
        self.tokenizer, self.tools, self.contexts = tokenizer, list(tools), []
        limits = {"max_length": 4000, "max_response": 3000} | limits
        self.trajectory = Trajectory(Prompt(7, (1,), "?"), 3, Renderer(tokenizer, template), **limits)
        self.trajectory.ended = "done"

    def ask(self, messages, text, calls=(), end=(END,), reason="stop", stop_string=None, tools=None):
        """Ask for a turn, and return the messages with the reply."""
        messages = [plain(message) for message in messages]
        start = started(self.trajectory, messages, self.tools if tools is None else tools)
        self.contexts.append(start.context)
        ids = [*self.tokenizer.encode(text, False), *end]
        prompt = Prompt(7, start.context, messages)
        rollout = Rollout(prompt, ids, [-0.5] * len(ids), reason, 1, text, stop_string=stop_string)
        message = {"role": "assistant", "content": "" if calls else text} | ({"tool_calls": calls} if calls else {})
        self.trajectory.record(start, rollout, message)
        return [*messages, message]

    def samples(self):
        """(prompt, policy's text) of each sample: the main one, then its branches."""
        rollout = self.trajectory.rollout()
        return [(text_of(self, s.prompt.token_ids), written(self, s)) for s in (rollout, *rollout.branches)]


def text_of(agent, ids):
    return agent.tokenizer.decode(ids, special=True)


def written(agent, sample):
    """The text that the policy wrote in a sample; None stands for tokens of others."""
    texts, rest = [], list(zip(sample.response_ids.tolist(), sample.written.tolist(), strict=True))
    while rest:
        count = next((i for i, (_, by) in enumerate(rest) if by != rest[0][1]), len(rest))
        texts.append(text_of(agent, [i for i, _ in rest[:count]]) if rest[0][1] else None)
        rest = rest[count:]
    return texts


def started(trajectory, messages, tools):
    """Where a turn begins that the policy takes now."""
    start = trajectory.find(messages, tools)
    trajectory.begin(start)
    return start


def user(text):
    return {"role": "user", "content": text}


def call_of(name, number, **arguments):
    return {"id": number, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def test_a_history_that_only_grows_is_one_sample_of_exactly_the_sampled_tokens(tokenizer):
    agent = Agent(tokenizer)
    told = agent.ask([{"role": "system", "content": "Be brief."}, user("hi")], "h" + "ello")
    agent.ask([*told, user("more")], "no")
    first, second = agent.contexts
    # the merges of the policy's own tokens, whatever the tokenizer would make of its text
    assert second[: len(first)] == first
    assert text_of(agent, second).endswith("hello<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n")
    ((prompt, texts),) = agent.samples()
    assert prompt == text_of(agent, first) and texts == ["hello<|im_end|>", None, "no<|im_end|>"]
    assert not agent.trajectory.counts
    first, last = agent.trajectory.rollout().dialogue.turns
    assert first.answered > 0 == last.answered  # seconds until the agent asked again


def test_the_turns_tokens_are_kept_where_the_tokenizer_would_choose_others(tokenizer):
    agent = Agent(tokenizer)
    pair = next(piece for piece in tokenizer.pieces() if len(piece) == 2 and piece.isascii() and piece.isalpha())
    letters = [tokenizer.encode(letter, False)[0] for letter in pair]
    assert len(tokenizer.encode(pair, False)) == 1
    told = agent.ask([user("hi")], "", end=(*letters, END))
    agent.ask([*told, user("more")], "no")
    assert agent.contexts[1][len(agent.contexts[0]) :][:2] == tuple(letters)


def test_calls_and_their_results_continue_by_value_whatever_the_spaces_in_their_arguments(tokenizer):
    agent = Agent(tokenizer, tools=[SEARCH])
    told = agent.ask([user("find")], '<tool_call>\n{"name": "search"}', [call_of("search", "c1", q="x", n=1)])
    told[-1]["tool_calls"][0]["function"]["arguments"] = '{"n":1,"q":"x"}'
    told[-1]["content"] = None
    agent.ask([*told, {"role": "tool", "tool_call_id": "c1", "content": "found"}], "done")
    assert not agent.trajectory.counts
    assert "<tool_response>\nfound" in text_of(agent, agent.contexts[1])


@pytest.mark.parametrize("arguments", [None, "", " ", "{}", {}])
def test_a_call_without_arguments_continues_and_is_rendered_however_they_are_left_out(tokenizer, arguments):
    agent = Agent(tokenizer, QWEN3, tools=[SEARCH])
    told = agent.ask([user("find")], "x", [call_of("search", "c1")])
    told[-1]["tool_calls"][0]["function"]["arguments"] = arguments
    told = agent.ask([*told, {"role": "tool", "tool_call_id": "c1", "content": "found"}], "done")
    assert not agent.trajectory.counts
    agent.ask([user("other"), *told[1:], user("more")], "done")  # rendered in full
    assert agent.trajectory.counts == {"branches/edited": 1}


def test_a_template_that_drops_thoughts_makes_a_sample_of_each_turn_after_a_user(tokenizer):
    agent = Agent(tokenizer, QWEN3, tools=[SEARCH])
    told = agent.ask([user("one")], "<think>a</think>1", [call_of("search", "c1", q="x")])
    told = agent.ask([*told, {"role": "tool", "tool_call_id": "c1", "content": "r"}], "<think>b</think>2")
    told = agent.ask([*told, user("two")], "<think>c</think>3")
    agent.ask([*told, user("three")], "<think>d</think>4")
    assert agent.trajectory.counts == {"branches/template": 2}
    (last_prompt, last), (_, first), (second_prompt, second) = agent.samples()
    assert first == ["<think>a</think>1<|im_end|>", None, "<think>b</think>2<|im_end|>"]  # a tool's result drops none
    assert second == ["<think>c</think>3<|im_end|>"] and last == ["<think>d</think>4<|im_end|>"]
    assert "tool search\nr" in text_of(agent, agent.contexts[1]) and "tool search\nr" in second_prompt
    assert "2" in second_prompt and "think" not in second_prompt and "q=x" in second_prompt
    assert "3" in last_prompt and "think" not in last_prompt


def test_branches_are_counted_by_cause_and_train_each_sampled_token_once(tokenizer):
    agent = Agent(tokenizer)
    told = agent.ask([user("a")], "one")
    longer = agent.ask([*told, user("b")], "two")
    agent.ask([*told, user("c")], "three")  # goes on from the first turn again
    agent.ask([user("a")], "four")  # asks the same again
    edited = [longer[0], longer[1] | {"content": "On"}, *longer[2:]]
    agent.ask([*edited, user("d")], "five")
    agent.ask([user("of a helper")], "six")
    agent.ask([*longer, user("e")], "seven", tools=[SEARCH])
    assert agent.trajectory.counts == {
        f"branches/{c}": n for c, n in (("fork", 2), ("edited", 1), ("new", 1), ("tools", 1))
    }
    samples = agent.samples()
    said = [text for _, texts in samples for text in texts if text]
    assert sorted(said) == sorted(f"{t}<|im_end|>" for t in ("one", "two", "three", "four", "five", "six", "seven"))
    assert samples[0][1] == ["seven<|im_end|>"]  # the sample of the last turn is the main one
    forked = next(prompt for prompt, texts in samples if texts == ["three<|im_end|>"])
    assert "one<|im_end|>" in forked and "two" not in forked
    assert agent.contexts[2][: len(agent.contexts[0])] == agent.contexts[0]


def test_two_requests_at_once_from_one_turn_are_two_samples(tokenizer):
    agent = Agent(tokenizer)
    told = agent.ask([user("a")], "one")
    trajectory, asked = agent.trajectory, [[*told, user(text)] for text in "bc"]
    starts = [started(trajectory, messages, ()) for messages in asked]
    for start, text in zip(starts, "23", strict=True):
        rollout = Rollout(
            Prompt(7, start.context, ""), [*tokenizer.encode(text, False), END], [-1.0] * 2, "stop", 1, text
        )
        trajectory.record(start, rollout, {"role": "assistant", "content": text})
    assert [texts for _, texts in agent.samples()] == [["3<|im_end|>"], ["one<|im_end|>", None, "2<|im_end|>"]]
    assert trajectory.counts == {"branches/fork": 1}


def test_a_turn_cut_by_its_length_or_a_stop_string_is_closed_for_the_next(tokenizer):
    for reason, stop_string in (("length", None), ("stop", "x")):
        agent = Agent(tokenizer)
        told = agent.ask([user("a")], "cutx", end=(), reason=reason, stop_string=stop_string)
        agent.ask([*told, user("b")], "two")
        assert "cutx<|im_end|>\n<|im_start|>user" in text_of(agent, agent.contexts[1])


def test_a_history_with_no_room_left_is_refused_as_openai_does(tokenizer):
    agent = Agent(tokenizer, max_length=60)
    told = agent.ask([user("a")], "one")
    with pytest.raises(Refused, match="at most 60 tokens") as refused:
        agent.ask([*told, user("long " * 40)], "two")
    assert refused.value.code == "context_length_exceeded" and agent.trajectory.limit == "budget"
    with pytest.raises(Refused, match="max_turns"):
        agent = Agent(tokenizer, max_turns=1)
        agent.ask([*agent.ask([user("a")], "one"), user("b")], "two")


def test_a_turn_has_the_room_that_the_sample_before_it_leaves(tokenizer):
    agent = Agent(tokenizer, max_response=200)
    told = agent.ask([user("a")], "one")
    asked = [*told, user("b")]
    second = started(agent.trajectory, asked, ())
    response = len(second.context) - len(agent.contexts[0])
    assert agent.trajectory.room(second) == 200 - response < 200 - len(second.suffix) < 200
    agent.ask(asked, "two")
    fork = started(agent.trajectory, [*told, user("c")], ())
    assert agent.trajectory.room(fork) == 200, "another sample begins, and its whole context is its prompt"
    repeated = started(agent.trajectory, asked, ())
    assert repeated.context == second.context and agent.trajectory.room(repeated) == 200
    narrow = Agent(tokenizer, max_length=len(second.context) + 5)
    narrow.ask([user("a")], "one")
    assert narrow.trajectory.room(started(narrow.trajectory, asked, ())) == 5
    assert [sample.max_length for sample in narrow.trajectory.samples] == [response + 5]


def test_parts_of_text_and_developers_are_what_they_stand_for():
    parts = {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]}
    assert plain(parts | {"refusal": None}) == {"role": "system", "content": "ab"}
    with pytest.raises(Refused, match="only text"):
        plain(user([{"type": "image_url", "image_url": {"url": "x"}}]))
    assert histories([plain(user("a"))]) == histories([plain(user([{"type": "text", "text": "a"}]))])


def test_a_template_that_does_not_show_the_tools_is_said_once_and_tool_sets_do_not_pile_up(tokenizer, caplog):
    plainly = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>a\n"
    agent = Agent(tokenizer, plainly, max_length=100_000, max_response=50_000)
    for i in range(70):
        tools = [{"type": "function", "function": {"name": f"tool{i}", "description": "Does.", "parameters": {}}}]
        told = agent.ask([user(f"a{i}")], "one", tools=tools)
        agent.ask([*told, user("b")], "two", tools=tools)
    assert len(agent.trajectory.renderer._follow_ups) <= 64
    assert agent.trajectory.counts == {"branches/new": 69}
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "does not show the tools to the policy" in warning
