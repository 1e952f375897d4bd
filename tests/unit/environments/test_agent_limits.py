"""What one conversation's requests may cost the others: sizes, connections, requests that were given up, odd texts."""

import asyncio
import json
import logging
import threading

import httpx
import pytest

from megagrpo.data.tokens.tokenizer import load_tokenizer
from megagrpo.environments.agents import address as address_module
from megagrpo.environments.agents.address import Address
from megagrpo.environments.agents.agent import first_ask
from megagrpo.environments.agents.agent_messages import Refused, histories, read_body, shown
from megagrpo.environments.agents.renderer import LEAST_BODY
from megagrpo.environments.episodes.text_threads import INLINE_SIZE, LONG_SIZE, TextThreads
from tests.unit.data.test_tokenizer import chat_folder  # noqa: F401
from tests.unit.environments.test_agents import Policy
from tests.unit.environments.test_dialogues import OutsideOfLoops
from tests.unit.environments.test_trajectories import END, QWEN3, Agent, user


@pytest.fixture(scope="module")
def tokenizer(chat_folder):  # noqa: F811
    return load_tokenizer(chat_folder)


@pytest.fixture
def policy(tokenizer):
    return Policy(tokenizer, ["one", "two", "three"])


def with_seats(use, *seats):
    """`use(client, key of each seat)` at an address, with a client of HTTP."""

    async def run():
        address = Address()
        async with address.seated(seats[0]()) as first:
            keys = [first]
            async with address.seated(seats[-1]()) as second, httpx.AsyncClient(base_url=address.url) as client:
                return await use(client, *keys, second)

    return asyncio.run(run())


def chat(client, key, content="a", scheme="Bearer", route="/chat/completions", **options):
    body = {"messages": [user(content)]} if isinstance(content, str) else content
    options = {"content": json.dumps(body), "timeout": 60.0} | options
    return client.post(route, headers={"Authorization": f"{scheme} {key}"} | options.pop("headers", {}), **options)


def test_others_take_turns_while_one_conversation_tokenizes(policy, monkeypatch):
    """Counted, not timed: the long request's tokens are not counted before the other conversation has had 20 turns."""
    free, encode = threading.Event(), policy.tokenizer.encode

    def waits(text, *args, **options):
        assert len(text) < 10_000 or free.wait(60.0)
        return encode(text, *args, **options)

    monkeypatch.setattr(policy.tokenizer, "encode", waits)

    async def use(client, mine, other):
        long = asyncio.ensure_future(chat(client, mine, "word " * 100_000))
        for _ in range(20):
            assert (await chat(client, other)).status_code == 200
        assert not long.done()
        free.set()
        answer = await long
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"

    with_seats(use, policy.seat, policy.seat)


def test_long_texts_leave_threads_for_shorter_ones():
    threads, free = TextThreads(), threading.Event()

    async def run():
        long = [asyncio.ensure_future(threads.run(LONG_SIZE, lambda: free.wait(60.0))) for _ in range(40)]
        await asyncio.sleep(0)  # they have begun
        try:
            return await asyncio.wait_for(threads.run(INLINE_SIZE, threading.get_ident), 20.0)
        finally:
            free.set()
            await asyncio.gather(*long)

    assert asyncio.run(run()) != threading.get_ident()


def test_no_long_text_of_an_agent_is_rendered_or_tokenized_in_the_event_loop(policy, tokenizer):
    policy.tokenizer = guarded = OutsideOfLoops(tokenizer)

    def seat(prompt="question"):
        made = policy.seat(prompt, max_length=200_000)
        policy.tokenizer = tokenizer  # for the turns of this stand-in
        return made

    async def use(client, key, _):
        assert (await chat(client, key, "so " * 12_000)).status_code == 200
        assert guarded.count
        policy.tokenizer = OutsideOfLoops(tokenizer)
        unasked = seat("so " * 12_000)
        await unasked.reply(first_ask(unasked.trajectory.prompt))
        assert unasked.trajectory.renderer.tokenizer.count

    with_seats(use, seat, policy.seat)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("a" * 20_000_000, f"more than {LEAST_BODY} bytes"),
        ({"messages": [user("a")] * 20_000}, "20001 JSON objects"),
        ("word " * 100_000, "of 500.* characters have more than"),
        ("z" * 400_000, "characters have more than"),
    ],
)
def test_a_request_that_cannot_fit_is_refused_with_the_limit_and_is_no_turn(policy, content, reason):
    seats = []

    async def use(client, key, _):
        answer = await chat(client, key, content)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["code"] == "context_length_exceeded"
        assert "at most 4000 tokens" in error["message"]
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(error["message"])

    with_seats(use, lambda: seats.append(policy.seat()) or seats[0], policy.seat)
    assert not policy.asked and not seats[0].trajectory.turns and seats[0].trajectory.limit == "budget"


@pytest.mark.parametrize(
    "values",
    [[1] * 20_000, [[]] * 20_000, [{"\ud800": "\ud83d\ude00"}] * 20_000, [json.loads("[" * 100 + "]" * 100)] * 200],
    ids=["numbers", "lists", "surrogates", "nested"],
)
def test_json_with_many_values_is_read_and_written_without_one_long_call(monkeypatch, values):
    """Such a call holds the GIL to its end, so turns of other conversations wait in the event loop."""
    function = {"name": "look", "arguments": json.dumps({"values": values})}
    body = {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": function}]}], "more": values}
    text, dumps = json.dumps(body).encode(), json.dumps
    monkeypatch.setattr(json, "loads", None)
    monkeypatch.setattr(json, "dumps", None)
    read = read_body(text)
    (digest,) = histories(read["messages"])
    (shown_message,) = shown(read["messages"])
    monkeypatch.undo()
    expected = json.loads(dumps(values).replace("\\ud800", "?"))
    assert read["more"] == expected == shown_message["tool_calls"][0]["function"]["arguments"]["values"]
    assert [digest] == histories(
        [body["messages"][0] | {"tool_calls": [{"function": function | {"arguments": {"values": expected}}}]}]
    )


def test_json_that_is_nested_too_deeply_is_refused():
    with pytest.raises(Refused, match="nested too deeply"):
        read_body(b"[" * 100_000)


def test_a_body_without_a_length_is_read_up_to_the_limit(policy):
    async def endless():
        for _ in range(320):
            yield b"a" * (1 << 16)

    async def use(client, key, _):
        keys = {"Authorization": f"Bearer {key}"}
        answer = await client.post("/chat/completions", headers=keys, content=endless())
        assert answer.status_code == 400 and "bytes" in answer.json()["error"]["message"]

    with_seats(use, policy.seat, policy.seat)


def test_a_refused_key_closes_the_connection_before_its_body_is_read(policy):
    async def use(client, *_):
        read, write = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        write.write(b"POST /v1/responses HTTP/1.1\r\nHost: a\r\nContent-Length: 60000000\r\n\r\n{")
        answer = await asyncio.wait_for(read.read(), 20.0)  # up to its end
        assert answer.startswith(b"HTTP/1.1 401") and b"invalid_api_key" in answer
        write.close()

    with_seats(use, policy.seat, policy.seat)


def test_the_oldest_idle_connections_are_closed_and_requests_under_way_are_not(policy, monkeypatch):
    monkeypatch.setattr(address_module, "MOST_IDLE", 5)
    policy.seconds = 0.5

    async def use(client, key, _):
        working = asyncio.ensure_future(chat(client, key))
        while not policy.asked:
            await asyncio.sleep(0.01)
        half = []
        for _ in range(8):
            half.append(await asyncio.open_connection(client.base_url.host, client.base_url.port))
            half[-1][1].write(b"POST /v1/responses HTTP/1.1\r\n")
        for read, _ in half[:3]:
            assert await asyncio.wait_for(read.read(), 20.0) == b""
        assert not any(read.at_eof() for read, _ in half[3:])
        assert (await working).status_code == 200
        for _, write in half:
            write.close()

    with_seats(use, policy.seat, policy.seat)


def test_half_a_request_is_closed_after_a_time(policy, monkeypatch):
    monkeypatch.setattr(address_module, "HEAD_SECONDS", 0.1)

    async def use(client, *_):
        read, write = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        write.write(b"POST /v1/responses HTTP/1.1\r\nHost")
        assert await asyncio.wait_for(read.read(), 20.0) == b""
        write.close()

    with_seats(use, policy.seat, policy.seat)


@pytest.mark.parametrize("head", [b"GET * HTTP/1.1", b"GET / HTTP/9.9", b"GET v1 HTTP/1.1", b"\x16\x03"])
def test_a_malformed_request_leaves_no_traceback(policy, head, caplog, capfd):
    async def use(client, *_):
        read, write = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        write.write(head + b"\r\nHost: a\r\n\r\n")
        assert b" 400 " in await asyncio.wait_for(read.readline(), 20.0)
        write.close()

    with caplog.at_level(logging.DEBUG):
        with_seats(use, policy.seat, policy.seat)
    assert "Traceback" not in caplog.text + "".join(capfd.readouterr())


def test_requests_that_were_given_up_are_no_turns(policy):
    policy.seconds = 100.0
    seats = []

    async def use(client, key, _):
        for number in range(3):
            with pytest.raises(httpx.ReadTimeout):
                await chat(client, key, timeout=0.2)
            while policy.cancelled <= number:
                await asyncio.sleep(0.01)
        policy.seconds = 0.0
        assert (await chat(client, key)).status_code == 200
        assert (await chat(client, key, "b")).json()["error"]["code"] == "turn_limit_exceeded"

    with_seats(use, lambda: seats.append(policy.seat(max_turns=1)) or seats[0], policy.seat)
    assert [number for _, _, number in policy.asked] == [0] * 4 and len(seats[0].trajectory.samples) == 1


def test_a_reply_that_was_lost_is_no_turn_and_its_retry_is_the_same_turn(policy):
    async def run():
        seat = policy.seat(max_turns=1)

        async def taken(is_delivered):
            ask, _, start = await seat.read(
                address_module.chat_completions, None, lambda: parts(json.dumps({"messages": [user("a")]})), False
            )
            stream = seat.stream(ask, start)
            reply = await anext(stream)
            if is_delivered:
                assert [part async for part in stream] == []
            await stream.aclose()
            return reply.content

        assert await taken(False) == "one" and not seat.trajectory.samples and not seat.trajectory.turns
        assert await taken(False) == await taken(True) == "one"
        assert len(policy.asked) == 1 and len(seat.trajectory.samples) == 1 and not seat.trajectory.counts
        with pytest.raises(Refused, match="max_turns"):
            await taken(True)

    async def parts(text):
        yield text.encode()

    asyncio.run(run())


def test_a_retry_as_openais_client_marks_it_is_the_same_turn(policy):
    seats = []

    async def use(client, key, _):
        first = (await chat(client, key)).json()
        again = (await chat(client, key, headers={"x-stainless-retry-count": "1"})).json()
        assert first["choices"] == again["choices"] and first["id"] != again["id"]

    with_seats(use, lambda: seats.append(policy.seat()) or seats[0], policy.seat)
    assert len(policy.asked) == 1 and seats[0].trajectory.turns == len(seats[0].trajectory.samples) == 1


@pytest.mark.parametrize(
    ("route", "body", "code"),
    [
        ("/chat/completions", {"messages": [user("a")], "response_format": "json"}, "unsupported_parameter"),
        ("/chat/completions", {"messages": [user("a")], "response_format": ["text"]}, "unsupported_parameter"),
        ("/responses", {"input": "a", "text": "json"}, "unsupported_parameter"),
        ("/responses", {"input": "a", "text": {"format": "json"}}, "unsupported_parameter"),
        ("/responses", {"input": [{"type": "reasoning", "summary": []}]}, "invalid_messages"),
        ("/responses", {"input": [{"type": "function_call", "name": "a"}]}, "invalid_messages"),
    ],
)
def test_odd_requests_are_named(policy, route, body, code):
    async def use(client, key, _):
        answer = await chat(client, key, body, route=route)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["code"] == code and "Error(" not in error["message"]

    with_seats(use, policy.seat, policy.seat)


@pytest.mark.parametrize("options", [{"scheme": "bearer"}, {"headers": {"Content-Type": "text/json;charset=klingon"}}])
def test_schemes_have_no_case_and_json_needs_no_charset(policy, options):
    async def use(client, key, _):
        assert (await chat(client, key, **options)).status_code == 200

    with_seats(use, policy.seat, policy.seat)


def test_a_chat_without_thoughts_stays_one_sample_under_a_template_that_drops_them(tokenizer):
    agent, told = Agent(tokenizer, QWEN3), []
    for text in ("one", "two", "<think>a</think>three", "four"):
        told = agent.ask([*told, user("go on")], text)
    assert agent.trajectory.counts == {"branches/template": 1}
    (_, last), (_, first) = agent.samples()
    assert first == ["one<|im_end|>", None, "two<|im_end|>", None, "<think>a</think>three<|im_end|>"]
    assert last == ["four<|im_end|>"] and agent.contexts[1][: len(agent.contexts[0])] == agent.contexts[0]
    cut = Agent(tokenizer, QWEN3)
    cut.ask([*cut.ask([user("a")], "cut", end=(), reason="length"), user("b")], "two")
    assert not cut.trajectory.counts and cut.contexts[1].count(END) == 3
