"""Adapters of other projects' environments, with the real packages and servers in processes of their own."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from runpy import run_path

import httpx
import psutil
import pytest

from megagrpo.config import MultiTurnSection, ProblemError
from megagrpo.environments.environment_registry import locate_environment, targets
from megagrpo.rewards.registry.reward_registry import undefined
from tests.distributed.suites import usual
from tests.unit.environments.test_environments import (  # noqa: F401 - a fixture
    call,
    conversation,
    each,
    gone,
    mine,
    responders,
    used,
)

ROOT = Path(__file__).parents[3]
GYMNASIUM = f"{ROOT}/configs/examples/frozen_lake/gymnasium_env.py:Gymnasium"


def say(one, text):
    """Add a turn of the policy."""
    one.messages.append({"role": "assistant", "content": text})
    one.turns.append(one.turns[-1])


def answered(table, one, text):
    """The answer to a turn: (last message, done, reward)."""
    say(one, text)
    ((messages, done, reward),) = each(table.schedule, [one])
    one.messages += messages[len(one.all_messages) :]
    return messages[-1]["content"], done, reward


def begun(table, *more, **columns):
    one = conversation(**columns)
    one.messages = []
    (text,) = each(table.begin, [one])
    assert not one.ended
    return one, text


def own_python(name, probe):
    """The Python of a package whose versions do not fit vLLM's: this one, or that of the folder `name` below
    MEGAGRPO_ADAPTERS (`make adapters`). Skips the test without one in which `probe` runs."""
    folder = Path(os.environ.get("MEGAGRPO_ADAPTERS", ROOT / ".adapters"))
    for python in (sys.executable, str(folder / name / "bin" / "python")):
        if os.path.exists(python) and not subprocess.run([python, "-c", probe], capture_output=True).returncode:
            return python
    pytest.skip(f"needs {name}, whose versions do not fit vLLM's: make adapters")


# ------------------------------------------------------------------------------------------------------------ Gymnasium


def test_gymnasium_frozen_lake_is_played_in_words(responders):  # noqa: F811
    pytest.importorskip("gymnasium")
    arguments = {"is_slippery": False, "actions": ["left", "down", "right", "up"], "show": "render", "invalid": -0.1}
    table = responders(GYMNASIUM, environment_args={"name": "FrozenLake-v1"} | arguments)
    assert table.tools == [] and table.reward_names == ["turns"]
    one, text = begun(table, seed=3)
    assert text == "\n[S]FFF\nFHFH\nFFFH\nHFFG"
    assert answered(table, one, "I go up, no: down")[1:] == (False, 0.0)
    assert answered(table, one, "hm") == ("That is not a valid action.", False, -0.1)
    for word in ("down", "right", "right", "Down"):
        assert answered(table, one, word)[1] is False
    assert answered(table, one, "right") == ("  (Right)\nSFFF\nFHFH\nFFFH\nHFF[G]", True, 1.0)
    for turn, reward in zip(range(-7, 0), (0, -0.1, 0, 0, 0, 0, 1.0), strict=True):
        one.turns[turn] = type(one.turns[turn])(0, 0, reward)
    each(table.finish, [one])
    assert one.rewards == {"turns": pytest.approx(0.9)}


def test_gymnasium_numbers_and_boxes():
    pytest.importorskip("gymnasium")
    Gymnasium = run_path(GYMNASIUM.rpartition(":")[0])["Gymnasium"]

    taxi = Gymnasium("Taxi-v4")
    first = taxi.reset(seed=1)
    assert first == Gymnasium("Taxi-v4").reset(seed=1) != taxi.reset(seed=2)
    actions = [taxi._action(text) for text in ("3 or 5", "7", "2.5", "none")]
    assert actions == [5, None, None, None]
    car = Gymnasium("MountainCarContinuous-v0")
    assert car._action("a force of 0.25").tolist() == [0.25] and car._action("-7").tolist() == [-1.0]
    assert car._action("none") is None
    with pytest.raises(ValueError, match=r"Taxi-v4 has 6 actions, but environment_args\.actions names 1"):
        Gymnasium("Taxi-v4", actions=["up"])


CLOSED_GAME = """
import gymnasium, os

class Closing(gymnasium.Env):
    action_space = observation_space = gymnasium.spaces.Discrete(2)

    def __init__(self, log):
        self.log = log

    def reset(self, seed=None, options=None):
        return 0, {}

    def close(self):
        with open(self.log, "a") as log:
            print("closed", file=log)

gymnasium.register("Closing-v0", Closing)
"""


def test_gymnasiums_own_close_is_called(responders, mine, tmp_path):  # noqa: F811
    pytest.importorskip("gymnasium")
    (mine.parent / "closing_game.py").write_text(CLOSED_GAME)
    arguments = {"name": "closing_game:Closing-v0", "log": str(tmp_path / "log")}
    table = responders(GYMNASIUM, environment_args=arguments)
    begun(table)
    table.close()
    assert (tmp_path / "log").read_text() == "closed\n"


# ------------------------------------------------------------------------------------------------------------------ MCP

NOTES = """
import os
try:
    from mcp.server.mcpserver import MCPServer as FastMCP
except ImportError:
    from mcp.server.fastmcp import FastMCP

server, notes = FastMCP("notes"), []

@server.tool()
def add(text: str) -> str:
    "Adds a note."
    notes.append(text)
    return f"{len(notes)} notes in {os.getpid()}"

@server.tool()
def fail() -> str:
    "Fails."
    raise ValueError("no such thing")

server.run()
"""
# The protocol's lines, without the package, whose import takes most of a server's start
PLAIN_NOTES = """
import json, os, sys, time

notes = []
for line in sys.stdin:
    request = json.loads(line)
    method, params = request["method"], request.get("params")
    if "id" not in request:
        continue
    if method == "initialize":
        result = dict(protocolVersion=params["protocolVersion"], capabilities=dict(tools={}))
        result["serverInfo"] = dict(name="notes", version="1")
    elif method == "tools/list":
        names, page = ("add", "die", "hang"), int((params or {}).get("cursor") or 0)  # a page has one tool
        result = dict(tools=[dict(name=names[page], inputSchema=dict(type="object"))])
        result |= dict(nextCursor=str(page + 1)) if page < 2 else {}
    elif method == "tools/call":
        if params["name"] == "die":
            os._exit(3)
        if params["name"] == "hang":
            time.sleep(600)
        notes.append(params["arguments"]["text"])
        result = dict(content=[dict(type="text", text=f"{len(notes)} notes in {os.getpid()}")])
    else:
        result = {}
    print(json.dumps(dict(jsonrpc="2.0", id=request["id"], result=result)), flush=True)
"""


@pytest.fixture
def notes(tmp_path):
    pytest.importorskip("mcp")
    file = tmp_path / "notes.py"
    file.write_text(PLAIN_NOTES)
    return f"mcp:{sys.executable} {file}"


def test_tools_of_an_mcp_server_have_the_package_s_schemas_and_errors(responders, notes, tmp_path):  # noqa: F811
    (tmp_path / "notes.py").write_text(NOTES)
    table = responders(notes)
    schema = table.tools[0]["function"]
    assert [t["function"]["name"] for t in table.tools] == ["add", "fail"]
    assert schema["description"] == "Adds a note." and schema["parameters"]["required"] == ["text"]
    one = conversation()
    each(table.begin, [one])
    assert used(table, one, "add", text="a").split()[0] == "1" and "error" in used(table, one, "add", x=1)
    assert "fail" in json.loads(used(table, one, "fail"))["error"] and not one.ended


def test_a_response_has_an_mcp_server_that_costs_it_alone_when_it_hangs_or_dies(responders, notes):  # noqa: F811
    table = responders(notes, timeout=5.0)
    assert [t["function"]["name"] for t in table.tools] == ["add", "die", "hang"]  # of three pages
    hangs, dies, lives, last = every = [conversation(number) for number in range(4)]
    each(table.begin, every)
    told = [used(table, one, "add", text="a") for one in every] + [used(table, last, "add", text="b")]
    assert [text.split()[0] for text in told] == ["1", "1", "1", "1", "2"]
    (messages,) = each(table.use_tools, [lives], [[call("add", text="b"), call("add", text="c")]])
    assert [m["content"].split()[0] for m in messages] == ["2", "3"]  # two calls in one turn
    pids = [int(text.split()[-1]) for text in told]
    assert len({*pids}) == 4 and all(map(psutil.pid_exists, pids))
    assert "the MCP server has ended" in used(table, dies, "die")
    assert "no answer in time" in used(table, hangs, "hang")
    gone(*pids[:2])
    assert [one.ended for one in every] == ["failed", "failed", "", ""] and used(table, lives, "add", text="a")[
        0
    ] == "4"
    each(table.finish, [lives, last])
    gone(*pids)


@pytest.mark.full
def test_a_reused_mcp_environment_gets_a_new_server(responders, notes):  # noqa: F811
    table = responders(notes, reuse_environments=True)
    told = []
    for number in range(2):
        one = conversation(number)
        each(table.begin, [one])
        told.append(used(table, one, "add", text="a").split())
        each(table.finish, [one])
    assert [text[0] for text in told] == ["1", "1"] and told[0][-1] != told[1][-1]


def test_mcp_tools_without_an_environment_are_shared_and_come_back_after_a_crash(responders, notes):  # noqa: F811
    table = responders(tools=["calculator", notes])
    one = conversation()
    assert used(table, one, "calculator", expression="6 * 7") == "42"
    assert [used(table, one, "add", text="a").split()[0] for _ in range(2)] == ["1", "2"]
    assert "has ended" in used(table, one, "die") and not one.ended
    assert used(table, one, "add", text="a").split()[0] == "1"


def test_an_mcp_command_that_does_not_start_is_refused(responders):  # noqa: F811
    pytest.importorskip("mcp")
    with pytest.raises(ValueError, match="the MCP server does not start: no-such-server"):
        responders("mcp:no-such-server")


# ---------------------------------------------------------------------------------------------------- all adapters


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def answering(process: subprocess.Popen, port: int) -> str:
    """The address of the server of a process, once it answers."""
    for _ in range(600):
        assert process.poll() is None, "the server has ended"
        try:
            httpx.get(f"http://127.0.0.1:{port}/health")
            return f"http://127.0.0.1:{port}"
        except httpx.HTTPError:
            time.sleep(0.1)
    raise AssertionError("the server does not answer")


def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path):
    (tmp_path / "mcp").mkdir()
    (tmp_path / "mcp" / "__init__.py").write_text("raise ImportError('absent')")
    code = "import megagrpo.environments.adapters.mcp_server"
    paths = {"PYTHONPATH": f"{tmp_path}:{os.getcwd()}"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=paths)
    assert "ImportError: multi_turn" in ran.stderr and "pip install" in ran.stderr


@pytest.mark.parametrize(
    "name",
    usual(
        [
            "gymnasium:FrozenLake-v1",
            "harbor:docker",
            "nemo_gym:http://127.0.0.1:9",
            "openenv:http://127.0.0.1:9",
            "verifiers:guessing",
        ],
        0,
    ),
)
def test_an_adapter_that_is_a_file_of_the_repository_is_named(name):
    with pytest.raises(ProblemError) as refused:
        targets(MultiTurnSection(environment=name))
    (file,) = re.findall(r"[\w/]*examples/\w+/\w+\.py:\w+", str(refused.value))
    assert not undefined(locate_environment(str(ROOT / file), "multi_turn.environment"), "multi_turn.environment")
    assert str(refused.value).startswith(f"multi_turn.environment: `{name}`: the adapter is a file of the repository")
