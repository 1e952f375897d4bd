"""The number of calls between the command line and the formula of the loss, in a training step on one rank without an
engine."""

import json
import sys
from pathlib import Path

import yaml
from ranks import run_ranks
from tiny_policy import tiny_model, tiny_run
from trainer_alone import trainer_alone

from megagrpo.__main__ import main
from megagrpo.algorithms.policy_losses import clipped
from megagrpo.families.hf_config import load_hf_config
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.proof.verify.verified_step import fill_weights
from megagrpo.records.checkpoints.checkpoint import Checkpointer
from megagrpo.records.rows.dump import StepDumps
from megagrpo.trainer.methods import method_table
from megagrpo.trainer.trainer import Trainer

# calls, including both ends; three of them are Megatron's, two the command and its function of the API, one the loop
# of all methods
BUDGET = 13


def build(config, folder, layout, resources) -> Trainer:
    """Make a trainer without servers for the model in `folder`."""
    hf_config = load_hf_config(folder)
    policy = MegatronPolicy(config, layout, hf_config)
    fill_weights(policy, hf_config, layout)
    policy.weights_changed()
    dumps = StepDumps(policy, folder / "dumps", folder, print)
    saver = Checkpointer(folder / "checkpoints", layout, policy, 1, folder)
    return trainer_alone(config, policy, None, folder, [dumps], saver)


def train(folder: Path) -> list[list[str]]:
    """Run `megagrpo train` for one step; return the calls from the command line to the clip, for each computation of
    the clip."""
    found: list[list[str]] = []

    def note(*_: object) -> None:
        frame, calls = sys._getframe(1), []
        while frame.f_code is not main.__code__:
            calls.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}")
            frame = frame.f_back
        found.append(["__main__.main", *reversed(calls)])

    method_table.BUILDERS["grpo"] = build
    tool, event = sys.monitoring.PROFILER_ID, sys.monitoring.events.PY_START
    sys.monitoring.use_tool_id(tool, "call depth")
    sys.monitoring.register_callback(tool, event, note)
    sys.monitoring.set_local_events(tool, clipped.__code__, event)
    assert main(["train", str(folder / "config.yaml")]) == 0
    return found


def test_the_clip_is_few_calls_below_the_command_line(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_model("llama_tied").raw))
    (tmp_path / "train.jsonl").write_text('{"prompt": "What is 1 + 2?", "answer": "3"}\n')
    config = tiny_run(
        algorithm=dict(loss_type="grpo", beta=0.0),
        model=dict(path=str(tmp_path), precision="fp32"),
        data=dict(train=dict(source=str(tmp_path / "train.jsonl"))),
    )
    values = config.model_dump(mode="json", exclude_unset=True)
    values["run"]["max_steps"] = 1  # tiny_run sets its own
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    (found,) = run_ranks(train, 1, tmp_path)
    shortest = min(found, key=len)
    assert len(shortest) <= BUDGET, "\n".join(shortest)
    assert {"trainer.step", "schedules.forward_step"} < set(shortest)
