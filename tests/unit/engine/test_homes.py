"""Turns of conversations go to the server that holds their prefix. Real servers with fixed delays."""

import asyncio
import random
from collections import Counter, deque
from contextlib import ExitStack, closing, suppress

import pytest

from megagrpo.engine.client import VllmEngine
from megagrpo.engine.http.protocol import EngineError
from megagrpo.engine.load_balancing import Generation, Home, Tools
from megagrpo.engine.server_slots import Slots
from megagrpo.engine.tool_parsing import ToolParserFailed
from megagrpo.types import Prompt, SamplingParams
from tests.unit.engine.stand_ins import StandIn

SAMPLING = SamplingParams(1.0, 4)


@pytest.fixture
def servers():
    """A factory of stand-ins that are closed at the end."""
    with ExitStack() as stack:
        yield lambda *words, **options: stack.enter_context(closing(StandIn(*words, **options)))


def converse(servers, groups, n, turns, pause=0.0, **options):
    """Hold `n` conversations for each of `groups` prompts. Returns {prompt: [all tokens of each conversation]}.

    `turns` and `pause` give a conversation's number of turns, and the seconds of its tools after each turn.
    """
    engine = VllmEngine([server.url for server in servers], str, **options)
    prompts = [Prompt(i, (1, 2, i + 3), "") for i in range(groups)]

    async def respond(session, home, index, number):
        tokens = prompts[index].token_ids
        for turn in range(turns(index, number)):
            rollout = await session.turn(Prompt(index, tokens, ""), SAMPLING, 1000 * index + 10 * number + turn, home)
            tokens += (*rollout.response_ids.tolist(), index, number, turn)
            await asyncio.sleep(pause() if callable(pause) else pause)
        return tokens

    return dict(engine.converse(prompts, n, respond))


def hits(servers):
    """The share of later turns that came to a server that has seen the turn before."""
    found = Counter()
    for server in servers:
        seen = set()
        for body in server.asked:
            tokens = tuple(body["token_ids"])
            if len(tokens) > 3:
                found[tokens[:-7] in seen] += 1
            seen.add(tokens)
    return found[True] / found.total()


@pytest.mark.parametrize("slots", [16, 6, 3], ids=lambda slots: f"{slots} slots")
def test_nine_of_ten_turns_find_their_prefix_with_eight_servers(servers, slots):
    rng = random.Random(3)
    many = [servers(delay=0.02) for _ in range(8)]
    lengths = {(index, number): rng.randint(1, 8) for index in range(16) for number in range(4)}
    held = converse(many, 16, 4, lambda *of: lengths[of], lambda: rng.expovariate(1 / 0.03), max_num_seqs=slots)
    assert sum(len(server.asked) for server in many) == sum(lengths.values())
    assert all(len(held[i][number]) == 3 + 7 * lengths[i, number] for i in range(16) for number in range(4))
    share = hits(many)
    print(f"{slots} slots: {share:.3f} of the turns found their prefix")
    assert share > 0.9
    counts = [len(server.asked) for server in many]
    assert max(counts) < 2 * sum(counts) / 8  # and no server is left out


def test_tokens_do_not_depend_on_servers_and_slots(servers):
    def turns(index, number):
        return 1 + (index + number) % 4

    expected = converse([servers()], 6, 3, turns)
    assert converse([servers(delay=0.01), servers(), servers()], 6, 3, turns, 0.01, max_num_seqs=2) == expected


def test_conversations_move_to_an_idle_server_when_their_own_one_is_full(servers):
    """One prompt begins on one server. As soon as another server is idle, it takes some of the conversations."""
    both = servers(delay=0.05), servers(delay=0.05)
    converse(both, 1, 8, lambda *_: 6, max_num_seqs=8)
    assert [len(server.asked) for server in both] == [48, 0]  # no conversation waits
    both = servers(delay=0.05), servers(delay=0.05)
    converse(both, 1, 12, lambda *_: 6, max_num_seqs=4)
    assert min(len(server.asked) for server in both) > 24 and hits(both) > 0.7


def test_later_turns_precede_conversations_that_have_not_begun(servers):
    one = servers(delay=0.01)
    converse([one], 4, 2, lambda *_: 3, max_num_seqs=2)
    firsts = [place for place, body in enumerate(one.asked) if len(body["token_ids"]) == 3]
    assert len(one.asked) == 24 and firsts[-1] >= 12, firsts  # else the prefix cache would have to hold all of them


def test_a_conversation_goes_on_elsewhere_when_its_server_dies(servers):
    dies, stays = servers(), servers()

    async def respond(session, home, index, number):
        first = await session.turn(Prompt(0, (1, 2, 3), ""), SAMPLING, 7, home)
        if home.url == dies.url:
            dies.mode = "reset"
        return [first.response_ids.tolist(), (await session.turn(Prompt(0, (1, 2, 3, 4), ""), SAMPLING, 8, home))]

    engine = VllmEngine([dies.url, stays.url], str, patience=5.0)
    ((_, [(first, second)]),) = engine.converse([Prompt(0, (1, 2, 3), "")], 1, respond)
    assert (first[0], second.response_ids[0]) == (7, 8) and stays.asked[-1]["token_ids"] == [1, 2, 3, 4]


def test_a_conversation_that_gives_up_frees_its_slot(servers):
    one = servers(delay=0.3)

    async def respond(session, home, index, number):
        try:
            async with asyncio.timeout(0.1 if number == 0 else None):
                return await session.turn(Prompt(0, (1, 2, number), ""), SAMPLING, number, home)
        except TimeoutError:
            return await session.turn(Prompt(0, (1, 2, 9), ""), SAMPLING, 9, home)

    engine = VllmEngine([one.url], str, max_num_seqs=1)
    ((_, rollouts),) = engine.converse([Prompt(0, (1, 2, 3), "")], 3, respond)
    assert [rollout.response_ids[0] for rollout in rollouts] == [9, 1, 2]


def test_a_conversation_may_give_up_while_it_waits_for_a_slot_and_ask_again(servers):
    """An agent's client has a timeout, and tries again: the conversation must have one place in the queue."""
    one = servers(delay=0.2)

    async def respond(session, home, index, number):
        await session.turn(Prompt(0, (1, 2, number), ""), SAMPLING, number, home)
        for _ in range(3):
            with suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await session.turn(Prompt(0, (1, 2, 8), ""), SAMPLING, 8, home)
        return await session.turn(Prompt(0, (1, 2, 9), ""), SAMPLING, 9, home)

    engine = VllmEngine([one.url], str, max_num_seqs=1)
    ((_, rollouts),) = engine.converse([Prompt(0, (1, 2, 3), "")], 3, respond)
    assert [rollout.response_ids[0] for rollout in rollouts] == [9, 9, 9]


def test_turns_at_once_go_to_the_server_of_their_conversation_before_others_begin(servers):
    both = servers(delay=0.02), servers(delay=0.02)
    asking, last = 12, 40  # until the last ones have begun, no turn may move to another server

    async def respond(session, home, index, number):
        tokens = (1, 2, index + 3)
        await session.turn(Prompt(index, tokens, ""), SAMPLING, 0, home)
        others = [session.beside(home) for _ in range(3 if index < asking else 0)]
        asked = [session.turn(Prompt(index, (*tokens, i), ""), SAMPLING, i, other) for i, other in enumerate(others)]
        rollouts = await asyncio.gather(*asked)
        for other in others:
            session.close(other)
        return rollouts

    engine = VllmEngine([server.url for server in both], str, max_num_seqs=2)
    prompts = [Prompt(i, (1, 2, i + 3), "") for i in range(asking + last)]
    assert len(dict(engine.converse(prompts, 1, respond))) == asking + last
    for server in both:
        of_server = [body["token_ids"] for body in server.asked if body["token_ids"][2] < asking + 3]
        begun = {tuple(tokens) for tokens in of_server if len(tokens) == 3}
        assert {tuple(tokens[:3]) for tokens in of_server} == begun, "a turn went to a server without its prefix"
        firsts = [place for place, tokens in enumerate(of_server) if len(tokens) == 3]
        assert firsts[-1] >= 3 * (len(firsts) - 3), "conversations that had not begun came first"


def test_a_conversation_stays_with_one_copy_of_its_server_and_copies_have_equally_many(servers):
    both = servers(delay=0.02), servers(delay=0.02)
    converse(both, 4, 4, lambda *_: 3, copies=2)
    copies = Counter()
    for server in both:
        by_prefix = {}
        for body in server.asked:
            tokens, copy = tuple(body["token_ids"]), server.headers[body["request_id"]]["x-data-parallel-rank"]
            if len(tokens) == 3:
                copies[server.url, copy] += 1
            else:
                assert copy in by_prefix[tokens[:-7]]
            by_prefix.setdefault(tokens, set()).add(copy)
    assert copies == {(server.url, copy): 4 for server in both for copy in "01"}


def test_a_server_chooses_the_copy_of_a_response_with_one_turn(servers):
    one = servers()
    VllmEngine([one.url], str, copies=2).generate([Prompt(0, (1, 2), "")], 3, SAMPLING, seed=0)
    assert len(one.headers) == 3 and not any("x-data-parallel-rank" in headers for headers in one.headers.values())


@pytest.mark.parametrize("patience", [0.0, 5.0])
def test_another_server_parses_calls_when_the_own_one_does_not_respond(servers, patience):
    both = servers(), servers()

    async def respond(session, home, index, number):
        await session.turn(Prompt(0, (1, 2, 3), ""), SAMPLING, 7, home)
        own = await session.read_tool_calls([5], [], home)
        {server.url: server for server in both}[home.url].spoiled["/v1/chat/completions/derender"] = "reset"
        return [own[0] == home.url, (await session.read_tool_calls([5], [], home))[0] != home.url]

    engine = VllmEngine([server.url for server in both], str, patience=patience)
    assert list(engine.converse([Prompt(0, (1, 2, 3), "")], 1, respond)) == [(0, [[True, True]])]
    both[0].spoiled["/v1/chat/completions/derender"] = both[1].spoiled["/v1/chat/completions/derender"] = "reset"
    if not patience:
        with pytest.raises(EngineError, match="did not respond to /v1/chat/completions/derender"):
            list(engine.converse([Prompt(0, (1, 2, 3), "")], 1, respond))


@pytest.mark.parametrize(("mode", "is_of_turn"), [("raises", True), ("missing", False)])
def test_a_parser_that_raises_is_no_server_without_a_parser(servers, mode, is_of_turn):
    one = servers()
    one.spoiled["/v1/chat/completions/derender"] = mode

    async def respond(session, home, index, number):
        with pytest.raises(EngineError, match=r"failed|must be started with") as failed:
            await session.read_tool_calls([5], [], home)
        return isinstance(failed.value, ToolParserFailed)

    assert list(VllmEngine([one.url], str).converse([Prompt(0, (1,), "")], 1, respond)) == [(0, [is_of_turn])]


@pytest.mark.parametrize(("slots", "waits"), [(1, True), (8, False)])
def test_a_home_counts_the_seconds_that_its_turns_wait_for_slots(servers, slots, waits):
    one, seconds = servers(delay=0.2), []
    engine = VllmEngine([one.url], str, max_num_seqs=slots)

    async def respond(session, home, index, number):
        await home.granted
        began = home.queued
        for turn in range(2):
            await session.turn(Prompt(0, (1, 2, 3, *[4] * turn), ""), SAMPLING, turn, home)
        seconds.append(home.queued - began)

    list(engine.converse([Prompt(0, (1, 2, 3), "")], 4, respond))
    assert (max(seconds) > 0.15) == waits, seconds


def test_who_gets_a_free_slot_and_on_which_server():
    """Each case: the conversations of two servers, the waiting ones, the free servers, and who gets a slot."""

    async def chosen(homes, free, later=None, rests=None, groups=(), number=0):
        engine = VllmEngine(["http://a", "http://b"], str)
        generation = Generation(engine, Tools(None, None, Slots(8), number=number), None, lambda: None)
        names = {}

        def waiting(some):
            made = deque(Home(asyncio.get_running_loop().create_future()) for _ in some)
            names.update(zip(made, some, strict=True))
            return made

        generation._homes.update(homes)
        generation._later = {url: waiting(some) for url, some in (later or {}).items()}
        generation._rests = {url: waiting(some) for url, some in (rests or {}).items()}
        generation._groups = deque(waiting(some) for some in groups)
        free = [url for url in generation._urls if url in free]
        return (found := generation._next(free)) and (found[0], names[found[1]])

    a, b = "http://a", "http://b"
    for homes, free, queues, expected in (
        ({}, [b], dict(later={b: ["later"]}, rests={b: ["rest"]}), (b, "later")),
        ({}, [b], dict(later={a: ["later"]}, rests={b: ["rest"]}, groups=[["new"]]), (b, "rest")),
        ({a: 3, b: 2}, [a, b], dict(later={}, groups=[["new"]]), (b, "new")),
        ({a: 2, b: 2}, [a, b], dict(groups=[["new"]]), (a, "new")),
        ({a: 2, b: 2}, [a, b], dict(groups=[["new"]], number=1), (b, "new")),
        ({}, [b], dict(rests={a: ["first", "last"]}), (b, "last")),
        ({a: 3, b: 1}, [b], dict(later={a: ["later"]}), None),  # 1.5 times the conversations that b would have
        ({a: 4, b: 1}, [b], dict(later={a: ["first", "last"]}), (b, "last")),
        ({a: 3, b: 1}, [b], dict(later={a: [*range(8)]}), (b, 7)),  # as many as the server has slots
    ):
        assert asyncio.run(chosen(homes, free, **queues)) == expected, (homes, free, queues)


def test_a_copy_no_longer_counts_the_conversations_that_have_ended():
    async def copies():
        tools = Tools(None, None, Slots(8), copies=2)
        generation = Generation(VllmEngine(["http://a"], str), tools, None, lambda: None)
        first = generation.open(3)
        generation._fill()
        generation.close(first[0])
        generation.close(first[2])
        then = generation.open(1)
        generation._fill()
        return [home.copy for home in (*first, *then)]

    assert asyncio.run(copies()) == [0, 1, 0, 0]
