"""A conversation keeps the route of each token's first pass, and forgets those of tokens that a scheduler removes."""

import numpy as np

from megagrpo.environments.episodes.conversation import Conversation
from megagrpo.types import Prompt, Rollout

PROMPT = Prompt(0, (1, 2, 3), "question")


class FollowUps:
    """Tokens of letters; messages of others are two tokens."""

    def suffix(self, messages, template_kwargs, closed):
        return [50, 51]

    def tokens_within(self, ids, text):
        return len(text), text

    def text(self, text):
        return [ord(character) for character in text]


def decode(ids):
    return "".join(map(chr, ids))


def turn(conversation: Conversation, text: str, mark: int) -> None:
    """The policy writes `text`; all rows of the request's routes are `mark`."""
    prefix = conversation.prefix
    ids = [ord(character) for character in text]
    routes = np.full((len(prefix.token_ids) + len(ids) - 1, 2, 1), mark, np.uint8)
    rollout = Rollout(prefix, ids, [-1.0] * len(ids), "stop", 1, text, routes=routes)
    conversation.add_turn(rollout, conversation.turn_text(rollout, decode))


def marks(conversation: Conversation) -> list[int]:
    return conversation.routes[:, 0, 0].tolist()


def test_a_later_turn_adds_routes_for_the_tokens_that_were_not_read_before():
    conversation = Conversation(PROMPT, 0, 0, [], 100)
    turn(conversation, "abc", 1)
    assert marks(conversation) == [1] * 5
    conversation.add_suffix(*conversation.suffix([{"role": "user", "content": "more"}], FollowUps()))
    turn(conversation, "de", 2)
    # the last token of the first turn and the two of the message are read in the second request
    assert marks(conversation) == [1] * 5 + [2] * 4
    assert len(conversation.rollout(decode).routes) == len(PROMPT.token_ids) + 7 - 1


def test_removed_tokens_lose_their_routes():
    conversation = Conversation(PROMPT, 0, 0, [{"role": "user", "content": "question"}], 100)
    turn(conversation, "abcd", 1)
    conversation.following([*conversation.opening, {"role": "assistant", "content": "abX"}], FollowUps())()
    assert decode(conversation.ids) == "abX" and marks(conversation) == [1] * 5
    turn(conversation, "e", 2)
    assert marks(conversation) == [1] * 5 + [2]
    conversation = Conversation(PROMPT, 0, 0, [], 100)
    assert conversation.routes is None
