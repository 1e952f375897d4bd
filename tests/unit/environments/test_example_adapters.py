"""The files of examples/adapters, loaded as a config loads them.

verifiers and Harbor are their real packages. NeMo-Gym and SandboxFusion are servers that speak their documented HTTP
protocols: nemo-gym pins other versions of openai, mcp and pyarrow than vLLM, and SandboxFusion's server is no package.
"""

import json
import os
import signal
import subprocess
import sys
import time
from runpy import run_path

import pytest

from megagrpo.environments.episodes.episode import Loop
from tests.unit.environments.test_adapters import (
    ROOT,
    answered,
    answering,
    begun,
    free_port,
    own_python,
    say,
)
from tests.unit.environments.test_environments import (  # noqa: F401 - fixtures
    call,
    conversation,
    each,
    mine,
    responders,
    used,
)

FOLDER = ROOT / "examples" / "adapters"

GAME = '''
import os
import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: One.
        b: The other.
    """
    return a + b


class Game(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["left"] = 3
        return state

    async def env_response(self, messages, state, **kwargs):
        state["left"] -= 1
        if state["answer"] in messages[-1].content:
            state["final_env_response"] = [vf.UserMessage(content="right")]
            return state["final_env_response"]
        return [vf.UserMessage(content=f"no; {state['left']} left")]


    @vf.cleanup
    async def clean(self, state):
        self.note("cleaned")

    @vf.teardown
    async def tear_down(self):
        self.note("torn down")

    def note(self, word):
        with open(os.environ["GAME_LOG"], "a") as log:
            print(os.getpid(), word, file=log)


class Shifted(vf.StatefulToolEnv):
    def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
        return tool_args | {"b": 100}


def right(completion, answer):
    return float(any(answer in (m.content or "") for m in completion if m.role == "assistant"))


def turns(state):
    return len(state["trajectory"])


def results(completion):
    return sum(m.role == "tool" for m in completion)


def load_environment(kind):
    data = Dataset.from_list([{"question": "Guess.", "answer": "7"}])
    shared = dict(dataset=data, rubric=vf.Rubric([right, turns, results], [1.0, 0.01, 0.001]))
    if kind == "game":
        return Game(max_turns=9, **shared)
    if kind == "tool":
        return vf.ToolEnv(tools=[add], **shared)
    if kind == "stateful":
        environment = Shifted(**shared)
        environment.add_tool(add, args_to_skip=["b"])
        return environment
'''


@pytest.fixture
def verifiers(responders, mine, tmp_path, monkeypatch):  # noqa: F811
    """A factory of responders of an environment of the kind."""
    monkeypatch.setenv("GAME_LOG", str(tmp_path / "game_log"))
    python = own_python("verifiers", "import verifiers.envs.multiturn_env")
    (mine.parent / "guessing.py").write_text(GAME)

    def make(kind):
        options = {"environment_args": {"name": "guessing", "kind": kind}, "python": python, "timeout": 120.0}
        return responders(f"{FOLDER}/verifiers_env.py:Verifiers", **options)

    return make


def test_a_multi_turn_environment_of_verifiers(verifiers, tmp_path):
    table = verifiers("game")
    assert table.tools == [] and table.reward_names == ["Verifiers", "turns"]
    one, text = begun(table, answer="7")
    assert text is None and answered(table, one, "5") == ("no; 2 left", False, None)
    assert answered(table, one, "It is 7") == ("right", True, None)
    each(table.finish, [one])
    assert one.rewards == {"Verifiers": pytest.approx(1.02), "turns": None}
    begun(table, number=1, answer="7")
    table.close()
    words: dict[str, list[str]] = {}
    for line in (tmp_path / "game_log").read_text().splitlines():
        words.setdefault(line.split()[0], []).append(line.split(maxsplit=1)[1])
    assert list(words.values())[-2:] == [["cleaned", "torn down"]] * 2  # with a reward, and without one


@pytest.mark.parametrize(("kind", "given", "result"), [("tool", {"a": 3, "b": 4}, "7"), ("stateful", {"a": 3}, "103")])
def test_tool_environments_of_verifiers(verifiers, kind, given, result):
    table = verifiers(kind)
    (tool,) = table.tools
    assert tool["function"]["name"] == "add" and list(tool["function"]["parameters"]["properties"]) == list(given)
    one, _ = begun(table, answer="7")
    say(one, "")
    one.messages[-1]["tool_calls"] = [{"type": "function", "function": call("add", **given)}]
    (messages,) = each(table.use_tools, [one], [[call("add", **given)]])
    assert messages[0]["content"] == result
    one.messages += messages
    assert "unexpected keyword argument" in used(table, one, "add", x=1)
    assert answered(table, one, "It is 7")[1] is True  # no call: the environment's stop condition
    each(table.finish, [one])
    assert one.rewards["Verifiers"] == pytest.approx(1.021)


def test_the_rows_of_an_environment_of_verifiers(verifiers, mine):  # noqa: F811
    python = own_python("verifiers", "import verifiers.envs.multiturn_env")
    command = [python, str(FOLDER / "verifiers_env.py"), "guessing", '{"kind": "game"}']
    paths = f"{mine.parent}:{os.getcwd()}"
    rows = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ, PYTHONPATH=paths), check=True)
    prompt = [{"role": "user", "content": "Guess."}]
    assert [json.loads(row) for row in rows.stdout.splitlines()] == [{"prompt": prompt, "answer": "7", "example_id": 0}]


# A provider of Harbor without containers: the paths /app, /logs and /tests are folders of a temporary one.
LOCAL = """
import asyncio, os, re, shutil, tempfile
from pathlib import Path

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities


class Local(BaseEnvironment):
    def __init__(self, *arguments, log, **options):
        self.log, self.root = Path(log), None
        super().__init__(*arguments, **options)

    def note(self, *words):
        with self.log.open("a") as log:
            print(*words, file=log)

    @staticmethod
    def type():
        return "local"

    @property
    def capabilities(self):
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self):
        assert (self.environment_dir / "Dockerfile").is_file()

    async def start(self, force_build):
        self.root = Path(tempfile.mkdtemp(prefix="container-"))
        self.note("start", self.root, self.network_policy.network_mode.value, self.session_id)
        for name in ("app", "tests", "logs/verifier", "logs/agent", "logs/artifacts"):
            (self.root / name).mkdir(parents=True)
        shutil.copytree(self.environment_dir, self.root / "app", dirs_exist_ok=True)
        if (self.environment_dir / "slow").exists():
            await asyncio.sleep(600)

    async def stop(self, delete):
        shutil.rmtree(self.root)
        self.note("stop", self.root, delete)

    def inside(self, path):
        return self.root / str(path).lstrip("/")

    async def upload_file(self, source_path, target_path):
        shutil.copy(source_path, self.inside(target_path))

    async def upload_dir(self, source_dir, target_dir):
        shutil.copytree(source_dir, self.inside(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path, target_path):
        shutil.copy(self.inside(source_path), target_path)

    async def download_dir(self, source_dir, target_dir):
        shutil.copytree(self.inside(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None):
        self.note("exec", user or self.default_user, command)
        local = re.sub(r"/(app|tests|logs)\\b", lambda found: str(self.inside(found[0])), command)
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", local, cwd=self.root / "app", env=os.environ | (env or {}) | {"ROOT": str(self.root)},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), timeout_sec)
        except TimeoutError:
            process.kill()
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds")
        return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=process.returncode)
"""

TASK = """version = "1.0"

[metadata]
author_name = "megagrpo"
difficulty = "easy"
category = "programming"
tags = ["files"]

[agent]
timeout_sec = 120.0

[verifier]
timeout_sec = 120.0

[environment]
build_timeout_sec = 600.0
cpus = 1
memory_mb = 2048
storage_mb = 10240
network_mode = "no-network"
"""
TEST = """#!/bin/bash
if [ "$(cat $ROOT/app/answer.txt)" = 42 ]; then echo 1 > $ROOT/logs/verifier/reward.txt
else echo 0 > $ROOT/logs/verifier/reward.txt; fi
"""


def harbor_task(folder, config=TASK, test=TEST):
    """A folder as `harbor init` makes it."""
    (folder / "environment").mkdir(parents=True)
    (folder / "tests").mkdir()
    (folder / "instruction.md").write_text("# benchmark canary 1b2c\n\nWrite 42 to /app/answer.txt.\n")
    (folder / "task.toml").write_text(config)
    (folder / "environment" / "Dockerfile").write_text("FROM ubuntu:24.04\nWORKDIR /app\n")
    (folder / "environment" / "hint.txt").write_text("6 * 7\n")
    (folder / "tests" / "test.sh").write_text(test)
    return folder


@pytest.fixture
def harbor(responders, mine, tmp_path):  # noqa: F811
    """A factory of responders of Harbor, and the log of its provider."""
    python = own_python("harbor", "import harbor.environments.factory")
    (mine.parent / "local_provider.py").write_text(LOCAL)
    log = tmp_path / "provider"
    log.touch()

    def make(**more):
        arguments = {"name": "local_provider:Local", "log": str(log)} | more
        return responders(
            f"{FOLDER}/harbor_env.py:Harbor",
            environment_args=arguments,
            python=python,
            timeout=120.0,
        )

    return make, log


def stopped(log):
    """Wait until each container that was started is stopped, once; returns the words of the starts."""
    ends = time.monotonic() + 20
    while True:
        lines = [line.split() for line in log.read_text().splitlines()]
        starts, stops = ([line for line in lines if line[0] == kind] for kind in ("start", "stop"))
        if len(starts) == len(stops) or time.monotonic() > ends:
            break
        time.sleep(0.05)
    assert sorted(line[1] for line in starts) == sorted(line[1] for line in stops)
    assert not any(os.path.exists(line[1]) for line in starts)
    return starts


def test_tasks_of_harbor_are_solved_in_bash_and_judged_by_its_verifier(harbor, tmp_path):
    table, log = harbor[0](seconds=5), harbor[1]
    assert [tool["function"]["name"] for tool in table.tools] == ["bash"] and table.reward_names == ["Harbor"]
    task = harbor_task(tmp_path / "tasks" / "answer")
    both = [begun(table, number=number, task=str(task))[0] for number in range(2)]
    assert used(table, both[0], "bash", command="cat hint.txt; echo oops >&2; exit 3") == "6 * 7\noops\nexit code 3"
    assert used(table, both[0], "bash", command="echo 42 > /app/answer.txt") == ""
    assert "timed out after 5 seconds" in used(table, both[0], "bash", command="sleep 60") and not both[0].ended
    assert used(table, both[1], "bash", command="echo 41 > /app/answer.txt") == ""
    each(table.finish, both)
    assert [one.rewards for one in both] == [{"Harbor": 1.0}, {"Harbor": 0.0}]
    starts = stopped(log)
    assert [mode for _, _, mode, _ in starts] == ["no-network"] * 2 and len({name for *_, name in starts}) == 2


def test_a_trial_of_harbor_that_fails_or_is_killed_while_it_starts_leaves_no_container(harbor, tmp_path):
    table, log = harbor[0](), harbor[1]
    slow = harbor_task(tmp_path / "slow", TASK.replace("build_timeout_sec = 600.0", "build_timeout_sec = 1.0"))
    (slow / "environment" / "slow").touch()
    one = conversation(number=0, task=str(slow))
    one.messages = []
    each(table.begin, [one])
    assert one.ended == "failed"
    each(table.finish, [one])
    stopped(log)
    two, _ = begun(table, number=1, task=str(harbor_task(tmp_path / "wrong", test="#!/bin/bash\ntrue\n")))
    each(table.finish, [two])
    assert two.ended == "failed" and two.rewards == {"Harbor": 0.0}  # its tests wrote no reward
    three, _ = begun(table, number=2, task=str(harbor_task(tmp_path / "right")))
    table.close()  # in the middle of an episode
    assert not three.ended and len(stopped(log)) == 3


def test_the_rows_of_a_folder_of_harbors_tasks(tmp_path):
    python = own_python("harbor", "import harbor.environments.factory")
    harbor_task(tmp_path / "tasks" / "b")
    harbor_task(tmp_path / "tasks" / "a")
    harbor_task(tmp_path / "tasks" / "c", TASK + '[verifier.environment]\ndocker_image = "x"\n')
    command = [python, str(FOLDER / "harbor_env.py"), str(tmp_path / "tasks")]
    ran = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": os.getcwd()}, check=True)
    rows = [json.loads(row) for row in ran.stdout.splitlines()]
    assert [row["task"] for row in rows] == [str(tmp_path / "tasks" / name) for name in "ab"]
    assert rows[0]["prompt"] == [{"role": "user", "content": "Write 42 to /app/answer.txt.\n"}]  # without the canary
    assert "tasks/c is left out: the tests of" in ran.stderr


@pytest.fixture
def serve(tmp_path):
    """A factory of servers: starts a program with a port, waits until it answers, returns its address."""
    processes = []

    def start(program):
        port, file = free_port(), tmp_path / "server.py"
        file.write_text(program)
        processes.append(subprocess.Popen([sys.executable, str(file), str(port)]))
        return answering(processes[-1], port)

    yield start
    for process in processes:
        process.kill()
        process.wait()


NEMO = '''
"""A counter that speaks the protocol of nemo_gym/base_resources_server.py, as its example_session_state_mgmt."""

import sys
import uuid
import uvicorn
from fastapi import FastAPI, Request, Response
from openai.types.responses import Response as Conversation
from pydantic import BaseModel

app, counters = FastAPI(), {}


class Increment(BaseModel):
    count: int


@app.middleware("http")
async def session(request: Request, call_next):
    request.state.key = request.cookies.get("session") or str(uuid.uuid4())
    answer = await call_next(request)
    answer.set_cookie("session", request.state.key)
    return answer


@app.post("/seed_session")
async def seed_session(request: Request):
    counters[request.state.key] = (await request.json())["start"]
    return {}


@app.post("/increment")
async def increment(body: Increment, request: Request):
    "Adds to the counter."
    counters[request.state.key] += body.count
    return {"count": counters[request.state.key]}


@app.post("/verify")
async def verify(request: Request):
    body = await request.json()
    said = Conversation.model_validate(body["response"]).output
    kinds = [item.type for item in said]
    right = counters[request.state.key] == body["goal"] and "done" in said[-1].content[0].text
    assert body["responses_create_params"]["input"][0]["content"] == "hi"
    return {"reward": float(right), "kinds": kinds}


uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
'''


def test_a_resources_server_of_nemo_gym(responders, serve):  # noqa: F811
    table = responders(f"{FOLDER}/nemo_gym.py:NemoGym", environment_args={"name": serve(NEMO)}, reuse_environments=True)
    (tool,) = table.tools
    assert tool["function"]["name"] == "increment" and tool["function"]["parameters"]["required"] == ["count"]
    for number, (start, reward) in enumerate([(1, 1.0), (5, 0.0)]):
        one, _ = begun(table, number=number, start=start, goal=3)
        say(one, "")
        one.messages[-1]["tool_calls"] = [{"type": "function", "function": call("increment", count=2)}]
        one.messages += each(table.use_tools, [one], [[call("increment", count=2)]])[0]
        assert one.messages[-1]["content"] == json.dumps({"count": start + 2}, separators=(",", ":"))
        assert "HTTP 422" in used(table, one, "increment", count="many")
        say(one, "done")
        each(table.finish, [one])
        assert one.rewards == {"NemoGym": reward}


SANDBOX = '''
"""Speaks the protocol of SandboxFusion's POST /run_code for Python."""

import subprocess
import sys
import time
import uvicorn
from fastapi import FastAPI, Request

app = FastAPI()


@app.post("/run_code")
def run_code(body: dict):
    if body["language"] == "keys":
        result = {"status": "Finished", "return_code": 0, "stdout": " ".join(sorted(body)), "stderr": ""}
        return {"status": "Success", "message": "", "compile_result": None, "run_result": result}
    if body["language"] == "cobol":
        return {"status": "SandboxError", "message": "no compiler"}
    begun = time.monotonic()
    try:
        run = subprocess.run(
            [sys.executable, "-c", body["code"]], capture_output=True, text=True, timeout=body["run_timeout"] / 10
        )
        result = {"status": "Finished", "return_code": run.returncode, "stdout": run.stdout, "stderr": run.stderr}
    except subprocess.TimeoutExpired:
        result = {"status": "TimeLimitExceeded", "return_code": None, "stdout": "", "stderr": ""}
    success = "Success" if result["return_code"] == 0 else "Failed"
    result["execution_time"] = time.monotonic() - begun
    return {"status": success, "message": "", "compile_result": None, "run_result": result}


uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
'''


def test_the_sandbox_of_sandbox_fusion(responders, serve, monkeypatch):  # noqa: F811
    monkeypatch.setenv("SANDBOX_FUSION_URL", serve(SANDBOX))
    table = responders(tools=[f"{FOLDER}/sandbox_fusion.py:SandboxFusion"])
    one = conversation()
    assert used(table, one, "run_code", code="print(6 * 7)") == "42"
    failed = used(table, one, "run_code", code="print('a'); 1 / 0")
    assert failed.startswith("a\nTraceback") and failed.endswith("exit status 1")
    assert "TimeLimitExceeded" in used(table, one, "run_code", code="while True: pass", run_timeout=500)
    more = dict(compile_timeout=500, memory_limit_MB=-1, files={"/etc/x": "eA=="}, fetch_files=["/etc/passwd"])
    assert used(table, one, "run_code", code="", language="keys", **more) == "code compile_timeout language run_timeout"
    assert used(table, one, "run_code", code="print('x' * 20000)").endswith("x\n[20000 characters in all]")
    assert "no compiler" in json.loads(used(table, one, "run_code", code="", language="cobol"))["error"]


def test_a_server_that_does_not_answer_is_refused_before_training(responders):  # noqa: F811
    with pytest.raises(ValueError, match=r"the NeMo-Gym server http://127\.0\.0\.1:9/openapi\.json: ConnectError"):
        responders(f"{FOLDER}/nemo_gym.py:NemoGym", environment_args={"name": "http://127.0.0.1:9"})


# ------------------------------------------------------------------------------------------------------------ verifiers

TASKS = """
import verifiers.v1 as vf

__all__ = ["Numbers", "NumbersEnv"]


class NumbersConfig(vf.TasksetConfig):
    count: int


class NumbersData(vf.TaskData):
    answer: str


class NumbersTask(vf.Task[NumbersData]):
    @vf.reward(weight=1.0)
    async def right(self, trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.reward(weight=0.01)
    async def turns(self, trace) -> float:
        return float(trace.num_turns)


class Numbers(vf.Taskset[NumbersTask, NumbersConfig]):
    def load(self):
        for i in range(self.config.count):
            yield NumbersTask(NumbersData(prompt="hi", answer=str(7 + i)), self.config.task)


class NumbersEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class NumbersEnv(vf.Env[NumbersEnvConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and task.data.answer not in segment.last_reply:
                if segment.last_reply == "fail":
                    raise RuntimeError("it failed")
                segment = await interaction.turn(f"not {segment.last_reply}")
"""


@pytest.mark.parametrize("key", ["python", "container"])
def test_an_environment_of_verifiers_0_4_in_its_own_python(responders, mine, key):  # noqa: F811
    python = own_python("verifiers_v1", "from verifiers.v1 import Env, Taskset; from verifiers.v1.agent import Segment")
    (mine.parent / "numbers_tasks.py").write_text(TASKS)
    arguments = {
        "environment_args": {"name": "numbers_tasks", "count": 3},
        "reuse_environments": True,
        "timeout": 120.0,
    }
    own = {"python": python} if key == "python" else {"container": f"{python} -m {{module}}"}
    table = responders(f"{FOLDER}/verifiers_v1.py:VerifiersV1", **own, **arguments)
    assert table.tools == [] and table.reward_names == ["VerifiersV1", "turns"]
    one, text = begun(table, idx=2)
    assert text is None and answered(table, one, "5") == ("not 5", False, None)
    assert answered(table, one, "It is 9")[1:] == (True, None)
    each(table.finish, [one])
    cut, _ = begun(table, number=1, idx=0)
    assert answered(table, cut, "5")[1] is False  # and then the response ends
    failed, _ = begun(table, number=2, idx=1)
    say(failed, "fail")
    assert each(table.schedule, [failed]) == [None] and failed.ended == "failed"
    each(table.finish, [cut, failed])
    rewards = [c.rewards["VerifiersV1"] for c in (one, cut, failed)]
    assert rewards == [pytest.approx(1.02), pytest.approx(0.01), 0.0]


# -------------------------------------------------------------------------------------------------------------- OpenEnv

OPENENV = """
import os, signal, sys
import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    guess: int


class Seen(Observation):
    text: str


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.secret = seed
        return Seen(text="from 1 to 9")

    def step(self, action, **kwargs):
        if action.guess == 99:
            os._exit(1)
        right = action.guess == self.secret
        return Seen(text="right" if right else "wrong", done=right, reward=1.0 if right else -0.5)

    @property
    def state(self):
        return State()


class Tools(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("tools")

        @server.tool
        def divide(a: int, b: int) -> float:
            "Divides."
            return a / b

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation()

    def _step_impl(self, action, timeout_s=None, **kwargs):
        return Observation()

    @property
    def state(self):
        return State()


kinds = {"game": (Game, Guess, Seen), "tools": (Tools, CallToolAction, CallToolObservation)}
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:  # a fork serves: imports take seconds
    kind, port, sessions = line.split()
    if os.fork() == 0:
        app = create_app(*kinds[kind], max_concurrent_envs=int(sessions))
        uvicorn.run(app, port=int(port), log_level="warning", ws_ping_interval=0.5, ws_ping_timeout=0.5)
"""


@pytest.fixture(scope="module")
def openenv(tmp_path_factory):
    """A factory of servers: starts one of a kind with a limit of sessions, waits until it answers, returns its
    address."""
    pytest.importorskip("openenv.core")
    file = tmp_path_factory.mktemp("openenv") / "servers.py"
    file.write_text(OPENENV)
    starter = subprocess.Popen([sys.executable, str(file)], stdin=subprocess.PIPE, text=True, start_new_session=True)

    def start(kind, sessions=8):
        port = free_port()
        print(kind, port, sessions, file=starter.stdin, flush=True)
        return answering(starter, port)

    yield start
    os.killpg(starter.pid, signal.SIGKILL)
    starter.wait()


def turn(text):
    return [{"role": "assistant", "content": text}]


@pytest.mark.full
def test_an_openenv_server_whose_actions_are_turns(responders, openenv):  # noqa: F811
    table = responders(
        f"{FOLDER}/openenv_client.py:OpenEnv",
        environment_args={"name": openenv("game"), "invalid": -1.0},
        reuse_environments=True,
    )
    assert table.tools == [] and table.reward_names == ["OpenEnv", "turns"]
    one, text = begun(table, seed=3)
    assert text == "\nfrom 1 to 9" and answered(table, one, "5") == ("wrong", False, -0.5)
    assert answered(table, one, "a word") == ("That is not a valid action.", False, -1.0)
    assert answered(table, one, '{"guess": 3}') == ("right", True, 1.0)
    each(table.finish, [one])
    other, _ = begun(table, number=1, seed=5)
    assert answered(table, other, "5") == ("right", True, 1.0)
    say(other, "99")
    each(table.begin, [other])
    assert each(table.schedule, [other]) == [None] and other.ended == "failed"


def test_sessions_of_openenv_share_no_state_and_one_session_serves_one_episode_after_another(openenv):
    OpenEnv = run_path(str(FOLDER / "openenv_client.py"))["OpenEnv"]
    loop, address = Loop(), openenv("game", 2)
    one, other = OpenEnv(address), OpenEnv(address)
    assert [loop.awaited(client.reset(seed=seed)) for client, seed in ((one, 3), (other, 5))] == ["\nfrom 1 to 9"] * 2
    assert [loop.awaited(client.step(turn("5")))[1:] for client in (one, other)] == [(False, -0.5), (True, 1.0)]
    for _ in range(2):  # not refused: the last session is closed
        loop.awaited(other.close())
        other = OpenEnv(address)
        assert loop.awaited(other.reset(seed=4)) == "\nfrom 1 to 9"
        assert loop.awaited(other.step(turn("4")))[1:] == (True, 1.0)


def test_an_openenv_session_outlives_a_long_turn_and_comes_back_after_it_was_closed(openenv):
    OpenEnv = run_path(str(FOLDER / "openenv_client.py"))["OpenEnv"]
    loop, client = Loop(), OpenEnv(openenv("game"))
    loop.awaited(client.reset(seed=3))
    time.sleep(3.0)  # the server closes connections that do not answer its pings
    assert loop.awaited(client.step(turn("3")))[1:] == (True, 1.0)
    loop.awaited(client._client._ws.close())
    assert loop.awaited(client.reset(seed=4)) == "\nfrom 1 to 9"
    assert loop.awaited(client.step(turn("4")))[1:] == (True, 1.0)


def test_an_openenv_server_of_mcp_tools(openenv):
    OpenEnv = run_path(str(FOLDER / "openenv_client.py"))["OpenEnv"]
    loop, client = Loop(), OpenEnv(openenv("tools"))
    (tool,) = loop.awaited(client.list_tools())
    assert tool["function"]["name"] == "divide" and list(tool["function"]["parameters"]["properties"]) == ["a", "b"]
    assert loop.awaited(client.reset()) is None
    assert loop.awaited(client.call_tool("divide", {"a": 1, "b": 2})) == "0.5"
    with pytest.raises(RuntimeError, match="zero"):
        loop.awaited(client.call_tool("divide", {"a": 1, "b": 0}))
    assert loop.awaited(client.step(turn("It is 0.5")))[1:] == (True, None) and client.get_reward() == 0.0
