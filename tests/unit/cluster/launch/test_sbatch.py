"""The scripts of launch/ for sbatch, run by bash with stand-ins for Slurm's commands: their steps, the steps' arguments,
and their exit. tests/slurm runs train.sbatch on a real Slurm."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from megagrpo.cluster.launch.job import Cluster, place
from megagrpo.cluster.launch.slurm import sbatch_script
from megagrpo.config import load_config

ROOT = Path(__file__).parents[4]
HOSTILE = "a b'$(touch pwned)`touch pwned`\"; touch pwned;* \\"
SRUN = """#!/usr/bin/env bash
name=$(sed -n 's/^--job-name=//p' < <(printf '%s\\n' "$@"))
printf '%s\\0' "$@" >"$BOOK/$name.$(ls "$BOOK" | grep -c "^$name\\.")"
stat -c %a "$MEGAGRPO_TOKEN_FILE" >"$BOOK/mode"
cat "$MEGAGRPO_TOKEN_FILE" >"$BOOK/token"
echo "$MEGAGRPO_JOB $SLURM_JOB_END_TIME" >"$BOOK/environment"
trap 'exit 0' TERM
if [ "$name" = servers ] && [ "${SERVERS_FAIL:-}" = "" ]; then
  while [ $# -gt 0 ]; do [ "$1" = --urls ] && urls=$2; shift; done
  [ -n "${SERVERS_WAIT:-}" ] || echo http://127.0.0.1:1 >"$urls/n2.url"
  [ -z "${NODE_FAILS:-}" ] || echo "no GPU" >"$urls/n1.failed"
  echo $$ >"$BOOK/servers.pid"
  if [ -n "${SERVERS_DIE:-}" ]; then
    until [ -e "$BOOK/trainer.0" ]; do sleep 0.05; done
    echo "the last one is gone"
    exit 1
  fi
  /bin/sleep 30 & wait
fi
if [ "$name" = trainer ] && [ -n "${TRAINER_WAITS:-}" ]; then
  until [ -e "$BOOK/signal" ]; do sleep 0.05; done
  exit "$TRAINER_WAITS"
fi
rc=CODE_$name
exit "${!rc:-0}"
"""
COMMANDS = {
    "srun": SRUN,
    "scontrol": """#!/usr/bin/env bash
case "$1 $2" in
  "show hostnames") printf 'n1\\nn2\\n' ;;
  "show node") echo "NodeName=$3 NodeAddr=127.0.0.1 Port=1" ;;
  "show job") echo "JobId=7 JobState=${JOB_STATE:-RUNNING} Reason=None" ;;
  requeue*) echo requeued >>"$BOOK/requeue"; kill $PPID ;;
esac
""",
    "squeue": """#!/usr/bin/env bash
case "$*" in *--steps*) printf '7.0 trainer\\n7.1 servers\\n' ;; *) echo "${ENDS-2030-01-01T00:00:00}" ;; esac
""",
    "scancel": """#!/usr/bin/env bash
echo "$*" >>"$BOOK/scancel"
if [ "$2" = 7.0 ]; then touch "$BOOK/signal"; else kill "$(cat "$BOOK/servers.pid")"; fi
""",
}


@dataclass
class Job:
    """The result of a job: its exit code, its output, and the arguments of Slurm's commands."""

    code: int
    out: str
    book: Path
    folder: Path

    def words(self, step: str) -> list[str]:
        """The arguments of a step's srun."""
        return (self.book / f"{step}.0").read_text().split("\0")[:-1]

    def noted(self, name: str) -> str:
        """The arguments that a stand-in has recorded; "" for none."""
        file = self.book / name
        return file.read_text() if file.exists() else ""

    @property
    def steps(self) -> list[str]:
        """The steps that the script started."""
        order = ("preflight", "plan", "servers", "trainer")
        return [name for name in order if (self.book / f"{name}.0").exists()]


def start(tmp_path: Path, *overrides: str, cluster: Cluster | None = None, **environment: str) -> subprocess.Popen:
    """The script that megagrpo submit writes for the quickstart on two nodes without GPUs."""
    overrides = [f"run.output_dir={tmp_path}", "run.nodes=2", "rollout.placement=dedicated", *overrides]
    path = ROOT / "configs" / "quickstart.yaml"
    made, cluster = load_config(path, overrides), cluster or Cluster(gpus_per_node=0)
    script = tmp_path / "job.sh"
    placement = place(made.run.nodes, made.rollout, cluster)
    script.write_text(sbatch_script(made, str(path), overrides, cluster, placement))
    return in_a_job(tmp_path, script, **environment)


def in_a_job(tmp_path: Path, script: Path, *words: str, **environment: str) -> subprocess.Popen:
    """A script of launch/ in job 7, which has the nodes n1 and n2 and was submitted in the clone."""
    commands, book = tmp_path / "bin", tmp_path / "book"
    commands.mkdir(parents=True)
    book.mkdir()
    for name, text in COMMANDS.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    # Slurm has time to end the script
    (commands / "sleep").write_text('#!/bin/bash\n[ "$1" = 60 ] || exec /bin/sleep 0.05\n')
    (commands / "sleep").chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2", "BOOK": str(book)}
    path = {"PATH": f"{commands}:{os.environ['PATH']}"}
    bare = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return subprocess.Popen(
        ["bash", str(script), *words],
        cwd=ROOT,
        env=bare | slurm | path | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_step(tmp_path: Path, name: str) -> None:
    deadline = time.monotonic() + 20
    while not (tmp_path / "book" / f"{name}.0").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def end(process: subprocess.Popen, tmp_path: Path) -> Job:
    out, _ = process.communicate(timeout=30)
    return Job(process.returncode, out, tmp_path / "book", tmp_path / "quickstart.jobs" / "7")


def run(tmp_path: Path, *overrides: str, cluster: Cluster | None = None, **environment: str) -> Job:
    return end(start(tmp_path, *overrides, cluster=cluster, **environment), tmp_path)


def test_a_job_checks_then_starts_servers_then_the_trainer_with_their_addresses(tmp_path):
    job = run(tmp_path)
    assert job.code == 0, job.out
    assert job.steps == ["preflight", "plan", "servers", "trainer"]
    assert "--nodelist=n1,n2" in job.words("trainer") and "--nodelist=n2" in job.words("servers")
    urls = ["rollout.placement=external", "rollout.urls=[http://127.0.0.1:1]", "rollout.reconnect_timeout=600"]
    assert job.words("trainer")[-3:] == urls
    assert (
        "--head" not in job.words("servers")
        and job.words("plan")[-1] == "world_size=2"
        and "127.0.0.1:20007" in job.words("trainer")
    )
    assert job.noted("environment").split() == ["slurm-7", str(int(time.mktime((2030, 1, 1, 0, 0, 0, 0, 0, -1))))]
    assert "--signal=TERM 7.1" in job.noted("scancel") and job.noted("requeue") == ""


def test_nodes_of_one_server_get_the_address_of_its_first_node(tmp_path):
    spans = ("rollout.nodes_per_server=2", "rollout.tp=2")
    job = run(tmp_path, *spans)  # one file of addresses is enough
    words = job.words("servers")
    assert job.code == 0 and "--nodelist=n1,n2" in words and "rollout.servers=1" in words, job.out
    assert words[words.index("--head") + 1] == "127.0.0.1:10007" and "a server on each 2 nodes of n1,n2" in job.out
    assert job.words("trainer")[-2] == "rollout.urls=[http://127.0.0.1:1]"


def test_the_token_is_for_the_owner_only_and_in_no_command_line(tmp_path):
    job = run(tmp_path)
    token = job.noted("token")
    assert len(token) == 64 and job.noted("mode") == "600\n"
    assert (tmp_path / "quickstart.jobs").stat().st_mode & 0o007 == 0
    assert not any(token in word for step in job.steps for word in job.words(step)) and token not in job.out
    assert not (job.folder / "token").exists()


@pytest.mark.parametrize(("step", "steps"), [("preflight", ["preflight"]), ("plan", ["preflight", "plan"])])
def test_nothing_is_started_when_a_check_fails(step, steps, tmp_path):
    job = run(tmp_path, **{f"CODE_{step}": "1"})
    assert (job.code, job.steps) == (2, steps) and "nothing was started" in job.out and job.noted("requeue") == ""


def test_servers_that_do_not_start_end_the_job_with_their_last_words(tmp_path):
    job = run(tmp_path, SERVERS_FAIL="1", CODE_servers="2")
    assert (
        job.code == 1
        and "trainer" not in job.steps
        and "some servers failed to start or did not respond within" in job.out
    )


def test_one_node_without_servers_ends_the_job_although_the_others_go_on(tmp_path):
    job = run(tmp_path, SERVERS_WAIT="1", NODE_FAILS="1")
    assert job.code == 1 and "trainer" not in job.steps and "some servers failed to start" in job.out
    assert "--wait=0" in job.words("servers") and "--wait=60" in job.words("preflight")


@pytest.mark.parametrize("code", ["1", "2", "137"])
def test_a_trainer_that_fails_ends_the_job_with_its_code(code, tmp_path):
    job = run(tmp_path, CODE_trainer=code)
    assert job.code == int(code) and job.noted("requeue") == "" and "--signal=TERM 7.1" in job.noted("scancel")


@pytest.mark.parametrize(
    ("environment", "requeued", "said"),
    [
        ({}, True, "requeueing the job"),
        ({"JOB_STATE": "CANCELLED"}, False, "the job is CANCELLED"),
        ({"JOB_STATE": "PENDING"}, False, "the job is PENDING"),
        ({"SLURM_RESTART_COUNT": "10"}, False, "restart limit 10 reached"),
        ({"SLURM_RESTART_COUNT": "9"}, True, "requeueing the job"),
    ],
)
def test_a_trainer_that_wants_to_go_on_is_put_back_into_the_queue(environment, requeued, said, tmp_path):
    job = run(tmp_path, CODE_trainer="85", **environment)
    assert job.noted("requeue") == "requeued\n" * requeued and said in job.out
    assert job.code == 85 or requeued  # Slurm ends a script whose job it has requeued


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_the_script_reaches_the_trainer(number, tmp_path):
    process = start(tmp_path, TRAINER_WAITS="85")
    wait_for_step(tmp_path, "trainer")
    process.send_signal(number)
    job = end(process, tmp_path)
    assert "--signal=TERM 7.0" in job.noted("scancel") and f"got {number.name}" in job.out and job.noted("requeue")


@pytest.mark.parametrize(("code", "requeued"), [("1", True), ("137", True), ("2", False), ("0", False)])
def test_failures_are_tried_again_where_the_cluster_says_so(code, requeued, tmp_path):
    job = run(tmp_path, cluster=Cluster(gpus_per_node=0, restart_failed=True), CODE_trainer=code)
    assert job.noted("requeue") == "requeued\n" * requeued


def test_a_trainer_that_was_stopped_is_continued_whatever_its_exit_code(tmp_path):
    process = start(tmp_path, TRAINER_WAITS="143")
    wait_for_step(tmp_path, "trainer")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    job = end(process, tmp_path)
    assert job.noted("requeue") and job.noted("scancel").count("--signal=TERM 7.0") == 1


def test_a_signal_before_the_trainer_begins_starts_no_trainer(tmp_path):
    process = start(tmp_path, SERVERS_WAIT="1")
    wait_for_step(tmp_path, "servers")
    process.send_signal(signal.SIGTERM)
    job = end(process, tmp_path)
    assert "trainer" not in job.steps and job.noted("requeue")


@pytest.mark.parametrize("ends", ["", "NONE", "N/A"])
def test_a_job_without_an_end_has_no_time_limit(ends, tmp_path):
    assert run(tmp_path, ENDS=ends).noted("environment").split() == ["slurm-7"]


def test_the_tasks_of_an_array_are_one_job_for_their_run(tmp_path):
    assert run(tmp_path, SLURM_ARRAY_JOB_ID="5").noted("environment").split()[0] == "slurm-5"


@pytest.mark.parametrize(("again", "requeued"), [(False, ""), (True, "requeued\n")])
def test_when_all_servers_are_gone_for_good_the_trainer_saves_and_the_job_fails(again, requeued, tmp_path):
    job = run(tmp_path, cluster=Cluster(gpus_per_node=0, restart_failed=again), SERVERS_DIE="1", TRAINER_WAITS="85")
    assert job.noted("scancel") == "--signal=TERM 7.0\n" and job.noted("requeue") == requeued
    assert "all servers have ended and reached their restart limit" in job.out and "the last one is gone" in job.out
    assert job.code == 1 or again


def test_lines_of_setup_may_use_variables_that_are_not_set(tmp_path):
    """Set-up scripts of modules and conda read unset variables."""
    job = run(tmp_path, cluster=Cluster(gpus_per_node=0, setup=('echo "modules: $NOT_SET"',)))
    assert job.code == 0 and "modules: \n" in job.out


def test_attempts_log_apart(tmp_path):
    job = run(tmp_path, SLURM_RESTART_COUNT="3")
    assert [path.name for path in job.folder.iterdir()] == ["attempt_3"] and str(job.folder / "attempt_3") in job.words(
        "trainer"
    )


def test_hostile_values_arrive_as_they_are(tmp_path):
    cluster = Cluster(gpus_per_node=0, python=HOSTILE, interface=HOSTILE)
    job = run(tmp_path, f"data.system_prompt={json.dumps(HOSTILE)}", cluster=cluster)
    assert job.code == 0, job.out
    for step in job.steps:
        assert HOSTILE in job.words(step)
    for step in ("plan", "servers", "trainer"):
        assert f"data.system_prompt={json.dumps(HOSTILE)}" in job.words(step)
    assert not list(ROOT.glob("pwned")) and not list(tmp_path.rglob("pwned"))


# -------------------------------------------------------------------------------------------------------------- by hand

QUICKSTART = ("configs/quickstart.yaml", "run.nodes=2", "rollout.placement=dedicated")


def test_the_script_by_hand_starts_the_steps_of_megagrpo_submit(tmp_path):
    folders = [tmp_path / "submitted", tmp_path / "by_hand"]
    for folder in folders:
        folder.mkdir()
    words = [*QUICKSTART, f"run.output_dir={folders[1]}", "run.max_steps=3"]
    cluster = Cluster(gpus_per_node=8, python=sys.executable)
    script = ROOT / "launch" / "train.sbatch"
    jobs = [
        run(folders[0], "run.max_steps=3", cluster=cluster),
        end(in_a_job(folders[1], script, *words, PYTHON=sys.executable, SLURM_GPUS_ON_NODE="8"), folders[1]),
    ]
    assert [job.code for job in jobs] == [0, 0], jobs[1].out
    for step in ("preflight", "plan", "servers", "trainer"):
        submitted, by_hand = (
            sorted(word.replace(str(folder), "FOLDER") for word in job.words(step))
            for job, folder in zip(jobs, folders, strict=True)
        )
        assert submitted == by_hand


def test_the_script_by_hand_takes_a_cluster_and_the_pythons_of_this_machine(tmp_path):
    (tmp_path / "mine.yaml").write_text("gpus_per_node: 0\npython: my_python\nsetup: ['echo modules']\n")
    words = [*QUICKSTART, f"run.output_dir={tmp_path}"]
    environment = {"PYTHON": sys.executable, "MEGAGRPO_CLUSTER": str(tmp_path / "mine.yaml")}
    job = end(in_a_job(tmp_path, ROOT / "launch" / "train.sbatch", *words, **environment), tmp_path)
    assert job.code == 0 and "modules\n" in job.out and "my_python" in job.words("trainer"), job.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "usage: sbatch launch/train.sbatch CONFIG [key=value ...] [--resume]"),
        ([*QUICKSTART, "run.max_stepz=1"], "did you mean run.max_steps?"),
        (
            [*QUICKSTART, "run.nodes=3"],
            "run.nodes is 3, but the job has 2 node(s); use sbatch --nodes=3, or set run.nodes",
        ),
    ],
)
def test_a_mistake_by_hand_ends_the_job_with_2_before_any_step(words, message, tmp_path):
    process = in_a_job(
        tmp_path, ROOT / "launch" / "train.sbatch", *words, PYTHON=sys.executable, SLURM_GPUS_ON_NODE="0"
    )
    job = end(process, tmp_path)
    assert (job.code, job.steps) == (2, []) and message in job.out


@pytest.mark.parametrize(
    ("script", "words", "command"),
    [
        ("evaluate", ["run.yaml", "--checkpoint", "best"], "eval run.yaml --checkpoint best"),
        ("convert", ["convert", "MODEL", "OUT"], "launch 1 convert MODEL OUT"),
        ("convert", ["export", "CHECKPOINT", "OUT", "--tp", "4"], "launch 4 export CHECKPOINT OUT --tp 4"),
    ],
)
def test_the_other_scripts_run_their_command(script, words, command, tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$PYTHONUNBUFFERED $*"\nexit 3\n')
    python.chmod(0o755)
    environment = {"PYTHON": str(python), "NPROC": "4" if "launch 4" in command else ""}
    job = end(in_a_job(tmp_path, ROOT / "launch" / f"{script}.sbatch", *words, **environment), tmp_path)
    assert (job.code, job.out) == (3, f"1 -m megagrpo {command}\n")


def test_the_script_of_servers_runs_their_command_on_each_node(tmp_path):
    words = ["run.yaml", "rollout.servers=2", "--urls", "a b"]
    job = end(in_a_job(tmp_path, ROOT / "launch" / "serve.sbatch", *words, PYTHON=sys.executable), tmp_path)
    assert job.words("") == ["--cpu-bind=none", sys.executable, "-m", "megagrpo", "serve", *words]


@pytest.mark.parametrize("script", ["serve", "evaluate", "convert"])
def test_a_script_without_arguments_shows_its_usage(script, tmp_path):
    job = end(in_a_job(tmp_path, ROOT / "launch" / f"{script}.sbatch"), tmp_path)
    assert job.code == 2 and f"usage: sbatch launch/{script}.sbatch " in job.out
