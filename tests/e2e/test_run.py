"""Three steps of a tiny model on two ranks through launch/local.sh, with a vLLM server of two pipeline stages: the files and
processes left."""

import gzip
import json
import math
import socket
from pathlib import Path

import pytest

from megagrpo.__main__ import main
from megagrpo.config import load_config
from megagrpo.engine.http.access import address_of
from tests.e2e import world
from tests.listening import LOOPBACK, listening

STEPS, PROMPTS, GROUP = 3, 4, 4
OPTIONS = "run.max_steps=3 run.trackers=[tensorboard] run.log_completions_steps=2 parallel.tp=2 rollout.pp=2".split()
OPTIONS += ["run.peak_tflops=0.1", "run.profile.steps=[2]"]
METRICS = {
    *("step", "wall_time", "weight_version", "checkpoint/failures", "num_tokens", "num_generated_tokens"),
    *("tokens_per_second", "tokens_per_second_per_gpu", "generated_tokens_per_second", "mfu"),
    *("memory_gb", "memory/resident_gb", "memory/resident_max_gb", "memory/host_gb"),
    *"reward reward_std reward_std_batch frac_reward_zero_std rewards/low_bytes/mean rewards/low_bytes/std".split(),
    *(
        "rewards/low_bytes/timeouts",
        "rewards/low_bytes/exceptions",
        "rewards/low_bytes/unscorable",
        "rewards/low_bytes/seconds",
    ),
    *("loss", "grad_norm", "learning_rate", "entropy"),
    *("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"),
    *(
        "token_mult_prob_error gen_kl_error policy_kl_error js_divergence_error mismatch/alarms train/skipped_steps"
    ).split(),
    *("sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max"),
    *("completions/mean_length", "completions/min_length", "completions/max_length", "completions/clipped_ratio"),
    *("packing/micro_batch_imbalance", "packing/rank_imbalance"),
    *(
        "time/step time/generate time/reward time/logprobs time/train time/optimizer time/sync "
        "idle/trainer idle/servers"
    ).split(),
    *(f"weight_sync/{what}" for what in ("publish_seconds", "load_seconds", "checksum_seconds", "gigabytes")),
}


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """The run, and its processes, files in shared memory and listening sockets before its end. Its environment names an
    external network interface if this machine has one."""
    output = tmp_path_factory.mktemp("run")
    options = [*OPTIONS, f"data.eval.source={world.folder()}/eval.jsonl"]
    interfaces = [name for _, name in socket.if_nameindex() if name != "lo" and has_address(name)]
    process = world.start(output, *options, launched=True, NPROC="2", GLOO_SOCKET_IFNAME=[*interfaces, "lo"][0])
    world.wait_for(lambda: world.steps_done(output) or process.poll() is not None, "first step")
    processes = world.family(process.pid)
    files, addresses = world.shared_memory(processes), listening(processes)
    environments = b"".join(
        Path(f"/proc/{pid}/environ").read_bytes() for pid in processes if Path(f"/proc/{pid}").exists()
    )
    run = world.finish(process, output)
    assert run.code == 0, run.out + run.err
    return run, processes, files, addresses, environments


def has_address(interface):
    try:
        return bool(address_of(interface))
    except ValueError:
        return False


def test_every_step_and_evaluation_is_a_line_of_finite_metrics(watched):
    run = watched[0]
    assert [line["step"] for line in run.metrics] == [1, 2, 3]
    for line in run.metrics:
        optional = {"completions/mean_terminated_length"}  # absent when every response was cut
        assert line.keys() - optional == METRICS
        assert all(math.isfinite(value) for value in line.values())
        assert line["weight_version"] == line["step"] + 1 and line["learning_rate"] == 1e-3 and line["grad_norm"] > 0
        assert line["token_mult_prob_error"] == pytest.approx(1, abs=1e-3)  # vLLM and the trainer agree on every token
        assert 0 < line["mfu"] < 1 and 0 < line["time/optimizer"] < line["time/train"]
        assert line["tokens_per_second_per_gpu"] == line["tokens_per_second"] / 2  # ranks
        assert (
            line["memory/resident_gb"] <= line["memory/resident_max_gb"]
            and line["memory/resident_gb"] <= line["memory_gb"] * 1.01
        )
        assert line["mismatch/alarms"] == line["train/skipped_steps"] == 0
    evaluations = [line for line in run.lines if "eval/reward" in line]
    assert [line["step"] for line in evaluations] == [0, 3] and len(run.lines) == 5


def test_every_rollout_is_a_line_of_completions(watched):
    run = watched[0]
    assert len(run.completions) == STEPS * PROMPTS * GROUP
    for step, line in enumerate(run.metrics, 1):
        rows = [row for row in run.completions if row["step"] == step]
        prompts = [row["prompt_id"] for row in rows]
        assert len(set(prompts)) == PROMPTS and prompts == [p for p in dict.fromkeys(prompts) for _ in range(GROUP)]
        assert {row["weight_version"] for row in rows} == {step} and all(
            row["prompt"].startswith("What is") for row in rows
        )
        assert sum(row["reward"] for row in rows) / len(rows) == pytest.approx(line["reward"])
        assert sum(row["advantage"] for row in rows) == pytest.approx(0, abs=1e-9)
        assert sum(row["num_tokens"] for row in rows) / len(rows) == pytest.approx(line["completions/mean_length"])
        assert all(
            (row["finish_reason"] == "length" and row["num_tokens"] == 12) or row["finish_reason"] == "stop"
            for row in rows
        )


def test_the_profiled_step_has_a_trace_of_every_rank_with_all_phases(watched):
    files = sorted(path.name for path in (watched[0].folder / "profile").iterdir())
    assert files == [f"step_000002_rank_{rank}.{kind}" for rank in (0, 1) for kind in ("top.txt", "trace.json.gz")]
    phases = {"generate", "reward", "logprobs", "train", "optimizer", "sync", "step 2"}
    for rank, expected in ((0, phases), (1, phases - {"generate", "reward"})):  # rank 0 leads the only replica
        trace = json.loads(
            gzip.decompress((watched[0].folder / "profile" / f"step_000002_rank_{rank}.trace.json.gz").read_bytes())
        )
        names = {event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"}
        assert names & phases == expected
    assert "profile of step 2: " in watched[0].out


def test_tokens_messages_and_starts_are_recorded(watched):
    folder, completions = watched[0].folder, watched[0].completions
    tokens = read_lines(folder / "tokens.jsonl")
    # run.log_tokens_groups: 2
    assert [row["step"] for row in tokens] == [step for step in (1, 2, 3) for _ in range(2 * GROUP)]
    for row in tokens:
        response = [line for line in completions if line["step"] == row["step"]][row["sample"]]
        assert row["prompt_id"] == response["prompt_id"] and len(row["tokens"]) == response["num_tokens"] == len(
            row["entropy"]
        )
        if response["advantage"] == 0:  # not trained
            continue
        # vLLM and the trainer agree on every token
        assert row["trainer_logprobs"] == pytest.approx(row["rollout_logprobs"], abs=2e-3)
        assert all(entropy > 0 for entropy in row["entropy"])
    assert [row for row in tokens if row["entropy"][0] is not None]
    messages = [row["text"] for row in read_lines(folder / "messages.jsonl")]
    assert f"run folder: {folder}" in messages and messages[-1] == "finished 3 steps"
    (start,) = read_lines(folder / "starts.jsonl")
    assert (
        start["ranks"] == 2
        and start["layout"]["tp"] == 2
        and start["layout"]["dp"] == 1
        and start["dtype"] == "float32"
    )
    assert start["step"] == 0 and {"megagrpo", "torch", "megatron-core"} <= set(start["versions"]) and start["device"]


def test_the_run_has_a_report(watched, tmp_path, capsys):
    assert main(["report", str(watched[0].folder), "-o", str(tmp_path / "report.html")]) == 0
    assert capsys.readouterr().out.endswith(" MB)\n") and (tmp_path / "report.html").stat().st_size > 50_000


def read_lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_config_that_ran_is_kept_and_loads_back(watched):
    run = watched[0]
    config = load_config(run.folder / "resolved.yaml")
    assert config.run.max_steps == STEPS and config.rollout.num_generations == GROUP
    assert run.folder == Path(config.run.output_dir) / config.run.name
    words = world.arguments(run.folder.parent, *OPTIONS, launched=True)
    given = load_config(words[0], [*words[1:], f"data.eval.source={world.folder()}/eval.jsonl"])
    assert config == given


def test_tensorboard_events_hold_every_step(watched):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(watched[0].folder / "tensorboard"))
    events.Reload()
    rewards = [(event.step, event.value) for event in events.Scalars("reward")]
    assert rewards == [(line["step"], pytest.approx(line["reward"])) for line in watched[0].metrics]


def test_the_last_step_is_saved(watched):
    assert watched[0].saved == ["step_000003"]


def test_the_console_tells_steps_evaluations_and_a_sample(watched):
    lines = [line for line in watched[0].out.splitlines() if line.strip()]
    for step, line in enumerate([line for line in lines if line.startswith("step ")], 1):
        assert line.startswith(f"step {step}/3  reward ")
    assert sum("generate " in line and " + train " in line for line in lines) == 3
    assert max(map(len, lines)) <= 100
    assert [line.split("  ")[0] for line in lines if line.startswith("evaluation")] == [
        f"evaluation after step {n}" for n in (0, 3)
    ]
    assert sum(line.startswith("    prompt    What is") for line in lines) == 1  # log_completions_steps=2: only step 2
    assert any(line.startswith("checkpoint ") and line.endswith("step_000003") for line in lines)
    assert "Traceback" not in watched[0].err and "Error" not in watched[0].err


def test_no_socket_of_the_run_listens_on_an_address_that_other_hosts_reach(watched):
    assert watched[3] == {LOOPBACK}, "a socket listens on another address than 127.0.0.1"


def test_no_environment_of_the_run_holds_the_token_of_its_servers(watched):
    assert b"MEGAGRPO_TOKEN_FILE=/dev/stdin" in watched[4] and b"MEGAGRPO_TOKEN=" not in watched[4]


def test_no_process_and_no_shared_memory_outlives_the_run(watched):
    _, processes, files, *_ = watched
    assert len(processes) >= 9  # launcher, two ranks, reward worker, supervisor, and the four or more processes of vLLM
    assert any(file.name.startswith("megagrpo-") for file in files)
    assert [pid for pid in processes if world.alive(pid)] == []
    assert [file for file in files if file.exists()] == []
