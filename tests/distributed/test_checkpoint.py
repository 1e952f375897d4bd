"""Checkpoints over two ranks: complete or absent, whatever fails and on whichever rank."""

import json
import os
import re
import resource
import shutil

import pytest
import torch
from ranks import run_ranks
from test_build_and_bridge import run_tool
from tiny_policy import tiny_model, tiny_run

from megagrpo.algorithms.losses import make_loss
from megagrpo.checkpoint import Checkpointer, CheckpointError, checkpoints, newest_checkpoint
from megagrpo.data.packing import pack, packing_rules
from megagrpo.parallel.layout import init_layout
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.types import TrainState
from megagrpo.verify.shrink import random_samples
from megagrpo.verify.step import fill_weights


@pytest.fixture
def model(tmp_path_factory):
    """A folder with a model's side files, which a checkpoint keeps a copy of."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(tiny_model("llama_tied").raw))
    return folder


def checkpointer(model, folder, keep=2, **train):
    """This rank's part of a policy that has taken one step, and what saves it."""
    config, hf_config = tiny_run(dict(tp=2)), tiny_model("llama_tied")
    config = config.model_copy(update=dict(train=config.train.model_copy(update=train)))
    layout = init_layout(config.parallel)
    policy = MegatronPolicy(config, layout, hf_config)
    fill_weights(policy, hf_config, layout)
    policy.weights_changed()
    batch = pack(random_samples(), packing_rules(config, policy.shares_prompts), layout.dp_rank, layout.dp_size)
    policy.train_step(batch, make_loss(config), batch.num_tokens)
    return policy, Checkpointer(folder, layout, policy, keep, model)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def limit_files(limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _one_rank_cannot_write(model, folder, failing):
    _, saver = checkpointer(model, folder)
    saver.save(TrainState(step=1))
    if int(os.environ["RANK"]) == failing:
        limit_files(50_000)
    with pytest.raises(CheckpointError) as caught:
        saver.save(TrainState(step=2))
    left = names(folder)
    torch.distributed.barrier()
    limit_files(resource.RLIM_INFINITY)
    saver.save(TrainState(step=3))
    return str(caught.value), left, names(folder)


@pytest.mark.parametrize("failing", [0, 1])
def test_when_one_rank_cannot_write_no_rank_has_saved_and_the_next_save_works(failing, model, tmp_path):
    for message, left, after in run_ranks(_one_rank_cannot_write, 2, model, tmp_path, failing):
        assert "no checkpoint was written to" in message and "step_000002, earlier ones are kept" in message
        assert [name for name in left if not name.startswith(".")] == ["step_000001"] and after == ["step_000001", "step_000003"]
    assert f"rank {failing} could not write its part" in run_ranks(_one_rank_cannot_write, 2, model, tmp_path / "again", failing)[0][0]


def _round_trip(model, folder):
    policy, saver = checkpointer(model, folder, keep=1)
    weights = [p.detach().clone() for chunk in policy.chunks for p in chunk.parameters()]
    torch.manual_seed(5)
    saved = TrainState(step=7, weight_version=9, cursor=56)
    path = saver.save(saved)
    drawn = torch.rand(4)
    with torch.no_grad():
        for chunk in policy.chunks:
            for parameter in chunk.parameters():
                parameter.zero_()
    restored = saver.load(path)
    found = [p.detach() for chunk in policy.chunks for p in chunk.parameters()]
    saver.save(TrainState(step=8))
    return restored == saved, all(map(torch.equal, found, weights)), torch.equal(torch.rand(4), drawn), names(folder)


def test_state_weights_and_generators_come_back(model, tmp_path):
    assert run_ranks(_round_trip, 2, model, tmp_path) == [(True, True, True, ["step_000008"])] * 2


CHANGED = dict(learning_rate=3e-3, min_learning_rate=1e-4, adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-6, weight_decay=0.2)


def _save(model, folder, distributed):
    _, saver = checkpointer(model, folder, distributed_optimizer=distributed)
    return saver.save(TrainState(step=1))


def _load_with_other_options(model, path, distributed):
    """What the optimizer's groups say as configured, and once the checkpoint was loaded."""
    policy, saver = checkpointer(model, path.parent, distributed_optimizer=distributed, **CHANGED)
    configured = options(policy)
    saver.load(path)
    return configured, options(policy)


def options(policy):
    return [{name: value for name, value in group.items() if name not in ("params", "step")} for group in policy.optimizer.param_groups]


@pytest.mark.parametrize("distributed", [True, False])
def test_a_resumed_run_follows_its_configuration(distributed, model, tmp_path):
    path = run_ranks(_save, 2, model, tmp_path, distributed)[0]
    configured, loaded = run_ranks(_load_with_other_options, 2, model, path, distributed)[0]
    for then, now in zip(configured, loaded, strict=True):
        assert (now["max_lr"], tuple(now["betas"]), now["eps"]) == (3e-3, (0.8, 0.9), 1e-6)
        assert now == then


def test_inspect_shows_step_weights_and_optimizer(model, tmp_path, capfd):
    path = run_ranks(_save, 2, model, tmp_path, True)[0]
    capfd.readouterr()
    assert run_ranks(run_tool, 1, "inspect.py", path, "--json") == [0]
    found = json.loads(capfd.readouterr().out)
    assert found["facts"]["step"] == "1" and found["facts"]["model_type"] == "llama"
    weights, state = (sum(t["nbytes"] for t in found["tensors"] if t["group"] == group) for group in ("weights", "optimizer"))
    assert state >= 2 * weights > 0


def truncate(path):
    os.truncate(path / "__1_0.distcp", (path / "__1_0.distcp").stat().st_size - 100)


def overwrite(path):
    with open(path / "__0_0.distcp", "r+b") as file:
        file.write(bytes(100))


def forget(path):
    """The norm at the end has another key than the model has for it."""
    text = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(text.replace(b"final_norm", b"first_norm"))


def of_another_model(path):
    forget(path)
    config = json.loads((path / "hf" / "config.json").read_text())
    (path / "hf" / "config.json").write_text(json.dumps(config | dict(num_hidden_layers=7)))


DAMAGES = {
    "no state": (lambda path: (path / "megagrpo.json").unlink(), "is not a complete checkpoint: .*megagrpo.json"),
    "no number": (lambda path: (path / "megagrpo.json").write_text("{"), "megagrpo.json is corrupt: JSONDecodeError.*; copy the"),
    "no key": (lambda path: (path / "megagrpo.json").write_text("{}"), "megagrpo.json is corrupt: KeyError"),
    "no file": (lambda path: (path / "__0_0.distcp").unlink(), "lacks __0_0.distcp, which .metadata names; copy the checkpoint again"),
    "truncated": (truncate, r"__1_0.distcp is truncated: \S+ ends at byte \d+ of \d+; copy the checkpoint again"),
    "overwritten": (overwrite, r"__0_0.distcp is corrupt at byte 0, where \S+ lies; copy the checkpoint again"),
    "metadata.json": (lambda path: (path / "metadata.json").write_text("{"), "metadata.json is corrupt: .*; copy the checkpoint again"),
    ".metadata": (lambda path: (path / ".metadata").write_bytes(b"{"), "or its .metadata is corrupt"),
    "another key": (forget, "cannot be read, or does not fit this model: .*decoder"),
    "of another model": (of_another_model, r"does not fit this model: they differ in num_layers: 7, 4; set model.path to the model that"),
}


def _load_broken(model, folder):
    """What each rank says of each kind of damage to the second of two checkpoints."""
    _, saver = checkpointer(model, folder)
    path, said = saver.save(TrainState(step=1)), {}
    for name, (damage, _) in DAMAGES.items():
        broken = folder / "step_000002"
        if os.environ["RANK"] == "0":
            shutil.rmtree(broken, ignore_errors=True)
            shutil.copytree(path, broken)
            damage(broken)
        torch.distributed.barrier()
        with pytest.raises(CheckpointError) as error:
            saver.load(broken)
        said[name] = str(error.value)
        torch.distributed.barrier()
    return said, saver.load(path).step


def test_a_damaged_checkpoint_is_named_in_one_line_on_every_rank(model, tmp_path):
    for said, step in run_ranks(_load_broken, 2, model, tmp_path):
        assert step == 1
        for name, (_, message) in DAMAGES.items():
            assert re.search(message, said[name]), said[name]
            assert "Traceback" not in said[name] and len(said[name].splitlines()) == 1
            assert "fit" in message or said[name].endswith(". Without that folder the run goes on from step_000001")


def test_a_folder_without_its_state_counts_for_none(tmp_path):
    for step in (1, 2):
        (tmp_path / f"step_00000{step}").mkdir()
    (tmp_path / "step_000001" / "megagrpo.json").write_text("{}")
    assert newest_checkpoint(tmp_path) == tmp_path / "step_000001" and checkpoints(tmp_path) == [tmp_path / "step_000001"]
