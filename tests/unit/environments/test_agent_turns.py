"""Turns of agents and of judges on stand-in servers with real sockets."""

import json
import random
import threading
from contextlib import closing

import httpx
import pytest

from megagrpo.config import MultiTurnSection, RunConfig
from megagrpo.data.packing.step_samples import StepSamples
from megagrpo.data.tokens.tokenizer import load_tokenizer
from megagrpo.engine.client import VllmEngine
from megagrpo.engine.responses import InvalidResponse, find_ending, heard_tokens, read_response
from megagrpo.environments.agents.seat import TextStream
from megagrpo.environments.dialogues import DialogueEngine, Dialogues
from megagrpo.environments.episodes.tool_calls import CALL_OPENING, hermes
from megagrpo.environments.own_judges import own_judges
from megagrpo.environments.responders import Responders
from megagrpo.rewards.scorer import RewardScorer
from megagrpo.trainer.rollout.sample_metrics import rollout_metrics
from megagrpo.types import Prompt, Rollout, SamplingParams, ScoredRollout
from tests.unit.data.test_tokenizer import chat_folder  # noqa: F401
from tests.unit.engine.stand_ins import StandIn
from tests.unit.environments.test_trajectories import HERMES
from tests.unit.for_each import for_each

AGENT = '''
"""Asks once, then for two answers at once."""

import asyncio

import openai


async def run(prompt):
    messages = [{"role": "user", "content": prompt}]
    async with openai.AsyncOpenAI() as model:
        reply = await model.chat.completions.create(model="m", messages=messages)
        messages += [reply.choices[0].message]
        more = [[*messages, {"role": "user", "content": word}] for word in ("one", "two")]
        await asyncio.gather(*[model.chat.completions.create(model="m", messages=one) for one in more])
    return 1.0


def streams(prompt, folder, route, stop, tools):
    """Reads a stream; after its first text the file `first` exists."""
    tool = {"name": "look", "parameters": {"type": "object", "properties": {}}}
    text, calls = "", []
    if route == "chat":
        keys = dict(tools=[{"type": "function", "function": tool}]) if tools else {}
        keys |= dict(stop=stop) if stop else {}
        messages = [{"role": "user", "content": prompt}]
        for chunk in openai.OpenAI().chat.completions.create(model="m", messages=messages, stream=True, **keys):
            text += chunk.choices[0].delta.content or ""
            calls += chunk.choices[0].delta.tool_calls or []
            if text:
                open(f"{folder}/first", "a").close()
    else:
        keys = dict(tools=[{"type": "function", **tool}]) if tools else {}
        for event in openai.OpenAI().responses.create(model="m", input=prompt, stream=True, **keys):
            if event.type == "response.output_text.delta":
                text += event.delta
                open(f"{folder}/first", "a").close()
            calls += [event.item] if event.type.endswith("item.done") and event.item.type == "function_call" else []
    open(f"{folder}/text", "w").write(text)
    return len(calls)
'''


@pytest.fixture(scope="module")
def agent(tmp_path_factory, request):
    """An agent in one worker for all tests: `openai` takes half a second to import."""
    folder, name = tmp_path_factory.mktemp("agent"), getattr(request, "param", "run")
    (folder / "mine.py").write_text(AGENT)
    with Responders(MultiTurnSection(agent=f"{folder}/mine.py:{name}", workers=1), folder) as responders:
        yield responders


@pytest.fixture
def tokenizer(chat_folder):  # noqa: F811
    return load_tokenizer(chat_folder)


@pytest.mark.parametrize(("slots", "waits"), [(1, True), (64, False)])
def test_a_turn_that_waits_for_a_slot_is_not_counted_as_generation(agent, tokenizer, slots, waits):
    with closing(StandIn(delay=0.25)) as server:
        server.reason = "stop"
        inner = VllmEngine([server.url], tokenizer.decode, max_num_seqs=slots)
        engine = DialogueEngine(inner, Dialogues(agent, tokenizer, None, 1000, 500, chat_template=HERMES))
        groups = list(engine.groups([Prompt(5, (1,), "hi")], 3, SamplingParams(1.0, 400, (2,)), 3))
    rollouts = [rollout for _, group in groups for rollout in group]
    turns = [turn for whole in rollouts for one in (whole, *whole.branches) for turn in one.dialogue.turns]
    assert len(turns) == 9 and all(turn.generated - turn.queued >= 0.25 for turn in turns)
    assert (max(turn.queued for turn in turns) > 0.2) == waits
    assert all(turn.began > 1.7e9 for turn in turns)
    metrics = rollout_metrics(StepSamples.of([ScoredRollout(rollout, {"run": 1.0}, 1.0) for rollout in rollouts]))
    assert (metrics["idle/slots"] > 0.2) == waits, metrics


CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'


def streamed(agent, tokenizer, server, tmp_path, text, route="chat", stop=None, tools=False, **options):
    """The rollout of an agent that reads `text`, of which the last token is sampled after the agent has read the
    first one; and the text that it read."""
    server.reason, server.ids = "stop", [*tokenizer.encode(text, False), 2]
    first = tmp_path / "first"
    gate = server.gates[len(server.ids) - 1] = threading.Event()

    def watch():
        while not first.exists() and not gate.wait(0.02):
            pass
        gate.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    inner = VllmEngine([server.url], tokenizer.decode, **options)
    engine = DialogueEngine(inner, Dialogues(agent, tokenizer, None, 1000, 500, chat_template=HERMES))
    columns = dict(folder=str(tmp_path), route=route, stop=stop, tools=tools)
    try:
        ((_, (rollout,)),) = engine.groups([Prompt(5, (1,), "hi", columns)], 1, SamplingParams(1.0, 400, (2,)), 3)
    finally:
        gate.set()
        watcher.join()
    assert server.opened == [True], "the agent got its first text only after the last token"
    return rollout, (tmp_path / "text").read_text()


@pytest.fixture
def server():
    with closing(StandIn()) as server:
        yield server


@pytest.mark.parametrize("agent", ["streams"], indirect=True)
@pytest.mark.parametrize("route", ["chat", "responses"])
def test_the_agent_gets_the_first_text_before_the_last_token_is_sampled(agent, tokenizer, server, tmp_path, route):
    rollout, text = streamed(agent, tokenizer, server, tmp_path, "all of it é 語 🙂", route)
    assert text == rollout.text == "all of it é 語 🙂" and rollout.response_ids.tolist() == server.ids
    assert rollout.rollout_logprobs.tolist() == [-0.5] * len(server.ids) and rollout.dialogue.ended == "done"
    assert [body["stream"] for body in server.asked] == [True]


@pytest.mark.parametrize("agent", ["streams"], indirect=True)
@pytest.mark.parametrize("route", ["chat", "responses"])
def test_text_before_a_tool_call_is_sent_and_the_call_is_not_text(agent, tokenizer, server, tmp_path, route):
    rollout, text = streamed(agent, tokenizer, server, tmp_path, f"I look.\n\n{CALL}", route, tools=True)
    assert text == "I look." == rollout.dialogue.messages[-1]["content"] and rollout.dialogue.rewards == {"streams": 1}
    assert rollout.response_ids.tolist() == server.ids


@pytest.mark.parametrize("agent", ["streams"], indirect=True)
def test_a_stream_that_breaks_is_repeated_and_the_agent_gets_no_text_twice(agent, tokenizer, server, tmp_path):
    server.breaks = [7, None]
    rollout, text = streamed(agent, tokenizer, server, tmp_path, "one two three four", patience=60.0)
    assert text == "one two three four" == rollout.text and len(server.asked) == 2
    assert rollout.dialogue.ended == "done" and rollout.dialogue.counts == {}


def test_a_stream_that_a_weight_update_aborts_is_continued_with_the_tokens_so_far(server, tokenizer):
    ids, heard = [*tokenizer.encode("one two three", False), 2], []
    server.reason, server.aborts = "stop", [4, None]
    engine = VllmEngine([server.url], tokenizer.decode, in_flight="resume")
    engine.weight_version = 2

    async def respond(session, home, index, number):
        def on_tokens(place, new):
            heard.append((place, new))
            if place == 3:  # the rest comes from the next weights
                server.ids, server.version = ids[4:], "2"

        server.ids, server.version = ids, "1"
        sampling = SamplingParams(1.0, 400, (2,))
        return await session.turn(Prompt(0, (1, 3), ""), sampling, 7, home, on_tokens)

    ((_, (rollout,)),) = engine.converse([Prompt(0, (1, 3), "")], 1, respond)
    assert rollout.response_ids.tolist() == ids and [*rollout.token_versions] == [1] * 4 + [2] * (len(ids) - 4)
    assert heard == [(place, [token_id]) for place, token_id in enumerate(ids)]
    assert server.asked[1]["token_ids"] == [1, 3, *ids[:4]] and rollout.text == "one two three"


@pytest.mark.parametrize(
    "line",
    [b'data: {"error": {"message": "out of memory"}}', b"<html>", b'data: {"choices": [{"token_ids": "x"}]}'],
)
def test_lines_that_are_no_tokens_are_errors_of_the_server(line):
    with pytest.raises(InvalidResponse, match=r"it failed during the response|not a line of a stream"):
        heard_tokens(line)


@pytest.mark.parametrize("kept", [(0, 1), (0, 2)])
def test_a_stream_without_its_end_is_invalid(kept):
    logprobs = {"content": [{"token_id": 5, "logprob": -1.0}]}
    choices = [{"index": 0, "token_ids": [5], "logprobs": logprobs, "finish_reason": end} for end in (None, "stop")]
    lines = [b"data: " + json.dumps({"choices": [choice]}).encode() for choice in choices] + [b"data: [DONE]"]
    assert read_response(b"\n\n".join(lines), 2).token_ids.tolist() == [5, 5]
    with pytest.raises(InvalidResponse, match="stream"):
        read_response(b"\n\n".join(lines[place] for place in kept), 2)


def all_of(stream, ids, rng=None):
    """What a stream sends of these tokens, which come one by one, or in parts of random lengths."""
    sent, place = [], 0
    while place < len(ids):
        count = rng.randint(1, 4) if rng else 1
        sent.append(stream.add(place, ids[place : place + count]))
        place += count
    return sent


@for_each("seed", range(20))
def test_whatever_the_tokens_a_stream_sends_the_beginning_of_their_text(tokenizer, seed):
    rng = random.Random(seed)
    parts = ["a", " ", "é", "語", "🙂", "\n", "<tool_call>", "<tool", "STOP", "ST", "<think>", "\ufffd", "</s>"]
    text = "".join(rng.choices(parts, k=60))
    ids = [*tokenizer.encode(text, False), *rng.choices(range(3, 200), k=5), 2]
    for stop, opening in (((), ""), (("STOP", "TO"), ""), ((), CALL_OPENING), (("STOP",), CALL_OPENING)):
        stream = TextStream(tokenizer.decode, stop, opening)
        sent = "".join(all_of(stream, ids, rng))
        whole = find_ending(ids, tokenizer.decode, stop, include_stop=False).text
        assert whole.startswith(sent) and not any(end in sent for end in (*stop, opening) if end)
        content, calls = hermes(whole) if opening else (whole, [])
        content, rest = stream.finish(content if calls else whole)
        assert sent + rest == content and content.strip() == (hermes(whole)[0] if calls else whole).strip()


def test_only_what_may_change_is_held_back(tokenizer):
    stream = TextStream(tokenizer.decode, ("STOP",), CALL_OPENING)
    ids = tokenizer.encode("ab 語 c STO d <tool_c e", False)
    sent, text = all_of(stream, ids), ""
    for place, more in enumerate(sent, 1):
        text, whole = text + more, tokenizer.decode(ids[:place])
        held = whole.rstrip("\ufffd")[len(text) :]
        assert whole.startswith(text) and held.strip() in ("", "S", "ST", "STO", *[CALL_OPENING[:n] for n in range(8)])
    assert TextStream(tokenizer.decode, (), None).add(0, ids) == ""  # how a call begins is not known


def test_a_server_that_samples_other_tokens_after_a_failure_ends_the_stream(tokenizer):
    one, other = (tokenizer.encode(text, False) for text in ("one two", "one six"))
    same = TextStream(tokenizer.decode, ())
    assert same.add(0, one[:4]) == "one " and same.add(0, one) == "two" and same.finish("one two") == ("one two", "")
    early = TextStream(tokenizer.decode, ())
    assert early.add(0, one[:4]) == "one " and early.add(0, other) == "six"
    late = TextStream(tokenizer.decode, ())
    assert late.add(0, one) == "one two" and late.add(0, other) == ""
    with pytest.raises(ValueError, match="a server failed during the response"):
        late.finish("one six")


def test_text_that_completes_no_character_is_not_decoded_again_with_each_token():
    count = [0]

    def decode(ids):
        count[0] += len(ids)
        return "\ufffd" * len(ids)

    stream = TextStream(decode, ())
    all_of(stream, [0] * 20_000)
    assert count[0] < 10 * 20_000


def test_the_runs_own_servers_judge_with_the_policys_adapter_or_with_the_weights_below(tokenizer, chat_folder, caplog):  # noqa: F811
    args = {"criteria": ["is short"], "per_criterion": True, "explain": False, "retries": 0, "verdict_retries": 0}
    functions = [
        {"function": "rubric", "name": name, "args": {"judge": name, **args}} for name in ("policy", "reference")
    ]
    given = {"model": {"path": str(chat_folder)}, "data": {"train": {"source": "rows.jsonl"}}}
    given |= {"rewards": {"functions": functions, "workers": 1, "timeout": 30}}
    given |= {"lora": {"rank": 4, "sync": "adapter"}, "rollout": {"max_prompt_length": 8, "max_completion_length": 64}}
    config = RunConfig.model_validate(given)
    assert config.longest_sequence == 8 + 64 + 2048 + 1024
    with closing(StandIn()) as server, RewardScorer(config.rewards, 64) as scorer:
        server.reason = "stop"
        engine = VllmEngine([server.url], lambda ids: '{"criteria_met": true}', adapters=1, patience=5.0)
        engine.weight_version = 3
        of_run = engine, scorer, ("policy", "reference"), tokenizer, None, (2,), config.longest_sequence
        with own_judges(*of_run):

            def rewards(text: str, step: int) -> dict[str, float | None]:
                prompt = Prompt(0, (1,), [{"role": "user", "content": "Q"}])
                return scorer.score([Rollout(prompt, (1,), (0.0,), "stop", 0, text)], step)[0].rewards

            assert rewards("A", 0) == {"policy": 1.0, "reference": 1.0} == rewards("A", 0) == rewards("A", 1)
            # the policy of another step is another judge; the reference stays
            assert sorted(str(body.get("model")) for body in server.asked) == ["None", *["policy-3"] * 2]
            params = server.asked[0]["sampling_params"]
            text = tokenizer.decode(server.asked[0]["token_ids"], special=True)
            assert "<|im_start|>user\nYou grade" in text and "\nA\n</answer" in text and text.endswith("assistant\n")
            schema = json.loads(params["structured_outputs"]["json"])
            assert (
                schema["required"] == ["criteria_met"] and params["stop_token_ids"] == [2] and not params["temperature"]
            )
            assert rewards("word " * 9000, 0) == dict.fromkeys(("policy", "reference"))
            assert "lower args.max_chars" in caplog.text
            (url, key), *_ = (each.values() for each in scorer.own_judges.values())
            for other, status in ((f"{key}x", 401), (key, 400)):
                headers = {"Authorization": f"Bearer {other}"}
                assert httpx.post(f"{url}/chat/completions", json={}, headers=headers).status_code == status
            server.mode = "reset"
            assert rewards("B", 0) == dict.fromkeys(("policy", "reference"))
        with pytest.raises(httpx.ConnectError):
            httpx.post(f"{url}/chat/completions", json={})
    engine.adapters = 0
    with (
        pytest.raises(ValueError, match="no weights of the reference"),
        own_judges(*of_run),
    ):
        pass
