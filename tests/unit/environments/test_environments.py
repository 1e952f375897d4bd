"""The protocol of environments in real processes: constructor arguments, turns, dynamic tools, reuse, containers."""

import asyncio
import json
import os
import re
import stat
import subprocess
import sys
import time
import venv
from pathlib import Path

import psutil
import pytest

from megagrpo.config import MultiTurnSection
from megagrpo.environments.episodes.conversation import Conversation
from megagrpo.environments.responders import Responders
from megagrpo.types import Prompt, Turn
from tests.distributed.suites import usual

MINE = '''
"""Environments of the tests."""

import asyncio
import os
import subprocess
import sys
import time

from megagrpo.environments.episodes.episode import EnvironmentLost


class Game:
    """Answers turns, has a tool named `reset` that is known by asking, and counts its episodes."""

    def __init__(self, goal, word="more"):
        self.goal, self.word, self.episodes = goal, word, 0

    def reset(self, start=0):
        self.value, self.episodes = start, self.episodes + 1
        return f" Reach {self.goal}."

    def list_tools(self):
        schema = {"type": "object", "properties": {"by": {"type": "integer"}}}
        names = ("reset", "lose", "wait", "child", "count")
        return [{"type": "function", "function": {"name": n, "description": n, "parameters": schema}} for n in names]

    def call_tool(self, name, arguments):
        if name == "lose":
            raise EnvironmentLost("the server is gone")
        if name == "wait":
            print("noise on stdout", flush=True)
            time.sleep(600)
        if name == "child":
            return str(subprocess.Popen(["sleep", "600"]).pid)
        if name == "count":
            return f"{self.episodes} {os.getpid()}"
        self.value = arguments.get("by", 0)
        return str(self.value)

    def step(self, messages, turn):
        print("noise on stdout", flush=True)
        self.value += len(messages[-1]["content"])
        return [*messages, {"role": "user", "content": self.word}], self.value >= self.goal, self.value / 10

    def get_reward(self, messages):
        return float(len(messages))


class Interpreter:
    """Tells which Python runs it."""

    def reset(self):
        pass

    def prefix(self) -> str:
        """Tells it."""
        return sys.prefix


class Queued:
    """An environment whose asyncio objects belong to the loop of the first call."""

    async def reset(self):
        loop = asyncio.get_running_loop()
        self.ready = loop.create_future()
        loop.call_later(0.1, self.ready.set_result, "taken")
        self.ticks, self.clock = 0, asyncio.create_task(self._tick())

    async def _tick(self):
        while True:
            self.ticks += 1
            await asyncio.sleep(0.01)

    async def take(self) -> str:
        """Waits."""
        return f"{await self.ready} {self.ticks}"


class Stepper:
    """Its `step` is a tool, because it has no parameter `messages`."""

    def reset(self):
        pass

    def step(self, action: str) -> str:
        """Acts.

        Args:
            action: What to do.
        """
        return action.upper()
'''


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    file = tmp_path_factory.mktemp("environments") / "mine.py"
    file.write_text(MINE)
    return file


@pytest.fixture
def responders(mine):
    """A factory of `Responders`, which are closed at the end; names without a colon belong to the tests' file."""
    made = []

    def make(environment=None, **section):
        if environment and ":" not in environment:
            environment = f"{mine}:{environment}"
        section = dict(timeout=20.0, workers=1) | section | ({"environment": environment} if environment else {})
        made.append(Responders(MultiTurnSection(**section), mine.parent))
        return made[-1]

    yield make
    for one in made:
        one.close()


def conversation(number=0, content="hm", **columns):
    prompt = Prompt(number, (1,), "hi", columns)
    made = Conversation(prompt, number, number, [{"role": "user", "content": "hi"}], 100)
    made.messages, made.turns = [{"role": "assistant", "content": content}], [Turn(0, 0)]
    return made


def each(method, conversations, *arguments):
    """The results of a coroutine of `Responders` for each conversation, all at once."""

    async def run():
        return await asyncio.gather(*map(method, conversations, *arguments))

    return asyncio.run(run())


def call(name, **arguments):
    return {"name": name, "arguments": arguments}


def used(table, one, name, **arguments):
    """The content of the tool message of one call."""
    ((message,),) = each(table.use_tools, [one], [[call(name, **arguments)]])
    return message["content"]


# --------------------------------------------------------------------------------------------------------- the protocol


def test_an_environment_answers_turns_and_lists_its_tools(responders):
    table = responders("Game", environment_args={"goal": 5})
    assert [s["function"]["name"] for s in table.tools] == ["reset", "lose", "wait", "child", "count"]
    assert table.has_scheduler and table.reward_names == ["Game", "turns"]
    one = conversation(start=1)
    assert each(table.begin, [one]) == [" Reach 5."]
    ((messages, done, reward),) = each(table.schedule, [one])
    assert messages[-1] == {"role": "user", "content": "more"} and (done, reward) == (False, 0.3)
    assert used(table, one, "reset", by=4) == "4"  # a tool of that name is no new episode
    ((_, done, reward),) = each(table.schedule, [one])
    assert (done, reward) == (True, 0.6)
    each(table.finish, [one])
    assert one.rewards == {"Game": 2.0, "turns": None}  # `get_reward` saw prompt and answer


def test_a_step_without_messages_is_a_tool(responders):
    table = responders("Stepper")
    assert [s["function"]["name"] for s in table.tools] == ["step"] and not table.has_scheduler
    one = conversation()
    each(table.begin, [one])
    assert used(table, one, "step", action="go") == "GO"


def test_calls_of_an_episode_share_one_event_loop(responders):
    table = responders("Queued")
    one = conversation()
    each(table.begin, [one])
    time.sleep(1.0)
    word, ticks = used(table, one, "take").split()
    assert word == "taken" and int(ticks) > 5  # connections answer between calls


def test_an_environment_that_is_lost_ends_its_response(responders):
    table = responders("Game", environment_args={"goal": 5})
    one = conversation()
    each(table.begin, [one])
    assert "the server is gone" in used(table, one, "lose") and one.ended == "failed"


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        (dict(environment_args={"goal": 1, "wrod": "x"}), "`Game` has no argument `wrod`; its arguments: goal, word"),
        (dict(environment_args={"goal": 1}, scheduler="reasoning_gym"), "leave multi_turn.scheduler out"),
        (dict(), "missing 1 required positional argument: 'goal'"),
    ],
)
def test_unusable_arguments_are_refused_before_training(responders, section, problem):
    with pytest.raises(ValueError, match=problem):
        responders("Game", **section)


# ---------------------------------------------------------------------------------------------------------------- reuse


def count_and_pid(table, one):
    return tuple(map(int, used(table, one, "count").split()))


def test_reused_environments_are_reset_and_keep_their_process(responders):
    table = responders("Game", environment_args={"goal": 5}, reuse_environments=True)
    seen = []
    for number in range(3):
        one = conversation(number)
        each(table.begin, [one])
        ((_, _, reward),) = each(table.schedule, [one])
        assert reward == 0.2  # the value of the last episode is gone
        seen.append(count_and_pid(table, one))
        each(table.finish, [one])
    assert [count for count, _ in seen] == [1, 2, 3] and len({pid for _, pid in seen}) == 1
    table.close()
    gone(seen[0][1])


@pytest.mark.parametrize("fault", ["lose", "wait", "killed"])
def test_a_process_that_failed_or_died_serves_no_other_response(responders, fault):
    table = responders("Game", environment_args={"goal": 5}, reuse_environments=True, timeout=2.0)
    one, two = conversation(0), conversation(1)
    each(table.begin, [one])
    _, pid = count_and_pid(table, one)
    if fault != "killed":
        used(table, one, fault)
    each(table.finish, [one])
    if fault == "killed":
        os.kill(pid, 9)
        gone(pid)
    assert each(table.begin, [two]) == [" Reach 5."] and not two.ended
    count, other = count_and_pid(table, two)
    assert (count, other != pid) == (1, True)


def test_without_reuse_each_response_has_a_new_process(responders):
    table = responders("Game", environment_args={"goal": 5})
    seen = set()
    for number in range(2):
        one = conversation(number)
        each(table.begin, [one])
        seen.add(count_and_pid(table, one))
        each(table.finish, [one])
    assert [count for count, _ in seen] == [1, 1] and len(seen) == 2


# ----------------------------------------------------------------------------------------------------------- containers

# A stand-in of the four runtimes, by the name of the program. It knows the flags of the documented templates only, and
# registers containers by name and label. As docker and podman do, the command line is not the parent of the process in
# the container: it only copies its stdio, and the daemon removes the container. kubectl's command line removes the pod.
RUNTIME = """#!{python}
import json, os, subprocess, sys
state, kind, words = {state!r}, os.path.basename(sys.argv[0]), sys.argv[1:]
FLAGS = dict(
    docker=dict.fromkeys(("--rm", "-i"), 0) | dict.fromkeys(("--name", "--label", "--network", "-v", "-e"), 1),
    apptainer={{"--containall": 0, "--bind": 1, "--env": 1}},
    kubectl=dict.fromkeys(("--rm", "-i", "--quiet", "--command"), 0)
    | dict.fromkeys(("--restart", "--labels", "--image"), 1),
)
FLAGS["podman"] = FLAGS["docker"]

def files(label):
    named = [os.path.join(state, name) for name in os.listdir(state)]
    return [path for path in named if json.load(open(path))["label"] == label]

def remove(path):
    os.killpg(json.load(open(path))["pid"], 9)
    os.path.exists(path) and os.remove(path)

if words[:3] == ["ps", "-aq", "--filter"]:
    print(*map(os.path.basename, files(words[3].removeprefix("label="))))
    sys.exit()
if words[:2] == ["rm", "-f"]:
    sys.exit(any(map(remove, [os.path.join(state, name) for name in words[2:]])))
if words[:3] == ["delete", "pod", "-l"]:
    sys.exit(any(map(remove, files(words[3]))))

assert words.pop(0) == ("exec" if kind == "apptainer" else "run"), sys.argv
found = {{"-v": [], "-e": []}}
if kind == "kubectl":
    found["--name"] = words.pop(0)
while words[0].startswith("-") and words[0] != "--":
    flag, _, value = words.pop(0).partition("=")
    if flag not in FLAGS[kind]:
        print("unknown flag:", flag, file=sys.stderr)
        sys.exit(125)
    if FLAGS[kind][flag]:
        value = value or words.pop(0)
    found[flag] = [*found[flag], value] if flag in ("-v", "-e") else value
image = words.pop(0) if kind != "kubectl" else found["--image"]
words = words[1:] if kind == "kubectl" else words  # without --
with open({log!r}, "a") as log:
    log.write(json.dumps([kind, found, image, words]) + "\\n")
if image == "missing":
    print("no such image", file=sys.stderr)
    sys.exit(125)
environment = dict(os.environ, IN_CONTAINER="1")
mounts = dict(reversed(bind.split(":")[:2]) for bind in [*found["-v"], *found.get("--bind", "").split(",")] if bind)
assert all(map(os.path.isdir, mounts.values()))
for pair in [*found["-e"], *([found["--env"]] if "--env" in found else [])]:
    name, _, value = pair.partition("=")
    environment[name] = mounts.get(value, value)
if kind == "apptainer":
    os.execvpe(words[0], words, environment)
path = os.path.join(state, found["--name"])
DAEMON = '''
import json, os, subprocess, sys
inside = subprocess.Popen(sys.argv[4:], stdin=0, stdout=1, start_new_session=True)
with open(sys.argv[1], "x") as file:
    json.dump(dict(label=sys.argv[2], pid=inside.pid), file)
code = inside.wait()
if sys.argv[3] == "rm" and os.path.exists(sys.argv[1]):
    os.remove(sys.argv[1])
sys.exit(code)
'''
label, removal = found.get("--label") or found.get("--labels", ""), "rm" if kind != "kubectl" else "keep"
daemon = [sys.executable, "-c", DAEMON, path, label, removal, *words]
code = subprocess.Popen(daemon, stdin=0, stdout=1, env=environment, start_new_session=True).wait()
if os.path.exists(path):
    os.remove(path)
sys.exit(code)
"""


def documented(kind):
    """The template of docs/environments.md for a runtime."""
    page = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()
    blocks = [block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "container: >-" in block]
    templates = [re.search(r"container: >-\n((?: +.*\n)+)", block)[1].split() for block in blocks]
    (words,) = [words for words in templates if words[0] == kind.replace("podman", "docker")]
    return " ".join([kind, *words[1:]])


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    """Container runtimes on PATH. Returns their log, beside the folder `state` with a file per container."""
    log, state = tmp_path / "log", tmp_path / "state"
    state.mkdir()
    programs = tmp_path / "bin"
    programs.mkdir()
    for kind in KINDS:
        program = programs / kind
        program.write_text(RUNTIME.format(python=sys.executable, log=str(log), state=str(state)))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (programs / "python3").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return log


KINDS = "docker", "podman", "apptainer", "kubectl"


def calls_of(log):
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.parametrize("kind", usual(KINDS, 0))
def test_a_container_serves_an_episode_over_its_stdio(responders, runtime, mine, kind):
    table = responders("Game", environment_args={"goal": 5}, container=documented(kind))
    both = [conversation(0), conversation(1, start=2)]
    assert each(table.begin, both) == [" Reach 5.", " Reach 5."]
    if kind != "apptainer":  # which has no daemon
        assert len(os.listdir(runtime.parent / "state")) == 2
    answers = each(table.schedule, both)  # what the environment prints does not mix with the answers
    assert [reward for _, _, reward in answers] == [0.2, 0.4]
    pids = [count_and_pid(table, one)[1] for one in both]
    child = int(used(table, both[0], "child"))
    each(table.finish, both)
    assert [one.rewards["Game"] for one in both] == [2.0, 2.0]
    gone(*pids, child)
    table.close()
    assert os.listdir(runtime.parent / "state") == []
    calls = calls_of(runtime)
    assert [words for *_, words in calls] == [["python3", "-m", "megagrpo.environments.episodes.episode"]] * 3
    names = {found.get("--name") for _, found, *_ in calls}
    assert len(names) == (1 if kind == "apptainer" else 3)
    if kind in ("docker", "podman"):
        assert f"{mine.parent}:{mine.parent}:ro" in calls[0][1]["-v"]


@pytest.mark.parametrize("kind", usual(KINDS, 0))
def test_a_call_that_hangs_in_a_container_is_killed_there(responders, runtime, kind):
    table = responders("Game", environment_args={"goal": 5}, container=documented(kind), timeout=8.0)
    one = conversation()
    each(table.begin, [one])
    _, pid = count_and_pid(table, one)
    assert "no answer in time" in used(table, one, "wait") and one.ended == "failed"
    gone(pid)  # although only the runtime's command line was killed
    table.close()
    assert os.listdir(runtime.parent / "state") == []


@pytest.mark.parametrize("kind", usual(["docker", "podman", "kubectl"], 0, 2))
def test_containers_that_are_left_are_removed_by_the_documented_label(runtime, kind):
    state, words = runtime.parent / "state", documented(kind).replace("{name}", "left")
    for place in ("{folder}", "{package}"):
        words = words.replace(place, str(runtime.parent))
    run = subprocess.Popen([*words.replace("{command}", "sleep 600").split()], stdin=subprocess.DEVNULL)
    ends = time.monotonic() + 20
    while not (list(state.iterdir()) and (state / "left").read_text()) and time.monotonic() < ends:
        time.sleep(0.05)
    pid = json.loads((state / "left").read_text())["pid"]
    run.kill()
    run.wait()
    assert running(pid)
    page = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()
    (command,) = [
        line
        for line in page.splitlines()
        if line.startswith(f"{kind.replace('podman', 'docker')} ") and "my_run" in line
    ]
    subprocess.run(["bash", "-c", command.replace("docker", kind)], check=True)
    gone(pid)
    assert list(state.iterdir()) == []


def test_workers_run_in_a_python_of_their_own(responders, tmp_path):
    venv.create(tmp_path / "own", symlinks=True)  # without any package
    python = str(tmp_path / "own" / "bin" / "python")
    table = responders("Interpreter", tools=["calculator"], python=python, reuse_environments=True)
    one = conversation()
    each(table.begin, [one])
    assert used(table, one, "prefix") == str(tmp_path / "own")
    with pytest.raises(ValueError, match=r"multi_turn\.python: no program no-such-python; name the python"):
        responders("Interpreter", python="no-such-python")


def gone(*pids):
    """Wait until the processes have ended."""
    ends = time.monotonic() + 10
    while any(map(running, pids)) and time.monotonic() < ends:
        time.sleep(0.05)
    assert not any(map(running, pids))


def running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_container_that_does_not_start_is_refused_before_training(responders, runtime):
    with pytest.raises(ValueError, match=r"its process died \(exit status 1\)"):
        responders("Game", environment_args={"goal": 5}, container="false {command}")
    for template in ("docker run --rm -i --name {name} missing {command}", "podman run --no-such image {command}"):
        with pytest.raises(ValueError, match=r"its process died \(exit status 125\)"):
            responders("Game", environment_args={"goal": 5}, container=template)
    with pytest.raises(ValueError, match="No such file or directory: 'no-such-runtime'"):
        responders("Game", environment_args={"goal": 5}, container="no-such-runtime {command}")


SHELL = '''
import subprocess
import time


class Shell:
    def reset(self, note):
        open(note, "w").write(str(subprocess.Popen(["sleep", "1000"]).pid))

    def step(self, messages):
        return messages, True


def agent(prompt, note):
    Shell().reset(note)
    time.sleep(1000)


def tool(note: str) -> str:
    """Looks.

    Args:
        note: Where.
    """
    agent("", note)
'''
RUN = """
import asyncio, sys, threading, time
from pathlib import Path
from megagrpo.config import MultiTurnSection
from megagrpo.environments.episodes.conversation import Conversation
from megagrpo.environments.responders import Responders
from megagrpo.types import Prompt

kind, file, note, end = sys.argv[1:]
target = f"{file}:" + {"environment": "Shell", "agent": "agent", "tools": "tool"}[kind]
responders = Responders(MultiTurnSection(**{kind: [target] if kind == "tools" else target}, workers=1))

def start():
    columns = {"note": note}
    if kind == "environment":
        prompt = Prompt(1, (1,), "hi", columns)
        asyncio.run(responders.begin(Conversation(prompt, 0, 0, [{"role": "user", "content": "hi"}], 100)))
    elif kind == "agent":
        client = {"base_url": "", "api_key": "", "model": ""}
        responders._pool.submit(responders.agent._call("call", {"client": client, "arguments": columns | {"prompt": ""}}))
    else:
        responders._pool.submit(responders._call("use_tool", {"name": "tool", "arguments": columns}, 100.0))

start()
while not Path(note).exists() or not Path(note).read_text():
    time.sleep(0.01)
if end == "close":
    responders.close()
else:
    print("ready", flush=True)
    time.sleep(1000)
"""


REST_OF_ENDS = [("environment", "close"), ("agent", "SIGKILL"), ("agent", "close"), ("tools", "close")]


@pytest.mark.parametrize(
    ("kind", "end"),
    [
        ("environment", "SIGKILL"),
        pytest.param("tools", "SIGKILL", marks=pytest.mark.full),
        *[pytest.param(*both, marks=pytest.mark.full) for both in REST_OF_ENDS],
    ],
)
def test_what_user_code_has_started_ends_with_the_run(tmp_path, kind, end):
    (tmp_path / "mine.py").write_text(SHELL)
    words = [sys.executable, "-c", RUN, kind, str(tmp_path / "mine.py"), str(tmp_path / "note"), end]
    trainer = subprocess.Popen(words, stdout=subprocess.PIPE)
    try:
        if end == "SIGKILL":
            assert trainer.stdout.readline()
            trainer.kill()
        assert trainer.wait(60) in (0, -9)
    finally:
        trainer.kill()
        trainer.wait()
    pid, ends = int((tmp_path / "note").read_text()), time.monotonic() + 20
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" and time.monotonic() < ends:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"
