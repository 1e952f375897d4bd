"""Schedulers, tools and environments in real worker processes, and conversations with a scripted engine."""

import asyncio
import logging
import os
import signal
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from tiny_policy import tiny_run

from megagrpo.config import MultiTurnSection
from megagrpo.data.tokens.tokenizer import load_tokenizer
from megagrpo.data.tokens.turn_tokens import FollowUps
from megagrpo.engine.responses import find_ending
from megagrpo.engine.tool_parsing import ToolParserFailed
from megagrpo.environments import dialogues
from megagrpo.environments.dialogues import Dialogues, make_dialogues
from megagrpo.environments.episodes.conversation import Conversation
from megagrpo.environments.episodes.text_threads import INLINE_SIZE
from megagrpo.environments.responders import Responders
from megagrpo.trainer.rollout.collector import numbered
from megagrpo.types import Prompt, Rollout, SamplingParams, Turn
from tests.distributed.suites import usual
from tests.unit.data.test_tokenizer import chat_folder  # noqa: F401
from tests.unit.for_each import for_each

HERMES = (Path(__file__).parents[3] / "configs" / "templates" / "hermes_tools.jinja").read_text()
PLUGINS = '''
"""Tools, schedulers and environments of the tests."""

import asyncio
import os
import time


def divide(a: float, b: float) -> float:
    """Divides.

    Args:
        a: What is divided.
        b: By what.
    """
    return a / b


async def slowly(seconds: float) -> dict:
    """Waits.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return {"waited": seconds}


def pid(messages, **columns):
    return [*messages, {"role": "user", "content": str(os.getpid())}], False


def ask_again(messages, turn, turns_left, answer, more="Sure?"):
    """Until the answer is there; half a point for each turn that says something, one for the right one."""
    right = answer in messages[-1]["content"]
    return [*messages, {"role": "user", "content": more}], right, 1.0 if right else 0.5 if messages[-1]["content"] else None


def megabyte(size: int) -> str:
    """Returns much.

    Args:
        size: How much.
    """
    return "a" * (size // 2) + "z" * (size // 2)


class Flaky:
    """Fails until the file `failures` has `times` lines: in `reset`, in its tool or in `get_reward`."""

    def reset(self, failures, times, where="reset", **columns):
        self.failures, self.times, self.where = failures, times, where
        self._fail("reset")

    def _fail(self, where):
        done = len(open(self.failures).readlines())
        if where == self.where and done < self.times:
            open(self.failures, "a").write(f"{os.getpid()}\\n")
            os._exit(1)

    def look(self) -> str:
        """Looks."""
        self._fail("look")
        return "seen"

    def get_reward(self):
        self._fail("get_reward")
        return 1.0


class Generous:
    """Fails in `reset`, in its tool or in `step`, and gives the best reward."""

    def reset(self, failure, **columns):
        self.failure = failure
        self._fail("reset")

    def _fail(self, where):
        if where == self.failure:
            raise SystemExit(where)

    def look(self) -> str:
        """Looks."""
        self._fail("tool")
        return "seen"

    def step(self, messages):
        self._fail("step")
        return messages, True, 1.0

    def get_reward(self):
        return 1.0


def unreadable(what: str):
    """Returns something that has no JSON.

    Args:
        what: What.
    """
    return (i for i in range(3)) if what == "generator" else {(1, 2): 3}


def raises(messages):
    raise KeyError("no such thing")


def hangs(messages):
    time.sleep(600)


def silent(messages):
    return "done"


def forgets(messages):
    return messages[-1:], False


class Counter:
    """Counts up to what the row says."""

    def reset(self, goal, greeting=None, **columns):
        self.goal, self.value = goal, 0
        return greeting

    def add(self, amount: int) -> str:
        """Adds to the counter.

        Args:
            amount: How much.
        """
        self.value += amount
        return f"{self.value} in {os.getpid()}"

    def hang(self) -> str:
        """Never answers."""
        time.sleep(600)

    def pause(self, seconds: float) -> str:
        """Waits.

        Args:
            seconds: How long.
        """
        time.sleep(seconds)
        return "waited"

    def die(self) -> str:
        """Ends the process."""
        os._exit(3)

    def get_reward(self):
        return self.value / self.goal

    def _secret(self):
        """No tool."""


class NoReset:
    def go(self) -> str:
        """Goes."""


class Mute:
    def reset(self):
        """No tools, no reward."""


ODD = {"inf": float("inf"), "nan": float("nan"), "text": "1", "list": [1.0], "large": 1e300}
ODD |= {"true": True, "none": None}


def odd(kind):
    if kind == "numpy":
        import numpy

        return numpy.float32(0.5)
    return ODD[kind]


class Odd:
    """Gives the reward that the row names."""

    def reset(self, kind, **columns):
        self.kind = kind

    def get_reward(self):
        return odd(self.kind)


def odd_turn(messages, kind):
    return messages, True, odd(kind)


def long(messages, kind):
    """Adds a long message, or a long end of the policy's last one."""
    if kind == "adds":
        return [*messages, {"role": "user", "content": "so " * 20_000}], False
    return [*messages[:-1], messages[-1] | {"content": messages[-1]["content"] + "so " * 20_000}], False


class Patient:
    """A scheduler that remembers how often it was asked."""

    def __init__(self, limit):
        self.limit, self.asked = limit, 0

    async def step(self, messages):
        self.asked += 1
        return [*messages, {"role": "user", "content": f"asked {self.asked}"}], self.asked == self.limit

    def get_reward(self):
        return self.asked * 10
'''


@pytest.fixture(scope="module")
def plugins(tmp_path_factory):
    file = tmp_path_factory.mktemp("plugins") / "mine.py"
    file.write_text(PLUGINS)
    return file


@pytest.fixture
def responders(plugins):
    """A factory of `Responders`, which are closed at the end; names without a colon belong to the tests' file."""
    made = []

    def make(**section):
        def path(name):
            return f"{plugins}:{name}" if name in PLUGINS else name

        named = {
            k: [path(n) for n in v] if isinstance(v, list) else path(v)
            for k, v in section.items()
            if isinstance(v, (str, list))
        }
        made.append(Responders(MultiTurnSection(**dict(timeout=5.0, workers=1) | section | named), plugins.parent))
        return made[-1]

    yield make
    for one in made:
        one.close()


def conversation(number=0, content="hm", **columns):
    made = Conversation(Prompt(number, (1,), "hi", columns), number, number, [{"role": "user", "content": "hi"}], 100)
    made.messages, made.turns = [{"role": "assistant", "content": content}], [Turn(0, 0)]
    return made


def each(method, conversations, *arguments):
    """The results of a coroutine of `Responders` for each conversation, all at once."""

    async def run():
        return await asyncio.gather(*map(method, conversations, *arguments))

    return asyncio.run(run())


def turn_rewards(dialogue):
    return tuple(turn.reward for turn in dialogue.turns)


def call(name, **arguments):
    return {"name": name, "arguments": arguments}


def contents(messages):
    return [m["content"] for m in messages]


# ---------------------------------------------------------------------------------------------------------------- tools


def test_tools_answer_in_order_and_failures_are_told_and_counted(responders):
    table, one, two = (
        responders(tools=["divide", "slowly", "calculator"], timeout=2.0),
        conversation(0),
        conversation(1),
    )
    calls = [
        [call("divide", a=1, b=2), call("divide", a=1, b=0), call("calculator", expression="6 * 7")],
        [
            call("slowly", seconds=0.1),
            call("slowly", seconds=60),
            call("no_tool"),
            call("divide", a=1),
            {"error": "the tool call is not valid JSON"},
        ],
    ]
    begun = time.monotonic()
    first, second = each(table.use_tools, [one, two], calls)
    assert time.monotonic() - begun < 20
    assert contents(first) == ["0.5", '{"error": "division by zero"}', "42"]
    assert [(m["role"], m["name"]) for m in first] == [("tool", "divide"), ("tool", "divide"), ("tool", "calculator")]
    told = contents(second)
    assert (
        told[0] == '{"waited": 0.1}'
        and "no answer in time" in told[1]
        and "unknown tool no_tool; known: divide" in told[2]
    )
    assert (
        "missing 1 required positional argument" in told[3]
        and told[4] == '{"error": "the tool call is not valid JSON"}'
    )
    assert [(len(c.turns[-1].calls), c.turns[-1].failures) for c in (one, two)] == [(3, 1), (5, 4)]
    assert not one.ended and not two.ended  # the policy may retry


# --------------------------------------------------------------------------------------------------------- environments


def test_each_response_has_an_environment_of_its_own(responders):
    table = responders(environment="Counter")
    assert [s["function"]["name"] for s in table.tools] == ["add", "die", "hang", "pause"] and table.reward_names == [
        "Counter"
    ]
    three = [conversation(i, goal=10.0, greeting=f" Hello {i}." if i else None) for i in range(3)]
    assert each(table.begin, three) == [None, " Hello 1.", " Hello 2."]
    each(table.use_tools, three, [[call("add", amount=i + 1)] for i in range(3)])
    told = each(table.use_tools, three, [[call("add", amount=1), call("add", amount=1)] for _ in range(3)])
    assert [[text.split()[0] for text in contents(m)] for m in told] == [["2", "3"], ["3", "4"], ["4", "5"]]
    processes = {int(text.split()[-1]) for m in told for text in contents(m)}
    assert len(processes) == 3
    each(table.finish, three)
    assert [c.rewards for c in three] == [{"Counter": 0.3}, {"Counter": 0.4}, {"Counter": 0.5}]
    assert not any(map(psutil.pid_exists, processes))


@pytest.mark.parametrize(("method", "reason"), [("hang", "no answer in time"), ("die", "its process died")])
def test_an_environment_that_hangs_or_dies_costs_its_own_response_only(responders, caplog, method, reason):
    table = responders(environment="Counter", timeout=1.0, workers=1)
    both = [conversation(i, goal=2.0) for i in range(2)]
    each(table.begin, both)
    with caplog.at_level(logging.WARNING):
        first, second = each(table.use_tools, both, [[call(method), call("add", amount=1)], [call("add", amount=1)]])
    assert reason in contents(first)[0] and "its process has ended" in contents(first)[1]
    assert (both[0].ended, both[1].ended) == ("failed", "") and contents(second)[0].startswith("1 in")
    assert f"response 0 to prompt 0 failed (counted in multi_turn/failures): {reason}" in caplog.text
    each(table.finish, both)
    assert [c.rewards for c in both] == [{"Counter": 0.0}, {"Counter": 0.5}] and both[1].ended == ""


@pytest.mark.parametrize("failure", ["reset", "tool", "step"])
def test_an_environment_that_fails_while_its_process_lives_gives_no_reward(responders, failure):
    """Else a policy may be rewarded for what broke the environment. The first failure is the cause that is counted."""
    table, one = responders(environment="Generous", workers=1), conversation(0, failure=failure)
    each(table.begin, [one])
    if failure == "tool":
        each(table.use_tools, [one], [[call("look")]])
    elif failure == "step":
        one.note(reward=3.0)  # of an earlier turn
        each(table.schedule, [one])
    assert (one.ended, one.cause) == ("failed", "raised")
    each(table.finish, [one])
    assert one.rewards == {"Generous": 0.0, "turns": 0.0} and one.cause == "raised"


def test_the_first_cause_of_a_failure_is_counted(responders):
    table, one = responders(environment="Counter", timeout=1.0, workers=1), conversation(0, goal=2.0)
    each(table.begin, [one])
    each(table.use_tools, [one], [[call("hang"), call("add", amount=1)]])
    each(table.finish, [one])
    assert (one.ended, one.cause, one.rewards) == ("failed", "timeout", {"Counter": 0.0})


@pytest.mark.parametrize("what", ["generator", "keys"])
def test_a_result_without_json_is_an_error_of_its_call(responders, what):
    table, one = responders(tools=["unreadable"]), conversation(0)
    ((told,),) = each(table.use_tools, [one], [[call("unreadable", what=what)]])
    assert '{"error": "' in told["content"] and "0x" not in told["content"] and one.turns[-1].failures == 1
    assert not one.ended


def test_a_slow_environment_delays_no_other_one_although_they_share_a_worker(responders):
    table = responders(environment="Counter", workers=1, timeout=30.0)
    many = [conversation(i, goal=1.0) for i in range(4)]
    each(table.begin, many)
    ended = []

    async def use(one, seconds):
        await table.use_tools(one, [call("pause", seconds=seconds)])
        ended.append(one.number)

    each(use, many, [3.0, 0.2, 0.1, 0.0])
    assert ended[-1] == 0 and len(ended) == 4


def test_a_reset_that_fails_breaks_off_its_response_only(responders):
    table = responders(environment="Counter")
    both = [conversation(0, goal=1.0), conversation(1)]  # the second row does not have the column
    assert each(table.begin, both) == [None, None] and [c.ended for c in both] == ["", "failed"]


def test_episodes_die_with_their_worker_and_a_killed_worker_is_noticed_at_once(responders):
    table = responders(environment="Counter", workers=1, timeout=60.0)
    (one,) = [conversation(goal=1.0)]
    each(table.begin, [one])
    (messages,) = each(table.use_tools, [one], [[call("add", amount=1)]])
    episode = psutil.Process(int(messages[0]["content"].split()[-1]))
    os.kill(episode.ppid(), signal.SIGKILL)
    begun = time.monotonic()
    each(table.use_tools, [one], [[call("add", amount=1)]])
    assert one.ended == "failed" and time.monotonic() - begun < 30
    psutil.wait_procs([episode], timeout=10)
    assert not episode.is_running()


@for_each(
    ("section", "problem"),
    [
        (dict(environment="NoReset"), "`NoReset` must be a class with a method `reset`"),
        (dict(environment="divide"), "`divide` must be a class with a method `reset`"),
        (dict(scheduler="NoReset"), "the class `NoReset` must have a method `step`"),
        (
            dict(scheduler="ask_again", scheduler_args={"mor": "x"}),
            "`ask_again` has no argument `mor`; its arguments: messages, turn",
        ),
        (dict(tools=["divide", "divide"]), "two tools are named `divide`"),
        (
            dict(tools=["calculater"]),
            r"multi_turn.tools.0: `calculater` is not a known tool; did you mean `calculator`\?; known: calculator",
        ),
        (
            dict(scheduler="math_tip"),
            "multi_turn.scheduler: `math_tip` is not a known scheduler; did you mean `math_tip_trick`",
        ),
        (
            dict(environment="Board"),
            "multi_turn.environment: `Board` is not a known environment; give it as package.module:name",
        ),
        (dict(tools=["nowhere.py:f"]), "multi_turn.tools.0: no file .*nowhere.py"),
    ],
)
def test_what_cannot_be_used_is_refused_before_training(responders, section, problem):
    with pytest.raises(ValueError, match=problem):
        responders(**section)


def test_a_tool_that_its_file_does_not_define_is_refused(responders, plugins):
    with pytest.raises(ValueError, match="has no function or class `nothing`"):
        responders(tools=[f"{plugins}:nothing"])


# ----------------------------------------------------------------------------------------------------------- schedulers


@pytest.mark.parametrize(
    ("scheduler", "reason"),
    [("raises", "KeyError: 'no such thing'"), ("hangs", "no answer in time"), ("silent", "TypeError")],
    ids=["raises", "hangs", "silent"],
)
def test_a_scheduler_that_fails_ends_the_response_and_the_run_goes_on(responders, caplog, scheduler, reason):
    table, both = responders(scheduler=scheduler, timeout=1.0), [conversation(0), conversation(1)]
    each(table.begin, both)
    with caplog.at_level(logging.WARNING):
        assert each(table.schedule, both) == [None, None]
    assert [c.ended for c in both] == ["failed", "failed"]
    assert reason in caplog.text and caplog.text.count("failed (counted in") == 1
    each(table.finish, both)
    assert [c.rewards for c in both] == [{"turns": 0.0}] * 2


def test_a_scheduler_that_is_a_class_remembers(responders):
    table, both = responders(scheduler="Patient", scheduler_args={"limit": 2}), [conversation(0), conversation(1)]
    assert each(table.begin, both) == [None, None] and table.reward_names == ["turns", "Patient"]
    first, second = each(table.schedule, both), each(table.schedule, both[:1])
    assert [(m[-1]["content"], done) for m, done, _ in first + second] == [
        ("asked 1", False),
        ("asked 1", False),
        ("asked 2", True),
    ]
    each(table.finish, both)
    assert [c.rewards for c in both] == [{"Patient": 20.0, "turns": None}, {"Patient": 10.0, "turns": None}]


REFUSED = {
    "inf": "it returned inf, which is not finite",
    "nan": "it returned nan, which is not finite",
    "text": "it returned a str, '1'; a reward must be a number or None",
    "list": "it returned a list, [1.0]; a reward must be a number or None",
    "large": "it returned 1e+300; it must lie within ±1e+15",
}
GIVEN = {"numpy": 0.5, "true": 1.0, "none": None}


def test_the_reward_of_an_environment_passes_the_checks_of_a_reward_function(responders, caplog):
    table, asked = (
        responders(environment="Odd", workers=1),
        [conversation(i, kind=kind) for i, kind in enumerate((*REFUSED, *GIVEN))],
    )
    for one in asked:
        table.log_next_failure()
        each(table.begin, [one])
        each(table.finish, [one])
    assert [c.rewards["Odd"] for c in asked] == [*[0.0] * len(REFUSED), *GIVEN.values()]
    assert [c.ended for c in asked] == ["failed"] * len(REFUSED) + [""] * len(GIVEN)
    said = [record.getMessage() for record in caplog.records]
    for i, (text, reason) in enumerate(zip(said, REFUSED.values(), strict=True)):
        assert f"response {i} to prompt {i} failed" in text and f"`Odd.get_reward`: {reason}" in text


def test_the_reward_of_a_turn_and_the_sum_of_turns_pass_the_same_checks(responders, caplog):
    table, asked = (
        responders(scheduler="odd_turn", workers=1),
        [conversation(i, kind=kind) for i, kind in enumerate((*REFUSED, *GIVEN))],
    )
    for one, reason in zip(asked, (*REFUSED.values(), *[None] * len(GIVEN)), strict=True):
        table.log_next_failure()
        each(table.begin, [one])
        caplog.clear()
        (answer,) = each(table.schedule, [one])
        assert (answer is None) == (reason is not None) and f"the reward of `odd_turn`: {reason}" * (
            reason is not None
        ) in caplog.text
        one.note(reward=answer and answer[2])
    each(table.finish, asked)
    assert [c.rewards["turns"] for c in asked] == [*[0.0] * len(REFUSED), *GIVEN.values()]
    asked = [conversation(i, kind="large") for i in range(2)]
    table.log_next_failure()
    asked[0].turns, asked[1].turns = [Turn(0, 0, 8e14)] * 2, [Turn(0, 0, 8e14), Turn(0, 0)]
    each(table.finish, asked)
    assert [c.rewards["turns"] for c in asked] == [0.0, 8e14] and [c.ended for c in asked] == ["failed", ""]
    assert "the sum of its turns' rewards: it returned 1.6e+15" in caplog.text


RIGHT, WRONG = "<think>so</think><answer>$7$</answer>", "<think>so\nno</think>\n<answer>$8$</answer>"


def test_the_tips_of_ms_swift_are_given_once_and_word_for_word(responders):
    trick, verdict = (responders(workers=1, scheduler=name) for name in ("math_tip_trick", "math_tip_trick_multi_turn"))
    asked = [
        conversation(i, text, solution="$7$")
        for i, text in enumerate((RIGHT, WRONG, "no tag", "x But wait... It seems I made a mistake,"))
    ]
    right, wrong, plain, again = each(trick.schedule, asked)
    assert right[1] and again[1]
    assert not wrong[1] and wrong[0][-1]["content"] == "<think>so\nnoBut wait... It seems I made a mistake,"
    assert plain[0][-1]["content"] == "no tagBut wait... It seems I made a mistake," and len(wrong[0]) == len(
        asked[1].all_messages
    )
    asked[3].opening[-1] = {
        "role": "user",
        "content": "The answer is not correct, It seems You made a mistake, you need to recheck very carefully.",
    }
    right, wrong, plain, again = each(verdict.schedule, asked)
    assert right[1] and again[1] and not wrong[1]
    assert wrong[0] == [*asked[1].all_messages, asked[3].opening[-1]] == plain[0][:1] + wrong[0][1:]
    (unknown,) = each(trick.schedule, [conversation(0, WRONG, solution=" ")])
    assert unknown[1]  # an empty solution cannot prove the answer wrong


def gym_row():
    from reasoning_gym import create_dataset

    import megagrpo.rewards.functions.gym_score  # noqa: F401  # which silences warnings from reasoning-gym's import

    entry = create_dataset("basic_arithmetic", size=1, seed=3)[0]
    return {name: entry[name] for name in ("question", "answer", "metadata")}


@pytest.mark.full
def test_reasoning_gym_gives_attempts_and_rewards_the_last(responders):
    table, row = (
        responders(workers=1, scheduler="reasoning_gym", scheduler_args={"attempts": 2, "discount": 0.5}),
        gym_row(),
    )
    one, two = (conversation(i, "<answer>99999</answer>", **row) for i in range(2))
    each(table.begin, [one, two])
    for messages, done, reward in each(table.schedule, [one, two]):
        assert messages[-1] == {"role": "user", "content": "That is not correct. Try again."} and (done, reward) == (
            False,
            0.0,
        )
    one.messages = [{"role": "assistant", "content": f"<answer>{row['answer']}</answer>"}]
    one.turns, two.turns = [Turn(0, 0)] * 2, [Turn(0, 0)] * 2
    assert [answer[1:] for answer in each(table.schedule, [one, two])] == [
        (True, 0.5),
        (True, pytest.approx(0, abs=0.02)),
    ]


# -------------------------------------------------------------------------------------------------- whole conversations


class Scripted:
    """An engine whose k-th turn of each response is the k-th line of its script, and the session that it opens."""

    def __init__(self, tokenizer, script):
        self.tokenizer, self.script = tokenizer, script
        self.weight_version, self.requests = 4, []  # by turn: prompts, sampling, seeds
        self.seeds = []  # in order

    def converse(self, prompts, n, respond, on_begun):
        async def one(index, number):
            home = SimpleNamespace(granted=asyncio.sleep(0), turns=0, first=None, queued=0.0)
            return await respond(self, home, index, number)

        async def all_of(index):
            return index, list(await asyncio.gather(*(one(index, number) for number in range(n))))

        async def run():
            return [await group for group in asyncio.as_completed([all_of(i) for i in range(len(prompts))])]

        yield from asyncio.run(run())

    async def turn(self, prompt, sampling, seed, home, on_tokens=None):
        if prompt.token_ids == home.first:  # another attempt
            home.turns = 0
        home.first = home.first or prompt.token_ids
        if len(self.requests) == home.turns:
            self.requests.append(([], [], []))
        for values, value in zip(self.requests[home.turns], (prompt, sampling, seed), strict=True):
            values.append(value)
        self.seeds.append(seed)
        home.turns += 1
        return self._turn(prompt, sampling, home.turns - 1)

    is_cutting = False

    def is_cut(self, prompt):
        return self.is_cutting

    async def read_tool_calls(self, turn, tools, home):
        """Parse tool calls like a server with its own format: NAME{...} is a call."""
        name, _, rest = self.tokenizer.decode(turn).partition("{")
        names = {tool["function"]["name"] for tool in tools}
        return ("", [{"name": name, "arguments": "{" + rest}]) if name in names else (name, [])

    def _turn(self, prompt, params, turn):
        ids = [*self.tokenizer.encode(self.script[turn], False), 2]
        reason = "length" if len(ids) > params.max_tokens else "stop"
        ending = find_ending(ids[: params.max_tokens], self.tokenizer.decode, params.stop, params.include_stop)
        ids, reason = tuple(ids[: ending.num_tokens]), "stop" if ending.stop_string else reason
        stop_string = ending.stop_string if params.stop else None
        return Rollout(
            prompt, ids, (-0.5,) * len(ids), reason, self.weight_version, ending.text, stop_string=stop_string
        )


@pytest.fixture(scope="module")
def tokenizer(chat_folder):  # noqa: F811
    return load_tokenizer(chat_folder)


def dialogue_engine(tokenizer, table, script, max_response_length=None):
    follow_ups = FollowUps(tokenizer, HERMES, table.tools, users=table.has_scheduler)
    dialogues = Dialogues(table, tokenizer, follow_ups, 1000, max_response_length, chat_template=HERMES)
    return dialogues.wrap(Scripted(tokenizer, script))


def prompts_of(tokenizer, table, *columns):
    ids = tokenizer.render("What is 6 * 7?", None, HERMES, table.tools)
    return [Prompt(i, ids, "What is 6 * 7?", dict(row)) for i, row in enumerate(columns)]


CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6 * 7"}}\n</tool_call>'


def test_a_tool_is_called_and_the_policy_goes_on_from_its_own_tokens(tokenizer, responders):
    table = responders(tools=["calculator"])
    engine = dialogue_engine(tokenizer, table, [f"Hm. {CALL}", "It is 42."])
    twice = numbered(prompts_of(tokenizer, table, {}) * 2)
    told = list(engine.groups(twice, 2, SamplingParams(1.0, 300, (2,)), 5))
    groups = [group for _, group in sorted(told)]
    first, second = engine.engine.requests
    assert len(first[0]) == len(second[0]) == 4 and len({*first[2], *second[2]}) == 8  # every turn has its own seed
    rollout = groups[1][0]
    before = second[0][2].token_ids
    assert before == (*rollout.prompt.token_ids, *rollout.response_ids[: len(before) - len(rollout.prompt.token_ids)])
    assert tokenizer.tokenizer.decode(
        [t for t, own in zip(rollout.response_ids, rollout.written, strict=True) if own]
    ) == (f"Hm. {CALL}<|im_end|>It is 42.<|im_end|>")
    foreign = [t for t, own in zip(rollout.response_ids, rollout.written, strict=True) if not own]
    assert tokenizer.tokenizer.decode(foreign) == (
        "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert [params.max_tokens for params in second[1]] == [
        300 - (len(rollout.response_ids) - len(tokenizer.encode("It is 42.", False)) - 1)
    ] * 4
    assert rollout.dialogue.messages == (
        {
            "role": "assistant",
            "content": "Hm.",
            "tool_calls": [{"type": "function", "function": call("calculator", expression="6 * 7")}],
        },
        {"role": "tool", "name": "calculator", "content": "42"},
        {"role": "assistant", "content": "It is 42."},
    )
    assert (rollout.finish_reason, rollout.dialogue.ended, rollout.weight_version, rollout.dialogue.tool_calls) == (
        "stop",
        "done",
        4,
        1,
    )
    assert sorted(index for index, _ in told) == [0, 1]
    again = dialogue_engine(tokenizer, table, [f"Hm. {CALL}", "It is 42."])
    again.generate(twice, 2, SamplingParams(1.0, 300, (2,)), 5)
    assert [sorted(request[2]) for request in again.engine.requests] == [sorted(first[2]), sorted(second[2])]


@pytest.mark.parametrize(
    ("turn", "roles"), [(CALL, ["assistant"]), (f"Hm.</think>{CALL}", ["assistant", "tool", "assistant"])]
)
def test_a_call_in_a_thought_that_the_template_opened_does_not_run(tokenizer, responders, turn, roles):
    table = responders(tools=["calculator"])
    prompts = [replace(prompt, opened="<think>\n") for prompt in prompts_of(tokenizer, table, {})]
    engine = dialogue_engine(tokenizer, table, [turn, "42"])
    ((rollout,),) = engine.generate(prompts, 1, SamplingParams(1.0, 300, (2,)), 5)
    assert [message["role"] for message in rollout.dialogue.messages] == roles


def test_half_a_character_in_a_call_does_not_end_the_run(tokenizer, responders):
    """JSON may escape one half of a surrogate pair, which no tokenizer encodes."""
    table = responders(tools=["calculator"])
    script = [r'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>', CALL.replace("6 * 7", r"\udfff"), "No."]
    engine = dialogue_engine(tokenizer, table, script)
    ((rollout,),) = engine.generate(prompts_of(tokenizer, table, {}), 1, SamplingParams(1.0, 400, (2,)), 5)
    unknown, invalid = [m["content"] for m in rollout.dialogue.messages if m["role"] == "tool"]
    assert "unknown tool ?; known: calculator" in unknown and "error" in invalid and rollout.dialogue.ended == "done"


@pytest.mark.parametrize(("stop", "include"), [("</tool_call>", True), ("</tool_call>", False), ("}}", False)])
def test_a_turn_that_a_stop_string_ends_is_closed_by_the_template_and_a_call_is_read_whole(
    tokenizer, responders, stop, include
):
    table = responders(tools=["calculator"])
    engine = dialogue_engine(tokenizer, table, [f"Hm. {CALL} and more", "It is 42. Done. More"])
    sampling = SamplingParams(1.0, 300, (2,), stop=(stop, "Done."), include_stop=include)
    ((rollout,),) = engine.generate(prompts_of(tokenizer, table, {}), 1, sampling, 5)
    decode = tokenizer.tokenizer.decode
    call = CALL[: CALL.index(stop) + len(stop)]
    assert (
        decode([t for t, own in zip(rollout.response_ids, rollout.written, strict=True) if own])
        == f"Hm. {call}It is 42. Done."
    )
    foreign = [t for t, own in zip(rollout.response_ids, rollout.written, strict=True) if not own]
    answer = "<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert decode(foreign) == f"<|im_end|>\n{answer}" and foreign[0] == 2
    assert [m["content"] for m in rollout.dialogue.messages] == [
        "Hm.",
        "42",
        "It is 42. Done." if include else "It is 42. ",
    ]
    assert (rollout.finish_reason, rollout.stop_string, rollout.dialogue.ended) == ("stop", "Done.", "done")


def test_a_scheduler_goes_on_after_a_stop_string_and_may_replace_it(tokenizer, responders):
    table = responders(scheduler="math_tip_trick")
    engine = dialogue_engine(tokenizer, table, ["The sum is 4.<end> x", "No, 42."])
    sampling = SamplingParams(1.0, 300, (2,), stop=("<end>",), include_stop=False)
    ((rollout,),) = engine.generate(prompts_of(tokenizer, table, {"solution": "42"}), 1, sampling, 5)
    first, *_ = rollout.dialogue.messages
    assert (
        first["content"].startswith("The sum is 4.") and "<end>" not in first["content"] and rollout.stop_string == ""
    )


def test_a_conversation_continues_with_its_rows_variables(tokenizer, responders):
    template = HERMES + "{% if add_generation_prompt and not think %}<think>\n\n</think>{% endif %}"
    table = responders(tools=["calculator"])
    follow_ups = FollowUps(tokenizer, template, table.tools, users=False)
    engine = Dialogues(table, tokenizer, follow_ups, 1000, chat_template=template).wrap(
        Scripted(tokenizer, [CALL, "It is 42."])
    )
    prompts = [replace(p, template_kwargs={"think": i}) for i, p in enumerate(prompts_of(tokenizer, table, {}, {}))]
    texts = [
        tokenizer.tokenizer.decode(group[0].response_ids)
        for group in engine.generate(prompts, 1, SamplingParams(1.0, 300, (2,)), 5)
    ]
    assert [text.count("assistant\n<think>\n\n</think>It is 42.") for text in texts] == [1, 0]


def test_a_row_whose_variables_make_the_template_forget_breaks_off_its_own_response_only(tokenizer, responders, caplog):
    template = HERMES.replace("+ message.content }}", "+ (message.content if loop.last or not forget else '') }}", 1)
    table = responders(tools=["calculator"])
    follow_ups = FollowUps(tokenizer, template, table.tools, users=False)
    engine = Dialogues(table, tokenizer, follow_ups, 1000, chat_template=template).wrap(
        Scripted(tokenizer, [CALL, "It is 42."])
    )
    prompts = [replace(p, template_kwargs={"forget": i}) for i, p in enumerate(prompts_of(tokenizer, table, {}, {}))]
    with caplog.at_level(logging.WARNING):
        ((one,), (two,)) = engine.generate(prompts, 1, SamplingParams(1.0, 300, (2,)), 5)
    assert (one.dialogue.ended, two.dialogue.ended) == ("done", "failed")
    assert "changes an assistant's turn when a tool message follows it" in caplog.text


def test_calls_can_be_read_by_the_engine(tokenizer, responders):
    table = responders(tools=["calculator"], tool_parser="vllm:mine")
    engine = dialogue_engine(
        tokenizer, table, ['calculator{"expression": "6 * 7"}', 'calculator{"expression', "It is 42."]
    )
    ((rollout,),) = engine.generate(prompts_of(tokenizer, table, {}), 1, SamplingParams(1.0, 300), 0)
    assert [m["content"] for m in rollout.dialogue.messages[1::2]] == ["42", rollout.dialogue.messages[3]["content"]]
    assert "the arguments of calculator are not valid JSON" in rollout.dialogue.messages[3]["content"]
    assert (rollout.dialogue.tool_calls, rollout.dialogue.tool_failures, rollout.dialogue.ended) == (2, 1, "done")


@pytest.mark.parametrize(
    ("section", "turns", "ended"),
    [
        (dict(max_tool_calling_iterations=1), 2, "tool_limit"),
        (dict(max_turns=1), 1, "max_turns"),
        (dict(max_turns=3), 3, "max_turns"),
    ],
    ids=str,
)
def test_limits_end_a_response_with_its_last_call_unanswered(tokenizer, responders, section, turns, ended):
    table = responders(tools=["calculator"], **section)
    ((rollout,),) = dialogue_engine(tokenizer, table, [CALL] * 4).generate(
        prompts_of(tokenizer, table, {}), 1, SamplingParams(1.0, 900), 0
    )
    dialogue = rollout.dialogue
    assert (len(dialogue.turns), dialogue.ended, dialogue.tool_calls, rollout.finish_reason) == (
        turns,
        ended,
        turns - 1,
        "stop",
    )
    assert rollout.written[-1] and dialogue.messages[-1]["tool_calls"]


@pytest.mark.parametrize(
    ("limit", "whole", "ended", "reason"),
    [
        (40, None, "length", "length"),
        (100, None, "budget", "stop"),
        (170, None, "length", "length"),
        (90, 400, "done", "stop"),
    ],
)
def test_limits_in_tokens_are_of_the_whole_response_or_of_each_turn(tokenizer, responders, limit, whole, ended, reason):
    table = responders(tools=["calculator"], **(dict(max_response_length=whole) if whole else {}))
    script = [CALL, "It is 42, as everybody will be able to see who computes it."]
    engine = dialogue_engine(tokenizer, table, script, whole)
    ((rollout,),) = engine.generate(prompts_of(tokenizer, table, {}), 1, SamplingParams(1.0, limit), 0)
    assert (rollout.dialogue.ended, rollout.finish_reason) == (ended, reason), len(rollout.response_ids)
    assert len(rollout.response_ids) <= (whole or limit) and (ended != "length" or len(rollout.response_ids) == limit)
    assert rollout.written[-1]  # a tool message without room for a response is removed
    if whole:
        assert [params[0].max_tokens for _, params, _ in engine.engine.requests] == [90, 90]


def test_the_middle_of_a_long_result_is_left_out_and_counted(tokenizer, responders):
    table = responders(tools=["megabyte"], max_result_chars=20, timeout=30.0)
    script = ['<tool_call>{"name": "megabyte", "arguments": {"size": 4000000}}</tool_call>', "Long."]
    engine = dialogue_engine(tokenizer, table, script)
    ((rollout,),) = engine.generate(prompts_of(tokenizer, table, {}), 1, SamplingParams(1.0, 900), 0)
    note = "[... 3999980 of 4000000 characters left out ...]"
    assert rollout.dialogue.messages[1]["content"] == f"aaaaaaaaaa\n{note}\nzzzzzzzzzz"
    assert (rollout.dialogue.tool_shortened, rollout.dialogue.tool_failures, rollout.dialogue.ended) == (1, 0, "done")


@pytest.mark.parametrize(
    ("tool", "ended"), [("slowly", ("time_limit", "")), ("pause", ("failed", "timeout"))], ids=["tool", "environment"]
)
def test_a_conversation_that_takes_too_long_ends_with_its_complete_turns(tokenizer, responders, tool, ended):
    """An environment whose call is under way cannot be judged."""
    table = responders(tools=["slowly"], environment="Counter", max_seconds=1.5, timeout=30.0)
    engine = dialogue_engine(
        tokenizer, table, [f'<tool_call>{{"name": "{tool}", "arguments": {{"seconds": 25}}}}</tool_call>']
    )
    begun = time.monotonic()
    ((rollout,),) = engine.generate(prompts_of(tokenizer, table, {"goal": 1.0}), 1, SamplingParams(1.0, 900), 0)
    assert (rollout.dialogue.ended, rollout.dialogue.cause) == ended and len(rollout.dialogue.turns) == 1
    assert time.monotonic() - begun < 20 and rollout.written.all() and rollout.dialogue.rewards == {"Counter": 0.0}


@pytest.mark.parametrize(
    ("where", "retries", "ended"),
    usual(
        [(where, *end) for where in ("reset", "look", "get_reward") for end in ((1, "failed"), (2, "done"))], 2, 3, 5
    ),
)
def test_a_response_whose_environment_fails_is_held_again_and_equals_one_without_failures(
    tokenizer, responders, tmp_path, monkeypatch, where, retries, ended
):
    monkeypatch.setattr(dialogues, "RETRY_SECONDS", 0.01)
    table = responders(environment="Flaky", retries=retries)
    script = ['<tool_call>{"name": "look", "arguments": {}}</tool_call>', "Seen."]

    def respond(times):
        (tmp_path / "failures").write_text("")
        row = {"failures": str(tmp_path / "failures"), "times": times, "where": where}
        engine = dialogue_engine(tokenizer, table, script)
        ((rollout,),) = engine.generate(prompts_of(tokenizer, table, row), 1, SamplingParams(1.0, 300), 0)
        return rollout, engine.engine.seeds

    (failed, _), (sound, seeds) = respond(2), respond(0)
    dialogue = failed.dialogue
    assert (dialogue.ended, dialogue.retries, dialogue.cause) == (ended, retries, "" if ended == "done" else "died")
    if ended == "done":
        assert replace(failed, prompt=sound.prompt, dialogue=replace(dialogue, retries=0)) == sound
        assert respond(1)[1][-len(seeds) :] == seeds and dialogue.rewards == {"Flaky": 1.0}


def test_a_response_that_fails_after_its_step_was_cut_is_not_held_again(tokenizer, responders, tmp_path):
    (tmp_path / "failures").write_text("")
    row = {"failures": str(tmp_path / "failures"), "times": 1, "where": "reset"}
    table = responders(environment="Flaky", retries=2)
    engine = dialogue_engine(tokenizer, table, ["Seen."])
    engine.engine.is_cutting = True
    ((rollout,),) = engine.generate(prompts_of(tokenizer, table, row), 1, SamplingParams(1.0, 300), 0)
    assert (rollout.dialogue.ended, rollout.dialogue.retries) == ("failed", 0)


def test_a_scheduler_asks_until_it_is_satisfied_and_its_rewards_add_up(tokenizer, responders):
    table = responders(scheduler="ask_again", scheduler_args={"more": "Really?"})
    script = ["41", "", "42", "43"]
    both = dialogue_engine(tokenizer, table, script).generate(
        prompts_of(tokenizer, table, {"answer": "42"}, {"answer": "41"}), 1, SamplingParams(1.0, 300), 0
    )
    slow, quick = (group[0].dialogue for group in both)
    assert [m["content"] for m in slow.messages] == ["41", "Really?", "", "Really?", "42"]
    assert (turn_rewards(slow), slow.rewards, slow.ended) == ((0.5, None, 1.0), {"turns": 1.5}, "done")
    assert turn_rewards(quick) == (1.0,)


def test_the_last_turn_is_still_judged(tokenizer, responders):
    table = responders(scheduler="ask_again", max_turns=2)
    ((rollout,),) = dialogue_engine(tokenizer, table, ["1", "2"]).generate(
        prompts_of(tokenizer, table, {"answer": "9"}), 1, SamplingParams(1.0, 300), 0
    )
    assert (rollout.dialogue.ended, turn_rewards(rollout.dialogue)) == ("max_turns", (0.5, 0.5))


def test_a_scheduler_that_rewrites_history_breaks_off_with_a_warning(tokenizer, responders, caplog):
    table = responders(scheduler="forgets")
    with caplog.at_level(logging.WARNING):
        ((rollout,),) = dialogue_engine(tokenizer, table, ["1"]).generate(
            prompts_of(tokenizer, table, {}), 1, SamplingParams(1.0, 99), 0
        )
    assert rollout.dialogue.ended == "failed" and "changed earlier messages" in caplog.text and rollout.length == 2


def test_a_message_of_the_policy_goes_on_with_a_doubt(tokenizer, responders):
    table = responders(scheduler="math_tip_trick")
    ((rollout,),) = dialogue_engine(tokenizer, table, [WRONG, " </think><answer>$7$</answer>"]).generate(
        prompts_of(tokenizer, table, {"solution": "$7$"}), 1, SamplingParams(1.0, 300), 0
    )
    assert [m["role"] for m in rollout.dialogue.messages] == ["assistant"] and len(rollout.dialogue.turns) == 2
    assert rollout.text == "<think>so\nnoBut wait... It seems I made a mistake, </think><answer>$7$</answer>"
    assert "But wait" in tokenizer.decode(
        [t for t, own in zip(rollout.response_ids, rollout.written, strict=True) if not own]
    )


def test_what_reset_says_is_at_the_end_of_the_prompt(tokenizer, responders):
    table = responders(environment="Counter")
    rows = [{"goal": 4.0, "greeting": " Count!"}, {"goal": 4.0}, {"goal": 4.0, "greeting": " Count!" * 200}]
    script = ['<tool_call>{"name": "add", "arguments": {"amount": 3}}</tool_call>', "Done."]
    engine = dialogue_engine(tokenizer, table, script)
    plain = prompts_of(tokenizer, table, *rows)
    (said,), (unsaid,), (long,) = engine.generate(plain, 1, SamplingParams(1.0, 300), 0)
    assert said.prompt.messages == "What is 6 * 7? Count!"
    assert said.prompt.token_ids == tokenizer.render("What is 6 * 7? Count!", None, HERMES, table.tools)
    assert unsaid.prompt.token_ids == plain[1].token_ids == long.prompt.token_ids
    assert said.dialogue.rewards == unsaid.dialogue.rewards == {"Counter": 0.75} and said.dialogue.messages[1][
        "content"
    ].startswith("3 in")
    assert (long.dialogue.ended, len(long.dialogue.turns)) == ("failed", 1)  # its prompt would be too long


class OutsideOfLoops:
    """A tokenizer whose work on a long text fails in an event loop, in which other conversations wait for their turns.
    `count` is how often it got one."""

    def __init__(self, tokenizer):
        self._tokenizer, self.count = tokenizer, 0

    def __getattr__(self, name):
        value = getattr(self._tokenizer, name)
        if name not in ("encode", "decode", "render", "rendered", "apply_template"):
            return value

        def work(what, *args, **options):
            if len(str(what)) > 2 * INLINE_SIZE:
                self.count += 1
                with pytest.raises(RuntimeError, match="no running event loop"):
                    asyncio.get_running_loop()
            return value(what, *args, **options)

        return work


LONG = "so " * 12_000
OF_LONG = '<tool_call>{"name": "megabyte", "arguments": {"size": 40000}}</tool_call>'


@pytest.mark.parametrize(
    ("section", "row", "script", "ended"),
    [
        ({"scheduler": "long"}, {"kind": "adds"}, ["Hm."], "budget"),
        ({"scheduler": "long"}, {"kind": "changes"}, ["Hm."], "budget"),
        ({"tools": ["megabyte"]}, {}, [OF_LONG, "Hm."], "done"),
        ({"environment": "Counter"}, {"goal": 1.0, "greeting": LONG}, ["Hm."], "failed"),
        ({"tools": ["calculator"]}, {}, [LONG], "done"),
        ({"tools": ["calculator"], "tool_parser": "vllm:mine", "max_turns": 1}, {}, [LONG], "max_turns"),
    ],
    ids=["message", "end of the turn", "tool", "reset", "turn", "failed parser"],
)
def test_no_long_text_is_rendered_or_tokenized_in_the_event_loop(tokenizer, responders, section, row, script, ended):
    async def fails(*_):
        raise ToolParserFailed("it raised")

    table, guarded = responders(**section, timeout=30.0), OutsideOfLoops(tokenizer)
    engine, ids = dialogue_engine(guarded, table, script), prompts_of(tokenizer, table, row)
    engine.engine.tokenizer, engine.engine.read_tool_calls = tokenizer, fails
    ((rollout,),) = engine.generate(ids, 1, SamplingParams(1.0, 50_000, (2,)), 0)
    assert rollout.dialogue.ended == ended and guarded.count


def dialogues_of(config, tokenizer, plugins, resources):
    section, names, limit = config.multi_turn, config.rewards.names, config.rollout.max_prompt_length
    return make_dialogues(section, config.data, names, limit, tokenizer, plugins.parent, resources)


@pytest.mark.parametrize(
    ("functions", "section", "problem"),
    [
        (
            [dict(function="format", name="turns")],
            dict(scheduler="ask_again"),
            "`turns` is already the name of a multi_turn reward",
        ),
        (
            [],
            dict(environment="Mute"),
            "the run has no rewards; name a function, or give the environment a method `get_reward`",
        ),
    ],
)
def test_rewards_must_have_names_of_their_own_and_a_source(tokenizer, plugins, functions, section, problem):
    named = {key: f"{plugins}:{name}" for key, name in section.items()}
    config = tiny_run(
        rewards=dict(functions=functions), multi_turn=named, data=dict(chat_template=HERMES, train=dict(source="none"))
    )
    with ExitStack() as resources, pytest.raises(ValueError, match=problem):
        dialogues_of(config, tokenizer, plugins, resources)


def test_what_a_configuration_describes_shows_its_tools_and_columns(tokenizer, plugins):
    values = dict(
        environment=f"{plugins}:Counter",
        tools=["calculator"],
        scheduler=f"{plugins}:Patient",
        scheduler_args={"limit": 1},
    )
    config = tiny_run(
        rewards=dict(functions=[]), multi_turn=values, data=dict(chat_template=HERMES, train=dict(source="none"))
    )
    with ExitStack() as resources:
        made = dialogues_of(config, tokenizer, plugins, resources)
        assert [tool["function"]["name"] for tool in made.tools] == ["calculator", "add", "die", "hang", "pause"]
        assert made.reward_names == ["Counter", "turns", "Patient"]
        assert dialogues_of(tiny_run(), tokenizer, plugins, resources) is None


def test_a_later_turn_keeps_the_inputs_of_its_prompt():
    image = {"pixels": [1.0]}
    made = Conversation(Prompt(0, (1,), "hi", inputs=image), 0, 0, [{"role": "user", "content": "hi"}], 100)
    made.ids = [7, 8]
    assert made.prefix.token_ids == (1, 7, 8) and made.prefix.inputs is image
