"""Checkpoints over two ranks are complete or absent after any failure on any rank."""

import json
import os
import re
import resource
import shutil
import threading

import pytest
import torch
from checkpoint_now import save_now
from ranks import run_ranks
from suites import usual
from test_build_and_bridge import run_tool
from tiny_policy import few_samples, tiny_model, tiny_run

from megagrpo.algorithms.losses import make_loss
from megagrpo.data.packing.sample_packing import pack, packing_rules
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.proof.verify.verified_step import fill_weights
from megagrpo.records.checkpoints.checkpoint import Checkpointer, CheckpointError
from megagrpo.records.checkpoints.run_files import checkpoints, newest_checkpoint
from megagrpo.train_types import TrainState
from megagrpo.weights.bridge.megatron_io import METADATA, ShardedWrite
from megagrpo.weights.files.file_checksums import checksums
from megagrpo.weights.files.torch_dist import StoredTensors


@pytest.fixture
def model(tmp_path_factory):
    """A folder with a model's side files, which a checkpoint copies."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(tiny_model("llama_tied").raw))
    return folder


def checkpointer(model, folder, keep=2, parallel=None, **train):
    """This rank's part of a policy after one step, and its checkpointer."""
    config, hf_config = tiny_run(parallel or dict(tp=2)), tiny_model("llama_tied")
    config = config.model_copy(update=dict(train=config.train.model_copy(update=train)))
    layout = init_layout(config.parallel)
    policy = MegatronPolicy(config, layout, hf_config)
    fill_weights(policy, hf_config, layout)
    policy.weights_changed()
    step_once(policy, layout)
    return policy, Checkpointer(folder, layout, policy, keep, model)


def step_once(policy, layout):
    """Overwrite weights and moments in place with other values."""
    config = policy.config
    batch = pack(few_samples(), packing_rules(config, policy.shares_prompts), layout.dp_rank, layout.dp_size)
    policy.train_step(batch, make_loss(config.algorithm), batch.num_tokens)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def limit_files(limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _one_rank_cannot_write(model, folder, failing, background):
    _, saver = checkpointer(model, folder)
    save_now(saver, TrainState(step=1))
    if int(os.environ["RANK"]) == failing:
        limit_files(50_000)
    with pytest.raises(CheckpointError) as caught:
        saver.start(TrainState(step=2), background)
        saver.finish(wait=True)
    left = names(folder)
    torch.distributed.barrier()
    limit_files(resource.RLIM_INFINITY)
    save_now(saver, TrainState(step=3))
    return str(caught.value), left, names(folder)


@pytest.mark.parametrize(("failing", "background"), usual([(0, False), (1, True)], 1))
def test_when_one_rank_cannot_write_no_rank_has_saved_and_the_next_save_works(failing, background, model, tmp_path):
    for message, left, after in run_ranks(_one_rank_cannot_write, 2, model, tmp_path, failing, background):
        assert "writing checkpoint" in message and "step_000002 failed; earlier checkpoints remain" in message
        assert [name for name in left if not name.startswith(".")] == ["step_000001"] and after == [
            "step_000001",
            "step_000003",
        ]
    again = run_ranks(_one_rank_cannot_write, 2, model, tmp_path / "again", failing, background)
    assert f"rank {failing} could not write its part" in again[0][0] and "GiB of disk space free" in again[1][0]


def _write_while_training(model, folder):
    """Return the names of files during and after a background save; asserts that the checkpoint appears only when
    complete."""
    policy, saver = checkpointer(model, folder, keep=9)
    save_now(saver, TrainState(step=1))
    before = [p.detach().clone() for chunk in policy.chunks for p in chunk.parameters()]
    trained, write = threading.Event(), ShardedWrite._run
    ShardedWrite._run = lambda self: trained.wait() and write(self)
    saver.start(TrainState(step=2), background=True)
    assert saver.finish(wait=False) is None
    step_once(policy, saver.layout)
    trained.set()
    assert not any(map(torch.equal, (p.detach() for chunk in policy.chunks for p in chunk.parameters()), before))
    on_the_way = [path.name for path in checkpoints(folder)]
    while (path := saver.finish(wait=False)) is None:
        assert "step_000002" not in names(folder)
    assert saver.finish(wait=True) is None, "finished twice"
    torch.distributed.barrier()
    return (
        on_the_way,
        path.name,
        names(folder),
        [t.name for t in threading.enumerate() if t.name == "checkpoint writer"],
    )


def test_a_checkpoint_that_is_written_while_training_goes_on_is_that_of_its_step_byte_for_byte(model, tmp_path):
    for seen in run_ranks(_write_while_training, 2, model, tmp_path):
        assert seen == (["step_000001"], "step_000002", ["step_000001", "step_000002"], [])
    at_once, meanwhile = (
        json.loads((tmp_path / f"step_00000{step}" / "checksums.json").read_text()) for step in (1, 2)
    )
    assert at_once.keys() == meanwhile.keys() and len([name for name in at_once if name.endswith(".distcp")]) >= 2
    different = {name for name in at_once if at_once[name] != meanwhile[name]}
    assert different <= {"megagrpo.json", ".metadata"}  # the step; a random identifier from torch


def _gather_both_ways(model, folder):
    """Save one state twice: gathered on one rank, and on every rank. Return whether this rank holds a part of the
    optimizer's state each time."""
    _, saver = checkpointer(model, folder, keep=2, parallel=dict(tp=1), distributed_optimizer=True)
    held = []
    for step, on_one in ((1, True), (2, False)):
        METADATA["distrib_optim_fully_reshardable_mem_efficient"] = on_one
        save_now(saver, TrainState(step=step))
        held.append(
            "param_state" in saver._sharded_state(is_loading=False, with_rng=False, reference=None)["optimizer"]
        )
    return held


@pytest.mark.full
def test_a_sharded_optimizers_state_that_one_rank_gathers_is_what_every_rank_would_bit_for_bit(model, tmp_path):
    assert run_ranks(_gather_both_ways, 2, model, tmp_path) == [[True, True], [False, True]]
    one, every = (StoredTensors(tmp_path / f"step_00000{step}") for step in (1, 2))
    pieces = [(index.fqn, chunk) for index in one.metadata.storage_data for chunk in chunks_of(one, index.fqn)]
    assert one.metadata.storage_data.keys() == every.metadata.storage_data.keys() and len(pieces) > 100
    assert all(torch.equal(one._piece(*piece), every._piece(*piece)) for piece in pieces)


def chunks_of(stored, key):
    """The pieces of a stored tensor; empty for an object."""
    return getattr(stored.metadata.state_dict_metadata[key], "chunks", [])


def _save_with_best(model, folder):
    """The checkpoints that exist after each of these saves: step, best step so far, in the background or not."""
    _, saver = checkpointer(model, folder, keep=2)
    there = []
    for step, best, background in (
        (1, 0, True),
        (2, 2, False),
        (3, 2, True),
        (4, 2, True),
        (5, 2, False),
        (6, 6, True),
        (7, 6, True),
    ):
        saver.start(TrainState(step=step, best_step=best, best_value=1.0), background)
        saver.finish(wait=True)
        torch.distributed.barrier()
        kept = [name.removeprefix("step_00000") for name in names(folder)]
        there.append((" ".join(kept), os.path.realpath(folder / "best")[-1]))
        torch.distributed.barrier()
    return there


def test_the_newest_and_the_best_stay_and_neither_takes_the_place_of_the_other(model, tmp_path):
    there = run_ranks(_save_with_best, 2, model, tmp_path)[0]
    assert [text for text, _ in there] == [
        "1",
        "best 1 2",
        "best 2 3",
        "best 2 3 4",
        "best 2 4 5",
        "best 5 6",
        "best 6 7",
    ]
    assert [best for _, best in there[1:]] == ["2", "2", "2", "2", "6", "6"]


def _draw_on_after_a_save(model, folder):
    """Random numbers of this rank after a checkpoint, and after a run with other numbers has loaded it."""
    _, saver = checkpointer(model, folder, parallel=dict(tp=1))
    torch.manual_seed(int(os.environ["RANK"]))
    path = save_now(saver, TrainState(step=1))
    drawn = torch.rand(4)
    torch.manual_seed(9)
    saver.load(path)
    return torch.equal(torch.rand(4), drawn), drawn.tolist()


def test_replicas_that_drew_differently_go_on_drawing_so(model, tmp_path):
    (one, drawn), (other, drawn_by_other) = run_ranks(_draw_on_after_a_save, 2, model, tmp_path)
    assert one and other and drawn != drawn_by_other


def _round_trip(model, folder):
    policy, saver = checkpointer(model, folder, keep=1)
    weights = [p.detach().clone() for chunk in policy.chunks for p in chunk.parameters()]
    torch.manual_seed(5)
    saved = TrainState(step=7, weight_version=9, cursor=56)
    path = save_now(saver, saved)
    drawn = torch.rand(4)
    with torch.no_grad():
        for chunk in policy.chunks:
            for parameter in chunk.parameters():
                parameter.zero_()
    restored = saver.load(path)
    found = [p.detach() for chunk in policy.chunks for p in chunk.parameters()]
    save_now(saver, TrainState(step=8))
    return restored == saved, all(map(torch.equal, found, weights)), torch.equal(torch.rand(4), drawn), names(folder)


def test_state_weights_and_generators_come_back(model, tmp_path):
    assert run_ranks(_round_trip, 2, model, tmp_path) == [(True, True, True, ["step_000008"])] * 2


CHANGED = dict(
    learning_rate=3e-3, min_learning_rate=1e-4, adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-6, weight_decay=0.2
)


def _save(model, folder, distributed):
    _, saver = checkpointer(model, folder, distributed_optimizer=distributed)
    return save_now(saver, TrainState(step=1))


def _load_with_other_options(model, path, distributed):
    """The options of the optimizer's groups before and after loading the checkpoint."""
    policy, saver = checkpointer(model, path.parent, distributed_optimizer=distributed, **CHANGED)
    configured = options(policy)
    saver.load(path)
    return configured, options(policy)


def options(policy):
    return [
        {name: value for name, value in group.items() if name not in ("params", "step")}
        for group in policy.optimizer.param_groups
    ]


@pytest.mark.parametrize("distributed", usual([True, False], 0))
def test_a_resumed_run_follows_its_configuration(distributed, model, tmp_path):
    path = run_ranks(_save, 2, model, tmp_path, distributed)[0]
    configured, loaded = run_ranks(_load_with_other_options, 2, model, path, distributed)[0]
    for then, now in zip(configured, loaded, strict=True):
        assert (now["max_lr"], tuple(now["betas"]), now["eps"]) == (3e-3, (0.8, 0.9), 1e-6)
        assert now == then


def test_inspect_shows_step_weights_and_optimizer(model, tmp_path, capfd):
    path = run_ranks(_save, 2, model, tmp_path, True)[0]
    capfd.readouterr()
    assert run_ranks(run_tool, 1, "inspect", path, "--json") == [0]
    found = json.loads(capfd.readouterr().out)
    assert found["facts"]["step"] == "1" and found["facts"]["model_type"] == "llama"
    weights, state = (
        sum(t["nbytes"] for t in found["tensors"] if t["group"] == group) for group in ("weights", "optimizer")
    )
    assert state >= 2 * weights > 0


def truncate(path):
    os.truncate(path / "__1_0.distcp", (path / "__1_0.distcp").stat().st_size - 100)


def overwrite(path):
    with open(path / "__0_0.distcp", "r+b") as file:
        file.write(bytes(100))


def flip(name):
    """Flip one bit in the middle of the file; in a file of tensors this changes a number."""

    def damage(path):
        data = bytearray((path / name).read_bytes())
        data[len(data) // 2] ^= 4
        (path / name).write_bytes(data)

    return damage


def forget(path):
    """Rename the key of the final norm to one that the model does not have."""
    text = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(text.replace(b"final_norm", b"first_norm"))
    believe(path)


def of_another_model(path):
    forget(path)
    config = json.loads((path / "hf" / "config.json").read_text())
    (path / "hf" / "config.json").write_text(json.dumps(config | dict(num_hidden_layers=7)))
    believe(path)


def believe(path):
    """Make the checksums match the damaged files."""
    files = [path / name for name in json.loads((path / "checksums.json").read_text())]
    (path / "checksums.json").write_text(json.dumps(checksums(path, files)))


DAMAGES = {
    "no state": (lambda path: (path / "megagrpo.json").unlink(), "is not a complete checkpoint: .*megagrpo.json"),
    "no number": (
        lambda path: (path / "megagrpo.json").write_text("{"),
        "megagrpo.json is corrupt: JSONDecodeError.*; copy the",
    ),
    "no key": (lambda path: (path / "megagrpo.json").write_text("{}"), "megagrpo.json is corrupt: KeyError"),
    "no file": (
        lambda path: (path / "__0_0.distcp").unlink(),
        "lacks __0_0.distcp, which .metadata names; copy the checkpoint again",
    ),
    "truncated": (truncate, r"__1_0.distcp is truncated: \S+ ends at byte \d+ of \d+; copy the checkpoint again"),
    "overwritten": (overwrite, r"__0_0.distcp is corrupt at byte 0, in \S+; copy the checkpoint again"),
    "metadata.json": (
        lambda path: (path / "metadata.json").write_text("{"),
        "metadata.json is corrupt: .*; copy the checkpoint again",
    ),
    ".metadata": (lambda path: [(path / ".metadata").write_bytes(b"{"), believe(path)], "or its .metadata is corrupt"),
    "a bit of the first": (
        flip("__0_0.distcp"),
        r"__0_0.distcp is corrupt: its CRC-32 is \w{8}; \w{8} was written",
    ),
    "a bit of the second": (flip("__1_0.distcp"), "__1_0.distcp is corrupt: its CRC-32"),
    "a bit of .metadata": (flip(".metadata"), ".metadata is corrupt: its CRC-32"),
    "a bit of the config": (flip("hf/config.json"), "hf/config.json is corrupt: its CRC-32"),
    "no config": (
        lambda path: (path / "hf" / "config.json").unlink(),
        "lacks hf/config.json, which checksums.json names",
    ),
    "no checksums": (
        lambda path: (path / "checksums.json").unlink(),
        "is damaged: .*checksums.json'; copy the checkpoint again",
    ),
    "checksums": (lambda path: (path / "checksums.json").write_text("{"), "checksums.json is corrupt: JSONDecodeError"),
    "another key": (forget, "cannot be read, or does not fit this model: .*decoder"),
    "of another model": (
        of_another_model,
        r"does not fit this model: they differ in num_layers: 7, 4; set model.path to the run's original",
    ),
}


def _load_broken(model, folder):
    """Each rank's error for each kind of damage to the second of two checkpoints."""
    _, saver = checkpointer(model, folder)
    path, said = save_now(saver, TrainState(step=1)), {}
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
            assert "fit" in message or ". To continue from step_000001 instead, remove the folder " in said[name]


def test_a_folder_without_its_state_counts_for_none(tmp_path):
    for step in (1, 2):
        (tmp_path / f"step_00000{step}").mkdir()
    (tmp_path / "step_000001" / "megagrpo.json").write_text("{}")
    assert newest_checkpoint(tmp_path) == tmp_path / "step_000001" and checkpoints(tmp_path) == [
        tmp_path / "step_000001"
    ]
