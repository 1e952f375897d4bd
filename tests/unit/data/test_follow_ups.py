"""Conversations continue from the policy's own tokens; only new messages are tokenized, through the chat template."""

from pathlib import Path

import pytest

from megagrpo.data.tokens.tokenizer import load_tokenizer
from megagrpo.data.tokens.turn_tokens import FollowUps
from megagrpo.environments.episodes.conversation import Conversation
from megagrpo.types import Prompt, Rollout
from tests.unit.data.test_tokenizer import CHATML, base_folder, chat_folder  # noqa: F401

HERMES = (Path(__file__).parents[3] / "configs" / "templates" / "hermes_tools.jinja").read_text()
ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}
TOOL = {"role": "tool", "name": "add", "content": "42"}
USER = {"role": "user", "content": "Sure?"}
# Drops the thoughts of all turns but the last, like templates of reasoning models.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if loop.last else m.content.split('</think>')[-1] "
    "}}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def tokenizer(chat_folder):  # noqa: F811
    return load_tokenizer(chat_folder)


def text_of(tokenizer, ids):
    return tokenizer.tokenizer.decode(list(ids), skip_special_tokens=False)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([USER], "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"),
        ([TOOL], "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"),
        (
            [TOOL, TOOL | {"content": "7"}, USER],
            "\n<|im_start|>user\n<tool_response>\n42\n</tool_response>\n<tool_response>\n7\n</tool_response><|im_end|>\n"
            "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n",
        ),
    ],
)
def test_messages_are_what_the_template_adds_behind_the_end_of_the_turn(tokenizer, messages, expected):
    suffix = FollowUps(tokenizer, HERMES, [ADD]).suffix(messages)
    assert text_of(tokenizer, suffix) == expected
    assert list(suffix) == tokenizer.encode(expected, add_special_tokens=False)


def test_the_whole_is_what_the_template_makes_of_the_whole_conversation(tokenizer):
    """The policy's tokens equal the tokenizer's here: then a continued conversation equals one rendered at once."""
    opening, turns = [{"role": "user", "content": "What is 4 + 5?"}], ["The sum of 4 and 5 is 9.", "It is 9."]
    ids = list(tokenizer.render(opening, None, HERMES, [ADD]))
    follow_ups, messages = FollowUps(tokenizer, HERMES, [ADD]), opening
    for turn in turns:
        ids += [
            *tokenizer.encode(turn, False),
            tokenizer.tokenizer.convert_tokens_to_ids("<|im_end|>"),
            *follow_ups.suffix([USER]),
        ]
        messages = [*messages, {"role": "assistant", "content": turn}, USER]
    assert tuple(ids) == tokenizer.render(messages, None, HERMES, [ADD])


@pytest.mark.parametrize(
    ("template", "tools", "users", "problem"),
    [
        (None, [ADD], False, "the tokenizer's chat template does not show the tools to the policy"),
        (
            FORGETFUL,
            [],
            True,
            "the template of data.chat_template changes an assistant's turn when a user message follows it",
        ),
        (CHATML.replace("{{ m.content }}", "{{ m.content if m.role != 'tool' }}"), [ADD], False, "drops tool messages"),
        (
            CHATML.replace("{{ m.role }}", "{{ raise_exception('no tools here') if m.role == 'tool' }}"),
            [ADD],
            False,
            "no tools here",
        ),
        ("none", [], True, "multi_turn needs a chat template"),
    ],
)
def test_a_template_that_cannot_carry_a_conversation_is_refused_by_name(tokenizer, template, tools, users, problem):
    with pytest.raises(ValueError, match=f"data.chat_template: .*{problem}"):
        FollowUps(tokenizer, template, tools, users)


def test_a_template_may_forget_where_no_user_follows(tokenizer):
    template = FORGETFUL.replace(
        "m.content if loop.last else", "m.content if loop.last or messages[loop.index].role == 'tool' else"
    )
    template = template.replace("{% for", "{% if tools %}{{ tools[0].function.name }}{% endif %}{% for", 1)
    FollowUps(tokenizer, template, [ADD], users=False)
    with pytest.raises(ValueError, match="when a user message follows"):
        FollowUps(tokenizer, template, [ADD], users=True)


# -------------------------------------------------------------------------------------------------------- conversations


def conversation(tokenizer, text, ended=True, limit=200):
    """A conversation whose policy has written `text`, one token per character, so only the policy can have made these
    ids."""
    alphabet = tokenizer.tokenizer.convert_tokens_to_ids
    ids = [i for character in text for i in tokenizer.encode(character, False)]
    ids += [alphabet("<|im_end|>")] if ended else []
    opening = [{"role": "user", "content": "What is 4 + 5?"}]
    made = Conversation(Prompt(0, tokenizer.render(opening), opening), 0, 0, opening, limit)
    add_turn(made, turn(made, ids, "stop" if ended else "length"), tokenizer.decode)
    return made, ids


def add_turn(made, rollout, decode):
    made.add_turn(rollout, made.turn_text(rollout, decode))


def turn(made, ids, reason="stop"):
    return Rollout(made.prefix, tuple(ids), tuple(-0.1 * (1 + i % 3) for i in range(len(ids))), reason, 1, "")


def test_tokens_of_the_policy_are_never_tokenised_again(tokenizer):
    made, ids = conversation(tokenizer, "The sum is 9.")
    assert ids != tokenizer.encode("The sum is 9.", False)  # the tokenizer itself would merge them
    made.following([*made.all_messages, USER], FollowUps(tokenizer, None))()
    suffix = FollowUps(tokenizer, None).suffix([USER])
    assert made.prefix.token_ids == (*made.prompt.token_ids, *ids, *suffix)
    add_turn(made, turn(made, [70, 71, 2]), tokenizer.decode)
    made.ended = "done"
    found = made.rollout(tokenizer.decode)
    assert found.response_ids.tolist() == [*ids, *suffix, 70, 71, 2] and found.length == len(ids) + 3
    assert found.written.tolist() == [True] * len(ids) + [False] * len(suffix) + [True] * 3
    assert [own for own, value in zip(found.written, found.rollout_logprobs, strict=True) if value == 0] == [
        False
    ] * len(suffix)
    assert [m["role"] for m in found.dialogue.messages] == [
        "assistant",
        "user",
        "assistant",
    ] and len(found.dialogue.turns) == 2


@pytest.mark.parametrize("ended", [True, False])
def test_a_message_can_be_cut_and_continued_from_its_own_tokens(tokenizer, ended):
    made, ids = conversation(tokenizer, "It is 8. <answer>8</answer>", ended)
    content = "It is 8. But wait..."
    made.following([*made.opening, {"role": "assistant", "content": content}], FollowUps(tokenizer, None))()
    doubt = tokenizer.encode("But wait...", False)
    assert made.ids == ids[: len("It is 8. ")] + doubt and made.is_open
    assert made.written == [True] * len("It is 8. ") + [False] * len(doubt) and len(made.logprobs) == len(made.ids)
    add_turn(made, turn(made, [*tokenizer.encode(" 9", False), 2]), tokenizer.decode)
    assert made.messages == [{"role": "assistant", "content": "It is 8. But wait... 9"}]
    assert [(one.start, one.stop) for one in made.turns] == [(0, 9), (20, 22)]


def test_a_cut_within_a_token_gives_up_that_token(tokenizer):
    made, _ = conversation(tokenizer, "x")
    whole = tokenizer.encode("The sum of 4", False)
    made.ids, made.written, made.logprobs = [*whole, 2], [True] * (len(whole) + 1), [-0.5] * (len(whole) + 1)
    made.messages = [{"role": "assistant", "content": "The sum of 4"}]
    assert any(len(tokenizer.decode([i])) > 1 for i in whole)
    for length in range(len("The sum of 4")):
        kept, text = FollowUps(tokenizer, None).tokens_within(made.ids, "The sum of 4"[:length])
        assert tokenizer.decode(made.ids[:kept]) == text == "The sum of 4"[: len(text)] and len(text) <= length
        assert kept == len(whole) or len(tokenizer.decode(made.ids[: kept + 1])) > length


def test_a_character_cut_in_two_is_given_up_whole(tokenizer):
    ids = tokenizer.encode("a€b", False)
    assert len(ids) > 3  # the sign has three bytes
    follow_ups = FollowUps(tokenizer, None)
    assert follow_ups.tokens_within(ids, "a€") == (len(ids) - 1, "a€") and follow_ups.tokens_within(ids, "a") == (
        1,
        "a",
    )
    assert follow_ups.tokens_within(ids[:2], "a\N{REPLACEMENT CHARACTER}")[1].startswith("a")


def test_a_response_ends_where_what_is_added_leaves_no_room(tokenizer):
    needed = len(FollowUps(tokenizer, None).suffix([USER]))
    for room, ended in ((needed + 1, ""), (needed, "budget")):
        made, ids = conversation(tokenizer, "9", limit=0)
        made.max_length = len(ids) + room
        made.following([*made.all_messages, USER], FollowUps(tokenizer, None))()
        assert made.ended == ended and (made.room, len(made.messages)) == ((1, 2) if not ended else (room, 1))
        made, ids = conversation(tokenizer, "9", limit=0)
        made.max_length = 1 + len(tokenizer.encode(" or 8", False)) + (not ended)
        made.following([*made.opening, {"role": "assistant", "content": "9 or 8"}], FollowUps(tokenizer, None))()
        assert made.ended == ended and (made.ids == ids) == bool(ended)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda m: m[:-1], "changed earlier messages"),
        (lambda m: [m[0] | {"content": "other"}, m[1]], "changed earlier messages"),
        (lambda m: m, "adds no message that the policy could answer"),
        (lambda m: [*m, {"role": "assistant", "content": "mine"}], "adds no message that the policy could answer"),
        (lambda m: [*m[:-1], m[-1] | {"content": "other"}, USER], "it may do one of the two"),
        (lambda m: [*m, {"role": "user"}], "messages without a role, or with content other than text"),
        (lambda m: [*m, "Sure?"], "messages without a role, or with content other than text"),
    ],
)
def test_a_scheduler_may_add_messages_or_change_the_last_one(tokenizer, change, problem):
    made, ids = conversation(tokenizer, "9")
    with pytest.raises(ValueError, match=problem):
        made.following(change(made.all_messages), FollowUps(tokenizer, None))()
    assert made.ids == ids and len(made.messages) == 1
