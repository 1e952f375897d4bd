"""Dry runs of the GPU benchmarks without a GPU: their numbers add up, and parts that fail or hang do not stop the
others."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import logprobs, sleep_wake, train_step, weight_sync, whole_step
from benchmarks.gpu.all import PARTS, Part
from benchmarks.gpu.all import main as run_all
from benchmarks.gpu.setting import Table, shape
from megagrpo.config import load_config
from megagrpo.families.hf_config import load_hf_config
from megagrpo.families.weight_sources import shape_folder
from megagrpo.planner.costs.gpu_specs import GPUS
from megagrpo.planner.costs.workload import Lengths
from megagrpo.planner.times.step_times import step_times
from megagrpo.platform import device

ROOT = Path(__file__).parents[3]
KNOWN = {"0.5b": 494.0e6, "1.5b": 1543.7e6, "7b": 7615.6e6, "30b-a3b": 30532.1e6}  # published parameter counts
CASE = re.compile(
    r"^(?P<name>\S+): \w+, (?P<layers>\d+) layers of \d+, (?P<parameters>\d+) parameters, (?P<blocks>\d+) of the "
    r"blocks and "
    r"(?P<head>\d+) of the head meet a token\n  samples +(?P<samples>\d+), (?P<tokens>\d+) tokens, (?P<responses>\d+) "
    r"of responses.*\n"
    r"  train step +(?P<flops>\S+) FLOPs = (?P<sum>.*) \+ 3 x (?P<attention>\S+)\n"
    r"  predicted +(?P<seconds>\S+) s = (?P<tflops>\d+) TFLOP/s; log-probs (?P<logprobs>\S+) s; (?P<gib>\S+) GiB "
    r"\(bf16\)",
    re.MULTILINE,
)


def dry(module, capsys, *words: str) -> str:
    assert module.main(["--dry-run", *words]) == 0
    return capsys.readouterr().out


def test_a_dry_train_step_counts_six_flops_for_each_parameter_and_token_and_fits_its_gpu(capsys):
    cases = [match.groupdict() for match in CASE.finditer(dry(train_step, capsys, "--recipes", "none"))]
    assert [case["name"] for case in cases] == [*KNOWN]
    for case in cases:
        blocks, head, tokens, responses = (int(case[key]) for key in ("blocks", "head", "tokens", "responses"))
        assert case["sum"] == f"6 x {blocks} x {tokens} + 6 x {head} x {responses}"
        flops, attention, seconds = float(case["flops"]), float(case["attention"]), float(case["seconds"])
        assert flops == pytest.approx(6 * blocks * tokens + 6 * head * responses + 3 * attention, rel=1e-6)
        assert flops / seconds / 1e12 == pytest.approx(int(case["tflops"]), rel=0.03)
        assert float(case["logprobs"]) == pytest.approx(seconds / 3, rel=0.1, abs=0.01)  # backward is two forwards
        assert float(case["gib"]) < GPUS["h200"].memory_gib
        whole = shape(case["name"])
        if int(case["layers"]) == whole["num_hidden_layers"]:
            assert int(case["parameters"]) == pytest.approx(KNOWN[case["name"]], rel=1e-3)
        # Attention scores and their products with values: half of all token pairs in a sample of maximal length.
        width = whole["num_attention_heads"] * whole.get(
            "head_dim", whole["hidden_size"] // whole["num_attention_heads"]
        )
        assert 0 < attention < int(case["layers"]) * 4 * width * tokens * 2048 / 2


def test_a_small_gpu_gets_fewer_layers_and_those_that_are_asked_for_are_there(capsys):
    layers = {
        gpu: int(CASE.search(dry(train_step, capsys, "--models", "7b", "--recipes", "none", "--gpu", gpu))["layers"])
        for gpu in ("h100", "h200")
    }
    assert 1 < layers["h100"] < layers["h200"] < 28
    words = ["--models", "7b", "--recipes", "none", "--layers", "28", "train.optimizer_state_dtype=fp8"]
    words.append("train.max_tokens_per_micro_batch=6144")
    said = dry(train_step, capsys, *words)
    assert CASE.search(said)["layers"] == "28" and float(CASE.search(said)["gib"]) < 139


def test_a_dry_train_step_predicts_each_precision_and_says_why_one_cannot_be(capsys):
    said = dry(train_step, capsys, "--models", "7b", "--recipes", "none", "tensorwise", "blockwise", "blockwise_kept")
    predicted = {
        name: (float(s), float(gib))
        for s, gib, name in re.findall(r"predicted +(\S+) s = .* (\S+) GiB \((\w+)\)", said)
    }
    seconds, gib = ({name: pair[i] for name, pair in predicted.items()} for i in (0, 1))
    assert seconds.keys() == {"bf16", "tensorwise", "blockwise", "blockwise_kept"}
    assert seconds["bf16"] > 1.2 * seconds["blockwise"] and gib["bf16"] == gib["blockwise_kept"] < gib["blockwise"]
    said = dry(train_step, capsys, "--models", "7b", "--recipes", "none", "blockwise_kept", "lora.rank=8")
    assert "(bf16)" in said and "blockwise_kept: " in said and "model.fp8_param" in said


def test_a_dry_weight_sync_counts_two_bytes_for_each_parameter(capsys):
    said = dry(weight_sync, capsys)
    parameters, size, seconds = re.search(r"7b: (\d+) parameters, (\d+) bytes.*\n.*a copy takes (\S+) s", said).groups()
    assert int(size) == 2 * int(parameters) == pytest.approx(2 * KNOWN["7b"], rel=1e-3)
    assert float(seconds) == pytest.approx(2 * int(size) / (GPUS["h200"].memory_gb_per_s * 1e9), rel=0.01)


def test_a_dry_sleep_and_wake_has_the_plans_memory(capsys):
    def said(*words: str) -> tuple[float, float, str]:
        text = dry(sleep_wake, capsys, *words)
        return *(float(re.search(rf"{phase} +(\S+) GiB", text)[1]) for phase in ("generate", "train")), text

    generate, train, text = said()
    moved = float(re.search(r"(\S+) GiB leave the GPU", text)[1])
    assert generate == 55.6 and "0.4 x 139 = 55.6 GiB" in text
    # weights 2, masters 4, moments 8; gradients (4) stay on the device
    assert moved == pytest.approx(14 * KNOWN["1.5b"] / 2**30, rel=0.01)
    beside, same, text = said("train.offload=false")
    assert (
        beside == pytest.approx(55.6 + 18 * KNOWN["1.5b"] / 2**30, rel=0.01)
        and same == train
        and "nothing leaves the GPU" in text
    )


def test_dry_logprobs_count_products_and_bytes(capsys):
    said = dry(logprobs, capsys, "--tokens", "4096", "--shapes", "qwen2.5-7b")
    assert "T=4096 H=3584 V=151936" in said
    rows = {line[:26].strip(): line[26:].split() for line in said.splitlines() if line.startswith(("fused", "chunked"))}
    flops = 2 * 4096 * 151936 * 3584 / 1e12
    assert rows["fused"][:2] == ["3", f"{3 * flops:.1f}"] and rows["fused, late gradients"][:2] == [
        "4",
        f"{4 * flops:.1f}",
    ]
    assert rows["fused, pass"][1:] == [f"{flops:.1f}", "0.01", "0.00"]
    assert float(rows["fused"][2]) < 1.02 < float(rows["chunked"][2])


@pytest.mark.skipif(device.has_gpu(), reason="a GPU would run it")
def test_logprobs_without_a_gpu_are_not_measured():
    with pytest.raises(SystemExit, match="needs a GPU; --dry-run prints"):
        logprobs.main([])


@pytest.mark.parametrize("model", ["135m", "1.5b"])
def test_a_dry_whole_step_shows_the_plan_and_the_command(model, capsys):
    said = dry(whole_step, capsys, "--model", model)
    assert "predicted seconds" in said and "problem(s)" not in said and "megagrpo train configs/quickstart.yaml" in said
    assert "weights   cuda_ipc" in said


def test_a_whole_step_is_the_median_of_its_later_steps_beside_a_plan_for_the_lengths_it_had():
    line = {
        "completions/mean_length": 24.0,
        "token_mult_prob_error": 1.001,
        "memory_gb": 4.0,
        "weight_sync/gigabytes": 0.27,
    }
    line |= {"num_tokens": 64 * (40 + 24), "tokens_per_second": 1000.0}
    lines = [
        line | {f"time/{phase}": seconds for phase in (*whole_step.PHASES, "step")} for seconds in (9.0, 1.0, 3.0, 2.0)
    ]
    config = load_config(whole_step.QUICKSTART, ["rollout.max_completion_length=24"])
    rows = dict(row.split(maxsplit=1) for row in whole_step.report(config, lines, GPUS["h200"]).splitlines()[1:7])
    assert {row.split()[0] for row in rows.values()} == {"2.000"} and rows["reward"].split()[1] == "-"
    made = step_times(config, load_hf_config(shape_folder(config.model.path)), 1, GPUS["h200"], Lengths(40, 24, 24))
    assert float(rows["step"].split()[1]) == pytest.approx(made.step, abs=1e-3)


def test_parts_that_fail_or_hang_do_not_stop_the_others_and_what_is_done_is_not_done_again(tmp_path, capsys):
    parts = [
        Part("well", ("-c", "print('first'); open('{}', 'a').write('x')".format(tmp_path / "times")), 60),
        Part("fails", ("-c", "print('half', flush=True); raise SystemExit(3)"), 60),
        Part("hangs", ("-c", "import time; print('begun', flush=True); time.sleep(60)"), 1),
        Part("last", ("-c", "print('last')"), 60),
    ]
    assert run_all(["--folder", str(tmp_path)], parts) == 2
    results = (tmp_path / "results.txt").read_text()
    for line in (
        "first",
        "=== well: exit code 0",
        "half",
        "=== fails: exit code 3",
        "begun",
        "=== hangs: ended at its limit of 1 s",
        "last",
    ):
        assert line in results
    report = json.loads((tmp_path / "report.json").read_text())
    assert {name: part["exit_code"] for name, part in report["parts"].items()} == dict(
        well=0, fails=3, hangs=None, last=0
    )
    assert (
        "half" in report["parts"]["fails"]["output"]
        and report["findings"]
        and report["parts"]["hangs"]["result"].startswith("ended at its")
    )
    assert run_all(["--folder", str(tmp_path), "--only", "last"], parts) == 0
    assert run_all(["--folder", str(tmp_path), "--minutes", "0.1"], parts) == 2  # those two are left, and no time
    assert (tmp_path / "times").read_text() == "x" and "fails: no time left" in capsys.readouterr().out


def test_parts_have_names_of_their_own_and_files_that_are_there():
    assert len({part.name for part in PARTS}) == len(PARTS)
    for part in PARTS:
        assert all((ROOT / word.rpartition("=")[2]).exists() for word in part.words if word.endswith(".py")), part.name


def test_a_table_is_aligned_and_prints_what_is_missing_as_a_dash(capsys):
    table = Table(model__layers="<12", MFU="6.1%", of_GEMM="7.1%")
    table.row("7b/18", 0.512, None)
    assert capsys.readouterr().out == "model/layers    MFU of GEMM\n7b/18         51.2%       -\n"


@pytest.mark.full
@pytest.mark.skipif(device.has_gpu(), reason="a GPU measures other models")
def test_the_scripts_measure_where_there_is_no_gpu_too():
    small = ["rollout.max_prompt_length=32", "rollout.max_completion_length=32", "model.precision=fp32"]
    # its process group ends with its own process
    words = ["--models", "tiny", "--recipes", "none", "--steps", "1", *small]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.train_step", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("tiny/2")]
    assert [row[2] for row in rows] == ["train", "log-probs"] and all(float(row[3]) > 0 for row in rows)


@pytest.mark.full
def test_every_part_has_a_dry_run():
    command = [sys.executable, "-m", "benchmarks.gpu.all", "--dry-run"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert all(f"=== {part.name}, " in done.stdout for part in PARTS)
