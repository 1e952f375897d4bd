"""Profiles of named steps: which steps and ranks, their files, and configs that a machine cannot profile."""

import gzip
import json
import math

import pytest
import torch

from megagrpo.config import ConfigError, Problem, ProblemError, load_config
from megagrpo.config.sections.run import ProfileSection
from megagrpo.planner import plan
from megagrpo.planner.rules.plan_problems import layout_problems
from megagrpo.platform.process.phases import Phases
from megagrpo.records.profile import Profiler, check_profile
from tests.unit.records.test_metrics import CONFIG


def profiler(folder, rank: int, said: list[str], *overrides: str) -> Profiler:
    return Profiler(load_config(CONFIG, overrides).run.profile, folder, rank, said.append)


def work(phases: Phases, profiler: Profiler, step: int) -> torch.Tensor:
    phases.mark = profiler.mark
    with profiler.step(step), phases("train"):
        result = torch.arange(64.0).reshape(8, 8) @ torch.ones(8, 8)
        with phases("optimizer"):
            result += 1
    return result


def test_a_trace_of_a_named_step_holds_its_phases_and_operations(tmp_path):
    said: list[str] = []
    made, phases = profiler(tmp_path, 0, said, "run.profile.steps=[2]"), Phases()
    results = [work(phases, made, step) for step in (1, 2, 3)]
    assert torch.equal(results[0], results[1]) and torch.equal(results[1], results[2])
    trace, table = (
        tmp_path / "profile" / "step_000002_rank_0.trace.json.gz",
        tmp_path / "profile" / "step_000002_rank_0.top.txt",
    )
    assert sorted((tmp_path / "profile").iterdir()) == sorted([trace, table]) and said == [
        f"profile of step 2: profile/{trace.name}"
    ]
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    spans = {event["name"]: (event["ts"], event["ts"] + event["dur"]) for event in events if event.get("ph") == "X"}
    assert {"step 2", "train", "optimizer", "aten::mm"} <= spans.keys()
    for outer, inner in (("step 2", "train"), ("train", "optimizer"), ("train", "aten::mm")):
        assert spans[outer][0] <= spans[inner][0] and spans[inner][1] <= spans[outer][1]
    assert "aten::mm" in table.read_text()


def test_only_named_ranks_write_and_an_error_in_the_step_leaves_no_file(tmp_path):
    said: list[str] = []
    options = "run.profile={steps: [1], ranks: [1]}"
    for rank in (0, 1):
        work(Phases(), profiler(tmp_path, rank, said, options), 1)
    assert {path.name.partition(".")[0] for path in (tmp_path / "profile").iterdir()} == {"step_000001_rank_1"} and len(
        said
    ) == 1
    failing = profiler(tmp_path / "failing", 1, said, options)
    with pytest.raises(KeyError), failing.step(1):
        raise KeyError
    assert list((tmp_path / "failing" / "profile").iterdir()) == [] and len(said) == 1
    assert math.isfinite(work(Phases(), failing, 2).sum().item())


@pytest.mark.parametrize("tool", ["nsys", "memory"])
def test_tools_of_gpus_are_refused_without_one(tool):
    section = ProfileSection(steps=[1], tool=tool)
    check_profile(section, has_gpu=True)
    check_profile(ProfileSection(tool=tool), has_gpu=False)  # without steps the tool does not matter
    with pytest.raises(ProblemError) as error:
        check_profile(section, has_gpu=False)
    said = f"{tool} needs a GPU, and this machine has none; set it to torch"
    assert error.value.problems == (Problem(("run.profile.tool",), said),)


def test_ranks_and_steps_that_do_not_exist_are_problems():
    config = load_config(CONFIG, ["run.profile.steps=[1]", "run.profile.ranks=[0, 4]"])
    assert not any(layout_problems(config, 5))
    said = "run.profile.ranks: rank 4 does not exist: the run has 4 rank(s), counted from 0; leave ranks empty for all"
    assert list(map(str, layout_problems(config, 4))) == [said] == list(map(str, plan(config, 4).problems))
    with pytest.raises(
        ConfigError, match=r"run.profile.steps: step 11 is after the last step, run.max_steps 8; name an earlier step"
    ):
        load_config(CONFIG, ["run.profile.steps=[3, 11]"])
    with pytest.raises(ConfigError, match=r"run.profile.tool: .*(torch|nsys|memory)"):
        load_config(CONFIG, ["run.profile.tool=perf"])
    with pytest.raises(ConfigError, match=r"run.profile.steps"):
        load_config(CONFIG, ["run.profile.steps=[0]"])
