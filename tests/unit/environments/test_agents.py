"""Agents in real worker processes that talk to the address, some with `openai`; the policy's turns are scripted."""

import asyncio
import contextlib
import json
import math
import re
import shutil
import ssl
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from itertools import batched
from types import SimpleNamespace

import httpx
import psutil
import pytest
from pydantic import TypeAdapter

from megagrpo.config import MultiTurnSection
from megagrpo.data.tokens.tokenizer import load_tokenizer
from megagrpo.engine.http.access import interface_addresses
from megagrpo.engine.responses import find_ending
from megagrpo.environments.agents import agent as agent_module
from megagrpo.environments.agents.address import Address
from megagrpo.environments.agents.agent import first_ask
from megagrpo.environments.agents.renderer import Renderer
from megagrpo.environments.agents.seat import Seat
from megagrpo.environments.agents.trajectory import Trajectory
from megagrpo.environments.dialogues import DialogueEngine, Dialogues
from megagrpo.environments.episodes.tool_calls import hermes
from megagrpo.environments.responders import Responders
from megagrpo.rewards.arguments import PER_ROLLOUT
from megagrpo.rewards.workers.channel import as_json, frame, from_json
from megagrpo.types import Dialogue, Prompt, Rollout, SamplingParams
from tests.unit.data.test_tokenizer import chat_folder  # noqa: F401
from tests.unit.environments.test_dialogues import Scripted
from tests.unit.environments.test_trajectories import HERMES, QWEN3, SEARCH
from tests.unit.waiting import wait_until

WITH_OPENAI = '''
"""Agents of the tests that talk to the address with the `openai` package."""

import asyncio
import contextlib

import openai


async def twice(prompt, client, answer):
    async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as model:
        messages = [{"role": "user", "content": prompt}]
        for _ in range(2):
            reply = await model.chat.completions.create(model=client.model, messages=messages)
            messages += [reply.choices[0].message, {"role": "user", "content": "again"}]
    return float(reply.choices[0].message.content == answer)


def unmodified(prompt):
    model = openai.OpenAI()
    return len(model.chat.completions.create(model="gpt-4o", messages=prompt).choices[0].message.content)


async def both(prompt):
    async with openai.AsyncOpenAI() as model:
        messages = [{"role": "user", "content": prompt}]
        asked = [model.chat.completions.create(model="m", messages=messages) for _ in range(2)]
        return len(await asyncio.gather(*asked))
'''
PLAIN = '''
"""Agents of the tests that need no package to talk to the address: `openai` takes half a second to import."""

import asyncio
import contextlib
import http.client
import json
import os
import signal
import subprocess
import time
from urllib.parse import urlsplit

print("imported")


def requested(method, path, body=None, timeout=None):
    """What the address responds."""
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=timeout)
    keys = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    connection.request(method, url.path + path, json.dumps(body), keys)
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(answer.read())
    return json.loads(answer.read())


def asks(prompt):
    return requested("POST", "/chat/completions", {"messages": prompt})["choices"][0]["message"]


def ask_judge():
    """policy:nobody is no request."""
    return "policy:judge"


def names_roles(prompt, client):
    def describe():
        return {"policy": "policy: be kind"}

    asked = client.role("solver").model, ask_judge()
    return {"solver": 1.0, "judge": float(asked == describe())}


def again(prompt, client, answer):
    messages = [{"role": "user", "content": prompt}]
    for _ in range(2):
        reply = asks(messages)
        messages += [reply, {"role": "user", "content": "again"}]
    return float(reply["content"] == answer)


def hasty(prompt):
    try:
        requested("POST", "/chat/completions", {"messages": [{"role": "user", "content": prompt}]}, 0.2)
    except TimeoutError:
        return 1.0


def plays(prompt, client, rewards, roles=("x", "o", "x")):
    messages = [{"role": "user", "content": prompt}]
    for role in roles:
        body = {"messages": messages, "model": client.role(role).model}
        reply = requested("POST", "/chat/completions", body)
        if role == "x":
            messages += [reply["choices"][0]["message"], {"role": "user", "content": "go on"}]
    return rewards


def dozes(prompt):
    time.sleep(1000)


def silent(**columns):
    return 1.0


def optional(prompt, client=None, *rest, answer="", **columns):
    return 1.0


def busy(prompt):
    requested("GET", "/models")
    subprocess.Popen(["sleep", "1000"])
    while True:
        pass


def wrong(prompt):
    asks(prompt)
    return "good"


def raises(prompt):
    asks(prompt)
    raise KeyError("lost")


class Silent(Exception):
    def __str__(self):
        raise ValueError("no text")


class Numbered(KeyboardInterrupt):
    def __str__(self):
        return 5


def has_no_text(prompt):
    asks(prompt)
    raise Silent


def has_a_number(prompt):
    asks(prompt)
    raise Numbered


def dies(prompt):
    os._exit(3)


def endless(prompt):
    while True:
        prompt = [*prompt, asks(prompt), {"role": "user", "content": "again"}]


async def waits(prompt):
    await asyncio.sleep(0.5)
    asks([{"role": "user", "content": prompt}])
    return os.getpid()


def second(prompt, count):
    asks([{"role": "user", "content": prompt}])
    with open(count, "a+") as file:
        file.seek(0)
        tries = len(file.read())
        file.write("x")
    if not tries:
        raise OSError("the first try")
    return 1.0


def works(prompt):
    asks([{"role": "user", "content": prompt}])
    time.sleep(1000)


def kills_its_worker(prompt, index):
    asks([{"role": "user", "content": prompt}])
    time.sleep(1.0)
    if index == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(100.0)


def leaves_a_copy(prompt):
    if os.fork() == 0:
        time.sleep(20.0)
    os._exit(7)


def says(prompt):
    asks([{"role": "user", "content": prompt}])
    print(prompt)


def tells(prompt):
    asks(prompt)
    names = ("OPENAI_API_KEY", "OPENAI_BASE_URL", "NO_PROXY", "OPENAI_AGENTS_DISABLE_TRACING")
    open("/proc/self/fd/1", "w").close()
    return float(all(os.environ[name] for name in names))
'''


@pytest.fixture(scope="module")
def tokenizer(chat_folder):  # noqa: F811
    return load_tokenizer(chat_folder)


@dataclass
class Policy:
    """Takes turns by a script; the last line is repeated. With `error` it fails instead."""

    tokenizer: object
    script: list[str]
    error: Exception | None = None
    seconds: float = 0.0
    asked: list[tuple] = field(default_factory=list)
    cancelled: int = 0
    replaced: list[int] = field(default_factory=list)  # tokens of a stream that fails before the response

    async def turn(self, prompt, sampling, number, on_tokens=None):
        self.asked.append((prompt, sampling, number))
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error:
            raise self.error
        ids = [*self.tokenizer.encode(self.script[min(number, len(self.script) - 1)], False), 2]
        reason = "length" if len(ids) > sampling.max_tokens else "stop"
        end = find_ending(ids[: sampling.max_tokens], self.tokenizer.decode, sampling.stop, sampling.include_stop)
        count, text, stopped = end
        reason = "stop" if stopped else reason
        stop_string = stopped if sampling.stop else None
        if on_tokens and self.replaced:
            on_tokens(0, self.replaced)
        for place, token_id in enumerate(ids[:count] if on_tokens else ()):
            on_tokens(place, [token_id])
        return Rollout(prompt, ids[:count], [-0.5] * count, reason, 4, text, stop_string=stop_string), 0.0

    async def read_calls(self, prompt, rollout, tools):
        return hermes(rollout.text)

    def seat(self, prompt="question", template=HERMES, columns=None, index=0, roles=(), **limits):
        limits = {"max_length": 4000, "max_response": 3000} | limits
        asked = Prompt(5, (1,), prompt, columns or {})
        trajectory = Trajectory(asked, index, Renderer(self.tokenizer, template), **limits, roles=roles)
        return Seat(trajectory, SamplingParams(0.7, 100), self.turn, self.read_calls)


@pytest.fixture
def policy(tokenizer):
    return Policy(tokenizer, ["one", "two", "three"])


@pytest.fixture(scope="module")
def agents_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agents")
    (folder / "talks.py").write_text(WITH_OPENAI)
    (folder / "mine.py").write_text(PLAIN)

    def make(name, roles=None, **keys):
        file = "talks.py" if f"def {name}(" in WITH_OPENAI else "mine.py"
        function = f"{folder}/{file}:{name}"
        agent = dict(function=function, roles=roles) if roles else function
        return Responders(MultiTurnSection(agent=agent, workers=1, **keys))

    return make


def conversed(responders, *seats):
    """The trajectories of conversations, all at once; nothing of them is left at the address."""

    async def run():
        address = Address()

        async def one(seat):
            await responders.agent.converse(address, seat, responders.fail)
            if not seat.trajectory.samples:
                await seat.reply(first_ask(seat.trajectory.prompt))
            return seat.trajectory.rollout()

        rollouts = await asyncio.gather(*(one(seat()) for seat in seats))
        assert not address.seats
        with pytest.raises(httpx.NetworkError):  # refused, or reset if the closing socket has still accepted it
            httpx.get(f"{address.url}/models")
        with pytest.raises(httpx.ConnectError):  # it is closed
            httpx.get(f"{address.url}/models")
        return rollouts

    return asyncio.run(run())


def with_client(policy, use, **seat):
    """`use(client, url, seat)` in a conversation, with the async client of the `openai` package."""
    import openai

    async def run():
        address, taken = Address(), policy.seat(**seat)
        async with address.seated(taken) as key:
            async with openai.AsyncOpenAI(base_url=address.url, api_key=key, max_retries=0) as client:
                return await use(client, taken)

    return asyncio.run(run())


# ------------------------------------------------------------------------------------------------------- in processes


def test_an_agent_is_trained_on_its_two_turns_and_gives_the_reward(agents_of, policy):
    with agents_of("twice") as agents:
        (rollout,) = conversed(agents, lambda: policy.seat(columns={"answer": "two"}))
    assert (
        agents.reward_names == ["twice"]
        and rollout.dialogue.rewards == {"twice": 1.0}
        and rollout.dialogue.ended == "done"
    )
    assert [m["content"] for m in rollout.dialogue.messages] == ["one", "again", "two"]
    assert len(rollout.dialogue.turns) == 2 and not rollout.branches and rollout.dialogue.counts == {}
    first, second = policy.asked[0][0].token_ids, policy.asked[1][0].token_ids
    assert second[: len(first)] == first and rollout.prompt.token_ids == first
    assert [number for *_, number in policy.asked] == [0, 1]


ROLES = {"x": 1.0, "o": 0.0}


def test_roles_of_a_conversation_have_samples_and_rewards_of_their_own(agents_of, policy):
    """`o` asks from the history of `x`, and `x` goes on from its own."""
    with agents_of("plays", ROLES) as agents:
        columns = dict(rewards={"x": 1, "o": None})
        (rollout,) = conversed(agents, lambda: policy.seat(columns=columns, roles=[*ROLES]))
    assert agents.reward_names == ["x", "o"] and rollout.dialogue.rewards == {"x": 1.0, "o": None}
    (branch,) = rollout.branches
    assert (rollout.dialogue.role, branch.dialogue.role) == ("x", "o")
    assert [m["content"] for m in rollout.dialogue.messages] == ["one", "go on", "three"]
    assert [m["content"] for m in branch.dialogue.messages] == ["two"]
    record = rollout.dialogue.record()
    assert record["role"] == "x" and Dialogue.of_record(rollout.written, record) == rollout.dialogue


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        (dict(rewards=1.0), "`plays` returned 1.0; return a mapping from each role"),
        (dict(rewards={"x": 1.0}), "`plays` returned no reward for the role o, which took a turn"),
        (
            dict(rewards={"x": 1.0, "o": 1.0, "judge": 0.0}),
            "a reward for the role 'judge', which multi_turn.agent does",
        ),
        (dict(rewards={"x": 1.0, "o": 1.0}, roles=["x"]), "a reward for the role o, which took no turn"),
        (dict(rewards={"x": math.nan, "o": 1.0}), "`plays` returned for the role x nan, which is not finite"),
        (dict(rewards={"x": "1", "o": 1.0}), "`plays` returned for the role x a str, '1'"),
        (dict(rewards={}, roles=["x", "judge"]), "names no role of multi_turn.agent; use policy:x, policy:o"),
    ],
)
def test_rewards_that_do_not_fit_the_roles_fail_the_conversation_by_name(agents_of, policy, columns, reason, caplog):
    with agents_of("plays", ROLES) as agents:
        (rollout,) = conversed(agents, lambda: policy.seat(columns=columns, roles=[*ROLES]))
    spoken = columns.get("roles", ["x", "o"])
    assert rollout.dialogue.ended == "failed" and reason in caplog.text
    assert rollout.dialogue.rewards == {role: 0.0 for role in spoken if role in ROLES}


@pytest.mark.parametrize(
    ("roles", "reason"),
    [
        ({"solver": 1.0, "judge": 1.0}, None),
        (
            {"solver": 1.0, "jugde": 1.0},
            "names the role 'judge', which roles does not list; list it, or use solver, jugde",
        ),
        ({"solvr": 1.0, "judge": 1.0}, "names the role 'solver', which roles does not list"),
        ({"solver": 1.0}, "names the role 'judge', which roles does not list"),
        (None, "list it, the run has no roles"),
    ],
)
def test_a_role_that_the_agent_names_and_the_run_does_not_list_is_refused_at_the_start(agents_of, roles, reason):
    """A helper of the agent's file, `client.role`, and the mapping that it returns name roles; other texts do not."""
    with contextlib.ExitStack() as stack:
        raised = pytest.raises(ValueError, match=re.escape(reason)) if reason else contextlib.nullcontext()
        with raised:
            assert stack.enter_context(agents_of("names_roles", roles)).reward_names == [*roles]


def test_a_role_is_refused_in_a_run_without_roles(agents_of, policy, caplog):
    with agents_of("plays") as agents:
        conversed(agents, lambda: policy.seat(columns=dict(rewards={})))
    assert "policy:x: the run has no roles; list them in multi_turn.agent" in caplog.text


def test_an_unmodified_agent_needs_no_argument_but_its_prompt(agents_of, policy):
    prompt = [{"role": "user", "content": "hi"}]
    with agents_of("unmodified") as agents:
        (rollout,) = conversed(agents, lambda: policy.seat(prompt))
    assert rollout.dialogue.rewards == {"unmodified": 3.0} and rollout.prompt.messages == prompt
    with agents_of("tells") as agents:
        (rollout,) = conversed(agents, lambda: policy.seat(prompt))
    assert rollout.dialogue.rewards == {"tells": 1.0}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("silent", "asked the policy for nothing"),
        ("wrong", "`wrong` returned a str, 'good'"),
        ("raises", r"KeyError: 'lost' \(.*mine.py"),
        ("has_no_text", r"Silent: <exception str\(\) failed>"),
        ("has_a_number", "Numbered: <exception str"),
        ("dies", "its process died"),
    ],
    ids=["silent", "wrong", "raises", "has_no_text", "has_a_number", "dies"],
)
def test_a_failure_costs_its_own_conversation_and_is_counted(agents_of, policy, name, reason, caplog):
    prompt = [{"role": "user", "content": "hi"}]
    with agents_of(name) as agents:
        rollouts = conversed(agents, lambda: policy.seat(prompt), lambda: policy.seat(prompt))
    assert [r.dialogue.rewards for r in rollouts] == [{name: 0.0}] * 2
    assert [r.dialogue.ended for r in rollouts] == ["failed"] * 2 and all(len(r.response_ids) for r in rollouts)
    (warning,) = [r.getMessage() for r in caplog.records if "multi_turn" in r.getMessage()]
    assert re.search(reason, warning)


def test_a_parameter_that_is_no_column_is_refused_by_name(agents_of):
    with agents_of("again") as agents:
        agents.agent.check_columns(["answer", "other"])
        said = "multi_turn.agent: `again` needs column `answer`; the data set has answers; did you mean `answers`"
        with pytest.raises(ValueError, match=said):
            agents.agent.check_columns(["answers"])
    for name in ("silent", "asks", "optional"):
        with agents_of(name) as agents:
            agents.agent.check_columns([])


def test_conversations_of_a_worker_that_dies_fail_and_do_not_begin_again_on_top_of_their_turns(agents_of, policy):
    columns = [{"index": index} for index in range(3)]
    with agents_of("kills_its_worker") as agents:
        rollouts = conversed(agents, *[lambda c=c: policy.seat(columns=c) for c in columns])
        (later,) = conversed(agents, lambda: policy.seat(columns={"index": 0}))
    for rollout in (*rollouts, later):
        assert (rollout.dialogue.ended, rollout.dialogue.cause) == ("failed", "died")
        assert len(rollout.dialogue.turns) == 1 and not rollout.branches


def test_an_agent_whose_copy_lives_on_has_died_at_once(agents_of, policy):
    with agents_of("leaves_a_copy", max_seconds=15.0) as agents:
        (rollout,) = conversed(agents, lambda: policy.seat())
    assert (rollout.dialogue.ended, rollout.dialogue.cause) == ("failed", "died")


def test_what_an_agent_prints_is_shown_once_without_unbuffered_output_too(agents_of, policy, capfd, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with agents_of("says") as agents:
        conversed(agents, lambda: policy.seat(), lambda: policy.seat())
    shown = capfd.readouterr().err
    assert shown.count("imported\n") == 1 and shown.count("question\n") == 2


def test_an_agent_that_holds_its_process_is_killed_with_what_it_started_and_alone(agents_of, policy, tmp_path):
    with agents_of("busy", max_seconds=1.0) as agents:
        begun = time.monotonic()
        (rollout,) = conversed(agents, lambda: policy.seat())
        assert rollout.dialogue.ended == "time_limit" and time.monotonic() - begun < 60
        worker = psutil.Process().children(recursive=True)
        assert not [p for p in worker if p.status() != "zombie" and p.cmdline()[:1] == ["sleep"]]
        assert any("coroutines" in p.cmdline() for p in worker if p.is_running())  # the worker itself stays


def test_conversations_of_one_worker_wait_at_once_each_in_its_own_process(agents_of, policy):
    with agents_of("waits") as agents:
        conversed(agents, lambda: policy.seat())  # imports the agent
        rollouts = conversed(agents, *[lambda i=i: policy.seat(index=i) for i in range(16)])
    pids = {r.dialogue.rewards["waits"] for r in rollouts}
    assert len(pids) == 16


def test_an_agent_that_runs_into_a_limit_has_not_failed(agents_of, policy):
    prompt = [{"role": "user", "content": "hi"}]
    with agents_of("endless") as agents:
        (turns,) = conversed(agents, lambda: policy.seat(prompt, max_turns=3))
        (tokens,) = conversed(agents, lambda: policy.seat(prompt, max_length=90))
    assert turns.dialogue.ended == "max_turns" and len(turns.dialogue.turns) == 3
    assert tokens.dialogue.ended == "budget" and tokens.dialogue.rewards == {"endless": 0.0}
    assert len(tokens.prompt.token_ids) + len(tokens.response_ids) <= 90


def test_an_agent_without_a_turn_gets_its_token_after_the_last_turn_too(agents_of, policy):
    """The agent's client has given up its only turn."""
    policy.seconds = 2.0
    with agents_of("hasty") as agents:
        (rollout,) = conversed(agents, lambda: policy.seat(max_turns=1))
    assert rollout.dialogue.ended == "failed" and rollout.length == 1


def test_an_engine_that_fails_ends_the_conversation_with_its_error(agents_of, policy):
    policy.error = OSError("no server is left")
    with agents_of("again") as agents, pytest.raises(OSError, match="no server is left"):
        conversed(agents, lambda: policy.seat(columns={"answer": "two"}))


def test_an_agent_that_cannot_be_imported_is_an_error_before_the_first_step(agents_of):
    with pytest.raises(ValueError, match=r"multi_turn.agent: .*absent"):
        agents_of("absent")


# ------------------------------------------------------------------------------------------------------ at the address


def test_a_trial_shows_the_first_request_of_an_agent(agents_of, tokenizer, monkeypatch):
    def trajectory():
        asked = Prompt(5, (1,), "What?", {"answer": "two"})
        return Trajectory(asked, 0, Renderer(tokenizer, HERMES), 4000, 3000)

    with agents_of("again") as agents:
        ids = agent_module.first_request(agents.agent, trajectory())
    assert tokenizer.decode(ids, special=True).startswith("<|im_start|>user\nWhat?<|im_end|>")
    with agents_of("silent") as agents, pytest.raises(ValueError, match="on row 5: it asked the policy for nothing"):
        agent_module.first_request(agents.agent, trajectory())
    monkeypatch.setattr(agent_module, "IMPORT_SECONDS", 2.0)
    with agents_of("dozes") as agents, pytest.raises(ValueError, match="for nothing in 2 s"):
        agent_module.first_request(agents.agent, trajectory())


def test_an_agent_that_hangs_at_import_is_an_error_that_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(agent_module, "IMPORT_SECONDS", 2.0)
    (tmp_path / "hangs.py").write_text("import time\n\ntime.sleep(1000)\n")
    with pytest.raises(ValueError, match=r"the import of .*hangs.py:run has not ended after 2 s"):
        Responders(MultiTurnSection(agent=f"{tmp_path}/hangs.py:run", workers=1))


def test_chat_completions_with_tools_stop_and_limits(policy):
    policy.script = [
        'I look.\n<tool_call>{"name": "search", "arguments": {"q": "rain"}}</tool_call>',
        "a b c",
        "x" * 90,
    ]

    async def use(client, seat):
        ask = client.chat.completions.create
        messages = [{"role": "user", "content": "hi"}]
        reply = await ask(model="any", messages=messages, tools=[SEARCH], temperature=0.7)
        (call,) = reply.choices[0].message.tool_calls
        assert reply.choices[0].finish_reason == "tool_calls" and reply.model == "any"
        assert (call.function.name, json.loads(call.function.arguments)) == ("search", {"q": "rain"})
        assert reply.choices[0].message.content == "I look." and reply.usage.prompt_tokens > 20
        messages += [reply.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "wet"}]
        reply = await ask(model="any", messages=messages, tools=[SEARCH], stop=" c", temperature=0.1, top_p=0.5)
        assert reply.choices[0].message.content == "a b" and reply.choices[0].finish_reason == "stop"
        messages += [reply.choices[0].message, {"role": "user", "content": "go on"}]
        reply = await ask(model="any", messages=messages, tools=[SEARCH], max_completion_tokens=5)
        assert reply.choices[0].finish_reason == "length" and reply.usage.completion_tokens == 5
        assert [card.id async for card in client.models.list()] == ["policy"]
        return seat.trajectory

    trajectory = with_client(policy, use)
    rollout = trajectory.rollout()
    assert not rollout.branches and trajectory.counts == {"ignored/temperature": 1, "ignored/top_p": 1}
    assert [turn.calls for turn in rollout.dialogue.turns] == [("search",), (), ()]
    assert [m["role"] for m in rollout.dialogue.messages] == ["assistant", "tool", "assistant", "user", "assistant"]
    assert [sampling.temperature for _, sampling, _ in policy.asked] == [0.7] * 3


def test_chat_completions_in_a_stream(policy):
    policy.script = ['<tool_call>{"name": "search", "arguments": {"q": "rain"}}</tool_call>', "done"]

    async def use(client, seat):
        messages = [{"role": "user", "content": "hi"}]
        keys = dict(model="m", messages=messages, tools=[SEARCH], stream_options={"include_usage": True})
        async with client.chat.completions.stream(**keys) as stream:
            completion = await stream.get_final_completion()
        message = completion.choices[0].message
        assert message.tool_calls[0].function.name == "search" and completion.usage.completion_tokens > 5
        messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "wet"}]
        chunks = [
            c
            async for c in await client.chat.completions.create(
                model="m", messages=messages, tools=[SEARCH], stream=True
            )
        ]
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == "done" and len(chunks) > 3
        return seat.trajectory

    assert with_client(policy, use).counts == {}


def test_each_event_of_a_stream_has_all_fields_that_openais_types_require(policy):
    from openai.types.chat import ChatCompletionChunk
    from openai.types.responses import ResponseStreamEvent

    policy.script = ['Hm. <tool_call>{"name": "search", "arguments": {}}</tool_call>', "a b", ""]
    event_of = TypeAdapter(ResponseStreamEvent).validate_python
    tool = {"type": "function", **SEARCH["function"]}

    async def use(client, seat):
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {client.api_key}"}, timeout=60) as plain:
            for body in ({"input": "1", "tools": [tool]}, {"input": "2"}, {"input": "3"}):
                answer = await plain.post(f"{client.base_url}responses", json={"model": "m", "stream": True, **body})
                lines = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
                events = [event_of(line, strict=True) for line in lines]
                assert [event.sequence_number for event in events] == [*range(len(events))]
                names = [event.type.removeprefix("response.") for event in events]
                assert names[:2] == ["created", "in_progress"] and names[-1] == "completed"
                text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
                assert text == "".join(i.content[0].text for i in events[-1].response.output if i.type == "message")
                ends = ["output_text.done", "content_part.done", "output_item.done"]
                whole = [name for name in names if name != "output_text.delta"]
                assert whole[2:7] == ["output_item.added", "content_part.added", *ends]
                for line in (line for line in lines if "item" in line or "item_id" in line):
                    item = events[-1].response.output[line["output_index"]]
                    assert item.id == (line.get("item_id") or line["item"]["id"])
            keys = {"messages": [{"role": "user", "content": "4"}], "stream_options": {"include_usage": True}}
            answer = await plain.post(f"{client.base_url}chat/completions", json={"model": "m", "stream": True, **keys})
            *lines, last = [line[6:] for line in answer.text.splitlines() if line]
            chunks = [ChatCompletionChunk.model_validate(json.loads(line), strict=True) for line in lines]
            assert last == "[DONE]" and len({chunk.id for chunk in chunks}) == 1
            assert [chunk.choices[0].delta.role for chunk in chunks[:-1]] == ["assistant", *[None] * (len(chunks) - 2)]

    with_client(policy, use)


@pytest.mark.parametrize("route", ["chat", "responses"])
def test_an_error_in_a_stream_reaches_the_agent_and_nothing_of_the_turn_is_trained(policy, route):
    import openai

    policy.replaced = policy.tokenizer.encode("six", False)  # a server failed, and the next one sampled "one"

    async def use(client, seat):
        got = []
        messages = [{"role": "user", "content": "hi"}]
        with pytest.raises(openai.APIError, match="a server failed during the response"):
            if route == "chat":
                async for chunk in await client.chat.completions.create(model="m", messages=messages, stream=True):
                    got.append(chunk.choices[0].delta.content)
            else:
                async for event in await client.responses.create(model="m", input="hi", stream=True):
                    got += [event.delta] if event.type == "response.output_text.delta" else []
        assert "".join(got) == "six" and not seat.trajectory.samples
        assert seat.trajectory.counts == {"broken_streams": 1} and not seat.broken.done()
        with pytest.raises(openai.BadRequestError):  # before its first text it is an error like any other
            long = [{"role": "user", "content": "long " * 2000}]
            await client.chat.completions.create(model="m", messages=long, stream=True)

    with_client(policy, use)


@pytest.mark.parametrize("streams", [False, True])
def test_responses_continue_their_items(policy, streams):
    policy.script = ['Hm.<tool_call>{"name": "search", "arguments": {"q": "rain"}}</tool_call>', "done", "more"]
    tool = {"type": "function", **SEARCH["function"], "strict": True}

    async def use(client, seat):
        async def ask(items):
            keys = dict(model="m", input=items, tools=[tool], instructions="Be brief.", store=False)
            if not streams:
                return await client.responses.create(**keys)
            async with client.responses.stream(**keys) as stream:
                return await stream.get_final_response()

        items = [{"role": "user", "content": "hi"}]
        reply = await ask(items)
        text, call = reply.output
        assert text.content[0].text == "Hm." and json.loads(call.arguments) == {"q": "rain"}
        items += [*reply.output, {"type": "function_call_output", "call_id": call.call_id, "output": "wet"}]
        items = [item if isinstance(item, dict) else item.model_dump(exclude_none=True) for item in items]
        reply = await ask(items)
        assert reply.output_text == "done" and reply.usage.output_tokens > 0
        await ask([*items, *(i.model_dump() for i in reply.output), {"role": "user", "content": "?"}])
        return seat.trajectory

    trajectory = with_client(policy, use)
    assert trajectory.counts == {} and len(trajectory.samples[0].turns) == 3


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ({"n": 2}, "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, "unsupported_parameter"),
        ({"logprobs": True}, "unsupported_parameter"),
        ({"max_tokens": 0}, "invalid_value"),
        ({"messages": []}, "invalid_messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "unsupported_content"),
        ({"messages": [{"role": "user", "content": "long " * 2000}]}, "context_length_exceeded"),
        ({"tools": [{"type": "custom"}]}, "unsupported_parameter"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": "all"}}]}, "unsupported_parameter"),
        ({"stop": ["a", ""]}, "invalid_value"),
        ({"stop": ["a"] * 65}, "invalid_value"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "text": "a"}]}]}, "unsupported_content"),
        ({"messages": [{"role": "tool", "tool_call_id": ["a"], "content": "a"}]}, "invalid_messages"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": {}, "function": {"name": "a"}}]}]},
            "invalid_messages",
        ),
        ({"messages": [{"role": "user", "name": 5, "content": "a"}]}, "invalid_messages"),
        ({"stream": True, "extra_body": {"stream_options": "usage"}}, "invalid_value"),
    ],
)
def test_what_is_not_supported_is_refused_in_openais_format(policy, keys, code):
    import openai

    async def use(client, seat):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(
                **{"model": "m", "messages": [{"role": "user", "content": "a"}]} | keys
            )
        assert refused.value.code == code and refused.value.body["message"]

    with_client(policy, use)
    assert not policy.asked


@pytest.mark.parametrize("where", ["tools", "arguments", "role", "content"])
def test_texts_without_utf8_bytes_are_replaced(policy, where):
    """A tool may cut a text in the middle of a character, and the policy may write the escape of half a pair."""
    policy.script = ['<tool_call>{"name": "search", "arguments": {"q": "\\ud83d"}}</tool_call>']
    function = {"name": "search\ud83d" if where == "tools" else "search", "parameters": {}}
    called = {"id": "c", "type": "function", "function": {"name": "search", "arguments": '{"q": "\\ud83d"}'}}
    messages = [
        {"role": "us\ud83der" if where == "role" else "user", "content": "a\ud83d" if where == "content" else "a"},
        *([{"role": "assistant", "tool_calls": [called]}] if where == "arguments" else []),
        {"role": "user", "content": "\U0001f600"},
    ]
    body = {"messages": messages, "tools": [{"type": "function", "function": function}]}

    async def run():
        address, seat = Address(), policy.seat()
        async with address.seated(seat) as key, httpx.AsyncClient() as client:
            keys = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            return await client.post(f"{address.url}/chat/completions", content=json.dumps(body), headers=keys), seat

    answer, seat = asyncio.run(run())
    assert answer.status_code == 200, answer.text
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"q": "?"}
    assert "\U0001f600" in seat.trajectory.samples[0].opening[-1]["content"]
    json.dumps([sample.all_messages for sample in seat.trajectory.samples], ensure_ascii=False).encode()


def test_a_request_that_cannot_be_rendered_costs_the_agent_only(policy, monkeypatch):
    import openai

    monkeypatch.setattr(Renderer, "whole", lambda *_: {}[0])  # an unexpected error

    async def use(client, seat):
        with pytest.raises(openai.BadRequestError, match="cannot be used: KeyError"):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])
        assert not seat.broken.done()

    with_client(policy, use)


def test_parameters_that_have_no_effect_are_counted(policy):
    async def use(client, seat):
        keys = dict(model="m", messages=[{"role": "user", "content": "a"}])
        more = {"guided_json": {}, "a b": 1, "min_p": None, "n": 1, "logprobs": False}
        await client.chat.completions.create(**keys, seed=5, user="me", tool_choice="required", extra_body=more)
        await client.responses.create(model="m", input="a", reasoning={"effort": "low"}, include=[], store=True)
        return seat.trajectory.counts

    names = ("seed", "tool_choice", "guided_json", "other", "reasoning")
    assert with_client(policy, use) == {f"ignored/{name}": 1 for name in names} | {"branches/fork": 1}


def test_keys_are_valid_for_their_own_conversation_only(policy):
    import openai

    async def run():
        address = Address()
        async with address.seated(policy.seat()) as other:
            async with address.seated(policy.seat()) as key:
                assert list(address.seats) == [other, key]
            for wrong in (key, "none"):
                client = openai.AsyncOpenAI(base_url=address.url, api_key=wrong)
                with pytest.raises(openai.AuthenticationError) as refused:
                    await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])
                assert refused.value.code == "invalid_api_key"
            async with httpx.AsyncClient() as client:
                answer = await client.post(f"{address.url}/embeddings", json={})
                assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found"

    asyncio.run(run())


def test_an_abandoned_turn_is_cancelled(policy):
    import openai

    policy.seconds = 100.0

    async def use(client, seat):
        with pytest.raises(openai.APITimeoutError):
            ask = client.with_options(timeout=0.3).chat.completions.create
            await ask(model="m", messages=[{"role": "user", "content": "a"}])
        for _ in range(200):
            if policy.cancelled:
                break
            await asyncio.sleep(0.05)
        assert policy.cancelled == 1 and not seat.trajectory.samples

    with_client(policy, use)


def test_the_end_of_a_conversation_cancels_its_turns(policy):
    import openai

    policy.seconds = 100.0

    async def run():
        address = Address()
        async with address.seated(policy.seat()), address.seated(policy.seat()) as key:
            client = openai.AsyncOpenAI(base_url=address.url, api_key=key, max_retries=0)
            ask = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])
            asked = asyncio.ensure_future(ask)
            while not policy.asked:
                await asyncio.sleep(0.05)
        await asyncio.sleep(0)
        assert policy.cancelled == 1
        with pytest.raises(openai.APIConnectionError):
            await asked

    asyncio.run(run())


def test_a_template_that_drops_thoughts_gives_samples_that_the_counts_name(agents_of, policy):
    policy.script = ["<think>x</think>one", "<think>y</think>two"]
    with agents_of("again") as agents:
        (rollout,) = conversed(agents, lambda: policy.seat(template=QWEN3, columns={"answer": "<think>y</think>two"}))
    assert rollout.dialogue.counts == {"agents/branches/template": 1}
    assert rollout.text == "<think>y</think>two" and [b.text for b in rollout.branches] == ["<think>x</think>one"]
    assert rollout.dialogue.rewards == {"again": 1.0} and len(rollout.prompt.messages) == 3


# ------------------------------------------------------------------------------------------------- in a DialogueEngine


class Cuttable(Scripted):
    """A scripted engine that truncates responses."""

    def __init__(self, *args):
        super().__init__(*args)
        self.places = set()

    def cut(self, places):
        self.places |= set(places)

    def is_cut(self, prompt):
        return prompt.position in self.places

    def beside(self, home):
        return SimpleNamespace(granted=None, turns=0, first=None, queued=0.0)

    def close(self, home):
        home.closed = True


def engine_of(tokenizer, responders, script):
    dialogues = Dialogues(responders, tokenizer, None, 1000, 500, chat_template=HERMES)
    return DialogueEngine(Cuttable(tokenizer, script), dialogues)


def test_a_failed_agent_is_tried_again_with_the_same_seeds(agents_of, tokenizer, tmp_path):
    columns = {"count": str(tmp_path / "count")}
    for retries, ended, tried in ((2, "done", 1), (0, "failed", 0)):
        with agents_of("second", retries=retries) as responders:
            engine = engine_of(tokenizer, responders, ["one", "two"])
            ((_, (rollout,)),) = engine.groups([Prompt(5, (1,), "hi", columns)], 1, SamplingParams(0.7, 50), 3)
        dialogue = rollout.dialogue
        assert (dialogue.ended, dialogue.retries, dialogue.cause) == (ended, tried, "" if tried else "raised")
        assert dialogue.rewards == {"second": float(tried)} and rollout.text == "one"
        assert len(set(engine.engine.seeds)) == 1 and len(engine.engine.seeds) == tried + 1
        (tmp_path / "count").unlink()


def test_a_conversation_that_is_cut_ends_with_its_turns_while_the_agent_still_works(agents_of, tokenizer):
    with agents_of("works", max_seconds=100.0) as responders:
        engine = engine_of(tokenizer, responders, ["one"])

        def cut():
            while not engine.engine.requests:
                time.sleep(0.05)
            time.sleep(0.5)  # the agent has its reply
            engine.cut([8])

        threading.Thread(target=cut, daemon=True).start()
        begun = time.monotonic()
        ((_, (rollout,)),) = engine.groups([Prompt(5, (1,), "hi", position=8)], 1, SamplingParams(0.7, 50), 3)
        assert time.monotonic() - begun < 60
    assert rollout.dialogue.ended == rollout.finish_reason == "length" and rollout.text[:3] == "one"[: rollout.length]
    assert rollout.dialogue.rewards == {"works": 0.0}


def test_the_process_of_a_conversation_that_is_cut_is_killed_while_others_of_its_worker_go_on(agents_of, policy):
    async def run():
        address, seats = Address(), [policy.seat(index=i) for i in range(2)]
        tasks = [asyncio.ensure_future(agents.agent.converse(address, seat, agents.fail)) for seat in seats]
        while not all(seat.trajectory.samples for seat in seats):
            await asyncio.sleep(0.05)
        assert len(children()) == 2
        tasks[0].cancel()
        ends = time.monotonic() + 20
        while len(children()) > 1 and time.monotonic() < ends:
            await asyncio.sleep(0.05)
        assert len(children()) == 1 and not tasks[1].done()
        tasks[1].cancel()
        await asyncio.wait(tasks)

    def children():
        """The agents' processes."""
        workers = [p for p in psutil.Process().children() if p.status() != "zombie" and "coroutines" in p.cmdline()]
        below = [p for worker in workers for p in sorted(worker.children(), key=psutil.Process.create_time)[1:]]
        return [p for p in below if p.is_running() and p.status() != "zombie"]  # the first one guards the session

    with agents_of("works", max_seconds=100.0) as agents:
        asyncio.run(run())


def test_turns_at_once_get_servers_of_their_own(agents_of, tokenizer):
    with agents_of("both") as responders:
        engine = engine_of(tokenizer, responders, ["one"])
        ((_, (rollout,)),) = engine.groups([Prompt(5, (1,), "hi")], 1, SamplingParams(0.7, 50), 3)
    assert rollout.dialogue.rewards == {"both": 2.0} and len(rollout.branches) == 1
    assert len(set(engine.engine.seeds)) == 2


# ----------------------------------------------------------------------------------------------------------- programs

SOLVE = '''
"""An agent that is a program: it asks once for what is in problem.txt, and then does what its first argument says."""

import http.client, json, os, socket, subprocess, sys, time
from urllib.parse import urlsplit

url = urlsplit(os.environ["OPENAI_BASE_URL"])


def ask(content, key=os.environ["OPENAI_API_KEY"]):
    connection = http.client.HTTPConnection(url.hostname, url.port)
    body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": content}]}
    connection.request("POST", url.path + "/chat/completions", json.dumps(body), {"Authorization": "Bearer " + key})
    answer = connection.getresponse()
    return json.loads(answer.read())["choices"][0]["message"]["content"] if answer.status == 200 else answer.status


def daemon():
    """A process in a session of its own, with a socket, whose parent has ended."""
    code = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print('up', flush=True); time.sleep(999)"
    started = subprocess.Popen([sys.executable, "-c", code, MARK], stdout=subprocess.PIPE, start_new_session=True)
    started.stdout.readline()


MARK = "mark_of_" + os.environ["MARK"]
what, *words = sys.argv[1:]
with open("answer.txt", "w") as file:
    json.dump([ask(open("problem.txt").read()), *words], file)
exec(what)
'''


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Makes the agent that runs SOLVE in `python -c`, with these options; its processes and folders are this test's."""
    monkeypatch.setenv("MARK", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    (tmp_path / "solve.py").write_text(SOLVE)

    def make(what="pass", *words, workers=1, max_seconds=60.0, **options):
        files = {"problem.txt": "{prompt}", "solve.py": str(tmp_path / "solve.py")} | options.pop("files", {})
        agent = {"command": [sys.executable, "solve.py", what, *words], "files": files, "variables": ["MARK"]} | options
        return Responders(MultiTurnSection(agent=agent, workers=workers, max_seconds=max_seconds))

    def left():
        """What the agents have left: processes, and work folders."""
        mark = f"mark_of_{tmp_path}"
        processes = [p for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or [])]
        return [*processes, *(tmp_path / "temporary").glob("megagrpo_tmp_*")]

    make.left = left
    yield make
    assert not left()


def test_a_program_gets_a_row_without_a_shell_and_is_scored_with_files_that_it_has_not_seen(program, policy):
    odd = "$(touch x) \"'\n{prompt} --"
    check = """import json, os, sys
assert json.load(open("answer.txt")) == ["one", json.load(open("tests/odd.json"))[0], "a b"], open("answer.txt").read()
assert not {"OPENAI_API_KEY", "HF_TOKEN"} & set(os.environ) and "x" not in os.listdir() and len(os.listdir("tests")) == 2
open("number", "w").write("0.25")
"""
    tests = {"check.py": check, "odd.json": json.dumps([odd]), "of_other_rows": None}
    what = "assert not os.path.exists('tests') and 'HF_TOKEN' not in os.environ; open('number', 'w').write('9')"
    score = dict(score=[sys.executable, "tests/check.py"], score_files={"tests": "{tests}"}, reward_file="number")
    with program(what, "{odd}", "a b", **score) as agents:
        agents.agent.check_columns(["odd", "tests"])
        with pytest.raises(ValueError, match="`command` needs column `tests`"):
            agents.agent.check_columns(["odd"])
        rollouts = conversed(agents, *[lambda: policy.seat(columns={"odd": odd, "tests": tests})] * 2)
    assert [(r.dialogue.ended, r.dialogue.rewards) for r in rollouts] == [("done", {"command": 0.25})] * 2
    # its exit status is the reward, also if it cannot import what the agent has broken
    with program("open('m.py', 'w').write('def')", score=[sys.executable, "-c", "import m"]) as agents:
        (rollout,) = conversed(agents, lambda: policy.seat())
    assert (rollout.dialogue.ended, rollout.dialogue.rewards) == ("done", {"command": 0.0})


FAILING = {
    "exit": (dict(what="sys.exit('no idea')"), "its command ended with exit code 1: no idea"),
    "signal": (dict(what="os.abort()"), "its command was killed by SIGABRT"),
    "output": (dict(what="while True: print('y' * 9999)", output_mb=1), "its command has printed more than 1 MiB"),
    "no_turn": (dict(command=["true"]), "asked the policy for nothing"),
    "other_key": (dict(what="sys.exit(ask('a', 'other'))"), "ended with exit code 145"),  # 401
    "huge_body": (dict(what="sys.exit(ask('a' * 2**23))"), ""),  # it ends by the limit of tokens
    "climbs": (dict(files={"up": "{up}"}), r"'\.\./\.\./up' is no name below the work folder"),
    "path": (dict(files={"up": "/{path}"}), "column `path` is part of the path"),
    "option": (dict(container="env {option} {command}"), r"the row makes an option of {option}: '-i'"),
    "no_column": (dict(command=["echo", "{lost}"]), "its row has no column 'lost'"),
    "nul": (dict(command=["echo", "{nul}"]), "its command cannot start: embedded null byte"),
    "no_number": (dict(reward_file="answer.txt"), "answer.txt holds no finite number"),
    "link": (dict(what="os.symlink('/etc/passwd', 'r')", reward_file="r"), "r cannot be read: Too many levels"),
    "above": (dict(what="os.symlink('/etc', 'd')", reward_file="d/passwd"), "d/passwd cannot be read"),
    "own_number": (
        dict(what="open('r', 'w').write('1')", score=["true"], reward_file="r"),
        "r cannot be read: No such",
    ),
    "fifo": (dict(what="os.mkfifo('r')", reward_file="r"), "r is no regular file"),
    "endless": (dict(what="open('r', 'w').write('1' * 10**6)", reward_file="r"), "r holds no finite number"),
    "group": (dict(what="os.killpg(0, 9)"), "its command was killed by SIGKILL"),  # of the agent only
    "gone": (dict(score=["sh", "-c", "echo no box; exit 125"]), "its score ended with exit code 125: no box"),
    "start": (dict(start="sh -c 'echo no image; exit 3'"), "its start ended with exit code 3: no image"),
    "before": (dict(before_score="sh -c 'exit 3'", score=["true"]), "its before_score ended with exit code 3"),
}


@pytest.mark.parametrize(("options", "reason"), FAILING.values(), ids=FAILING)
def test_a_program_that_fails_costs_its_own_conversation(program, policy, options, reason, caplog):
    columns = {"up": {"../../up": ""}, "path": "../a", "option": "-i", "nul": "\0"}
    with program(**options) as agents:
        (rollout,) = conversed(agents, lambda: policy.seat(columns=columns))
    assert rollout.dialogue.ended == ("failed" if reason else "budget")
    assert rollout.dialogue.rewards == {"command": 0.0 if reason else None} and re.search(reason, caplog.text)


def test_hidden_files_replace_what_the_agent_has_put_there_and_follow_no_link(program, policy, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "check.py").write_text("mine")
    what = f"os.symlink({str(tmp_path / 'mine')!r}, 'tests'); os.symlink({str(tmp_path / 'mine')!r}, 'more'); "
    what += "os.mkdir('own'); open('own/conftest.py', 'w')"
    check = "import os; assert os.listdir('tests') == os.listdir('own') == ['check.py'] and not os.path.islink('more')"
    options = dict(
        score_files={"tests": "{tests}", "own": "{tests}", "more/deep/a": "{prompt}"},
        score=[sys.executable, "tests/check.py"],
    )
    with program(what, **options) as agents:
        (rollout,) = conversed(agents, lambda: policy.seat(columns={"tests": {"check.py": check}}))
    assert rollout.dialogue.rewards == {"command": 1.0}
    assert [(p.name, p.read_text()) for p in (tmp_path / "mine").iterdir()] == [("check.py", "mine")]


def test_a_program_is_killed_with_its_daemons_at_the_end_at_a_deadline_and_with_its_worker(program, policy):
    with program("daemon()", score=["true"]) as agents:
        (rollout,) = conversed(agents, lambda: policy.seat())
        assert rollout.dialogue.rewards == {"command": 1.0} and not program.left()
    with program("daemon(); time.sleep(999)", score=["sleep", "99"], max_seconds=3.0, score_seconds=0.5) as agents:
        (rollout,) = conversed(agents, lambda: policy.seat())
        assert (rollout.dialogue.ended, rollout.dialogue.rewards) == ("time_limit", {"command": 0.0})
        assert not program.left()
    with program("daemon(); open('up', 'w'); time.sleep(999)") as agents:

        async def run():
            address, seat = Address(), policy.seat()
            task = asyncio.ensure_future(agents.agent.converse(address, seat, agents.fail))
            while len(program.left()) < 2:  # a daemon, and a folder
                await asyncio.sleep(0.05)
            for worker in [p for p in psutil.Process().children() if "coroutines" in p.cmdline()]:
                worker.kill()
            await task
            return seat.trajectory

        trajectory = asyncio.run(run())
        assert (trajectory.ended, trajectory.cause) == ("failed", "died")
        wait_until(lambda: not program.left())


LEFT = """
import pathlib
for name, content in {"text": b"caf\\xc3\\xa9", "binary": b"\\xff\\x00\\ud800", "full": b"1234", "large": b"12345"}.items():
    open(name, "wb").write(content)
for name in ("link", "away"):
    os.symlink("/etc", name)
os.symlink("text", "near")
os.mkfifo("fifo")
os.truncate(os.open("huge", os.O_CREAT | os.O_RDWR), 1 << 40)
os.mkdir("folder")
"""


def test_files_that_a_program_leaves_reach_rewards_and_nothing_else_does(program, policy):
    most = dict.fromkeys(["large", "huge", "link", "away/passwd", "near", "fifo", "folder", "missing", "text/x"], 4)
    most |= {"text": 5, "binary": 8, "full": 4, "made/by/score": 9}
    score = ["sh", "-c", "mkdir -p made/by; echo ok > made/by/score; rm missing"]
    with program(LEFT, score=score, outputs=most) as agents:
        (rollout,) = conversed(agents, lambda: policy.seat())
        (failed,) = conversed(agents, lambda: policy.seat(max_turns=0))
    read = {"text": "café", "binary": "\udcff\0\\ud800", "full": "1234", "made/by/score": "ok\n"}
    (trajectory,) = [PER_ROLLOUT["trajectories"](rollout)]
    assert trajectory["outputs"] == dict.fromkeys(most) | read and rollout.dialogue.ended == "done"
    assert from_json(json.loads(frame(as_json(trajectory))[4:])) == trajectory  # as workers get it
    assert failed.dialogue.outputs.keys() == most.keys() and "outputs" not in rollout.dialogue.record()
    for outputs, reason in {
        ("../a", 1): "no name below",
        ("a", 9 << 20): "bytes in all",
        ("a", 0): "greater than",
    }.items():
        with pytest.raises(ValueError, match=reason):
            program(outputs=dict([outputs]))


SCORED = dict(score=["sh", "-c", "{score}"], score_seconds=3.0)
LEAVING = {  # options; what programs do after their answer and how they are scored: how they end, and their rewards
    "score": (
        SCORED,
        {
            ("time.sleep(99)", "test -e answer.txt"): ("time_limit", 1.0),
            ("time.sleep(99)", "exit 125"): ("failed", 0.0),
            ("pass", "sleep 99"): ("time_limit", 0.0),
            ("sys.exit(ask('a'))", "test -e answer.txt"): ("max_turns", 1.0),
            ("sys.exit(1)", "true"): ("failed", 0.0),
            ("sys.exit(1)", "sleep 99"): ("failed", 0.0),
        },
    ),
    "file": (
        dict(reward_file="r"),
        {
            ("open('r', 'w').write('0.5'); time.sleep(99)", ""): ("time_limit", 0.5),
            ("time.sleep(99)", ""): ("time_limit", 0.0),
        },
    ),
    "others": ({}, {("time.sleep(99)", ""): ("time_limit", None)}),
}


@pytest.mark.parametrize(("options", "cases"), LEAVING.values(), ids=LEAVING)
def test_what_a_program_leaves_at_a_limit_is_scored(program, policy, options, cases):
    seats = [
        lambda what=what, score=score: policy.seat(columns={"what": what, "score": score}, max_turns=1)
        for what, score in cases
    ]
    with program("{what}", max_seconds=6.0, **options) as agents:
        rollouts = conversed(agents, *seats)
    assert [(r.dialogue.ended, r.dialogue.rewards["command"]) for r in rollouts] == [*cases.values()]
    assert {r.text for r in rollouts} == {"one"}


RUNTIME = """#!/bin/sh
# a stand-in for a runtime with long-lived containers: run NAME DIR | exec NAME COMMAND... | rm NAME | ps
echo "$@" >> "$LOG"
box=$BOXES/$2
case $1 in
  run) mkdir "$box"; ln -s "$3" "$box/work"; setsid sleep 999 >/dev/null 2>&1 & echo $! > "$box/pid";;
  exec) cd "$box/work" && shift 2 && exec "$@";;
  rm) kill -9 "$(cat "$box/pid")"; rm -r "$box";;
  ps) ls "$BOXES";;
esac
"""


@pytest.fixture
def runtime(program, tmp_path, monkeypatch):
    """The options of a program in the stand-in's containers, whose folders and calls are in `boxes` and `log`."""
    (tmp_path / "boxes").mkdir()
    for name, value in {"LOG": tmp_path / "log", "BOXES": tmp_path / "boxes"}.items():
        monkeypatch.setenv(name, str(value))
    script = tmp_path / "runtime"
    script.write_text(RUNTIME)
    script.chmod(0o755)
    words = {"start": "run {name} {workdir}", "container": "exec {name} {command}", "stop": "rm {name}"}
    options = {key: f"{script} {text}" for key, text in words.items()} | {"variables": ["MARK", "LOG", "BOXES"]}
    yield options
    assert not list((tmp_path / "boxes").iterdir())


def test_a_container_of_a_runtime_is_started_used_twice_and_removed(program, runtime, policy, tmp_path):
    ended = dict(before_score="mkdir {workdir}/ended", score=["test", "-e", "answer.txt", "-a", "-d", "ended"])
    with program("assert not os.path.exists('ended')", **ended, **runtime) as agents:
        (rollout,) = conversed(agents, lambda: policy.seat())
    assert rollout.dialogue.rewards == {"command": 1.0}
    verbs = [line.split()[0] for line in (tmp_path / "log").read_text().splitlines()]
    assert verbs == ["run", "exec", "exec", "rm"]


@pytest.mark.parametrize("where", ["command", "start"])
def test_a_container_is_removed_after_a_deadline_and_the_death_of_its_worker(program, runtime, policy, tmp_path, where):
    started = {"start": f"sh -c 'sleep 2; exec {runtime['start']}'"} if where == "start" else {}

    def removed():
        return "rm " in (tmp_path / "log").read_text() and not list((tmp_path / "boxes").iterdir())

    with program("time.sleep(999)", max_seconds=1.0, **runtime | started) as agents:
        (rollout,) = conversed(agents, lambda: policy.seat())
        assert rollout.dialogue.ended == "time_limit"
        wait_until(lambda: (tmp_path / "log").exists() and removed())
        (tmp_path / "log").unlink()
    with program("time.sleep(999)", **runtime | started) as agents:

        async def run():
            task = asyncio.ensure_future(agents.agent.converse(Address(), policy.seat(), agents.fail))
            while not program.left():
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.5)
            for worker in [p for p in psutil.Process().children() if "coroutines" in p.cmdline()]:
                worker.kill()
            await task

        asyncio.run(run())
    wait_until(lambda: (tmp_path / "log").exists() and removed() and not program.left())


def test_warm_containers_are_started_ahead_used_once_and_replaced(program, runtime, policy, tmp_path):
    def running():
        return {box.name for box in (tmp_path / "boxes").iterdir() if (box / "pid").exists()}

    with program(warm=2, concurrent=2, **runtime) as agents:
        wait_until(lambda: len(running()) == 2)
        first = running()
        rollouts = conversed(agents, *[lambda: policy.seat()] * 2)
        assert [r.dialogue.ended for r in rollouts] == ["done"] * 2
        used = {line.split()[1] for line in (tmp_path / "log").read_text().splitlines() if line.startswith("exec")}
        assert used == first
        wait_until(lambda: len(running()) == 2 and not running() & first)
        folder = (tmp_path / "boxes" / min(running()) / "work").readlink().parent.name
        psutil.Process(int(re.search(r"\d+", folder)[0])).kill()  # it gets no conversation; its container is left
        conversed(agents, *[lambda: policy.seat()] * 3)
    wait_until(lambda: len(running()) == 1)
    with program(names=f"{tmp_path}/runtime ps", **runtime):
        assert not running()

    def calls(verb):
        return len(re.findall(f"(?m)^{verb} ", (tmp_path / "log").read_text()))

    before = calls("run")
    with program(warm=2, warm_seconds=2.0, **runtime):
        wait_until(lambda: before < calls("run") and not running() and calls("run") == calls("rm"))
    for options, reason in {
        ("start", ""): "needs `start`",
        ("start", "run {image}"): r"`start` names {image}, which only a row has",
        ("names", "ps", "stop", "rm {workdir}"): "needs a `stop` whose only placeholder is {name}",
        ("names", "false"): "names: ended with exit code 1",
    }.items():
        with pytest.raises(ValueError, match=reason):
            program(**runtime | dict(warm=1) | dict(batched(options, 2)))
    wait_until(lambda: not program.left())


@pytest.mark.skipif(not shutil.which("bwrap"), reason="needs bubblewrap")
def test_a_program_in_bubblewrap_sees_its_work_folder_and_the_address(program, policy, tmp_path):
    mounts = "--ro-bind / / --tmpfs /tmp --dev /dev --proc /proc --bind {workdir} /mnt --chdir /mnt"
    what = f"assert os.getcwd() == '/mnt' and not os.path.exists({str(tmp_path)!r}); daemon()"
    container = f"bwrap {mounts} --unshare-all --share-net --die-with-parent {{command}}"
    with program(what, container=container, score=["test", "-e", "answer.txt"]) as agents:
        (rollout,) = conversed(agents, lambda: policy.seat())
    assert (rollout.dialogue.ended, rollout.dialogue.rewards) == ("done", {"command": 1.0})


BOXED = "bwrap --ro-bind / / --tmpfs /tmp --dev /dev --proc /proc --bind {workdir} /mnt --chdir /mnt "
BOXED += "--ro-bind {socket} {socket} --unshare-all --die-with-parent {command}"


@pytest.mark.skipif(not shutil.which("bwrap"), reason="needs bubblewrap")
def test_a_program_without_a_network_reaches_the_policy_and_nothing_else(program, policy, tmp_path):
    what = (
        "assert ask('a', 'other') == 401 and [d for _, d in socket.if_nameindex()] == ['lo']; [ask('b') for _ in '12']"
    )
    cases = {what: ("done", 2), "sys.exit(3)": ("failed", 0), "os.killpg(0, 9)": ("failed", 0)}

    async def run():
        address = agents.agent.address()

        async def one(what):
            seat = policy.seat(columns={"what": what})
            await agents.agent.converse(address, seat, agents.fail)
            return seat.trajectory.rollout()

        return await asyncio.gather(*map(one, cases))

    with program("{what}", container=BOXED, listen="unix") as agents:
        rollouts = asyncio.run(run())
    assert [(r.dialogue.ended, len(r.branches)) for r in rollouts] == [*cases.values()]
    assert not [*(tmp_path / "temporary").iterdir()]


def test_no_more_programs_run_at_once_than_the_limit(program, policy, tmp_path):
    what = f"import pathlib; here = pathlib.Path({str(tmp_path)!r}, 'now'); here.mkdir(exist_ok=True); "
    what += "me = here / str(os.getpid()); me.touch(); time.sleep(0.3); n = len(os.listdir(here)); me.unlink(); "
    with program(what + "open('number', 'w').write(str(n))", reward_file="number", workers=3, concurrent=2) as agents:
        rollouts = conversed(agents, *[lambda: policy.seat()] * 6)
    assert max(r.dialogue.rewards["command"] for r in rollouts) <= 2.0


def test_the_address_listens_on_a_named_interface_with_tls(program, policy, tmp_path):
    subprocess.run(
        "openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -subj /CN=localhost -addext "
        "subjectAltName=DNS:localhost -days 2".split(),
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    files = {"certificate": str(tmp_path / "cert.pem"), "certificate_key": str(tmp_path / "key.pem")}
    other = next((name for name in interface_addresses() if name != "lo"), "lo")
    for options, begins in ((dict(listen="localhost", **files), "https://localhost:"), (dict(listen=other), "http://")):
        with program(**options) as agents:

            async def run():
                address = agents.agent.address()
                async with address.seated(policy.seat()) as key:
                    context = ssl.create_default_context(cafile=files["certificate"])
                    async with httpx.AsyncClient(verify=context) as client:
                        url, headers = f"{address.url}/models", {"Authorization": f"Bearer {key}"}
                        return address.url, await client.get(url), await client.get(url, headers=headers)

            url, refused, answered = asyncio.run(run())
        assert url.startswith(begins) and (refused.status_code, answered.status_code) == (401, 200)
    assert interface_addresses()[other] in url
    for options, reason in {
        ("listen", "0.0.0.0"): "is every interface of the machine; name one",
        ("listen", "8.8.8.8"): "cannot listen on 8.8.8.8: Cannot assign requested address; name an interface .*lo ",
        ("command", ("no_such_program",)): "no program `no_such_program` in PATH",
        ("listn", "lo"): "unknown; did you mean `listen`",
        ("listen", "unix", "container", "env {command}"): "unix needs the folder {socket} in the container",
        ("listen", "unix", "certificate", "a", "certificate_key", "b"): "has no certificate",
    }.items():
        with pytest.raises(ValueError, match=reason):
            program(**dict(batched(options, 2)))
