"""An own optimizer or schedule that cannot train is refused before the model is built, with what is expected."""

import textwrap
from types import SimpleNamespace

import pytest

from megagrpo.config import ProblemError, TrainSection
from megagrpo.policy.optimizer.own_optimizer import own_optimizer, own_schedule
from tests.unit.config.test_config import SMALLEST, problems, write

CODE = """
import torch


class Base(torch.optim.Optimizer):
    def __init__(self, params, lr, weight_decay, size=1.0):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, size=size))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, group)

    def update(self, p, group):
        p.sub_(group["lr"] * group["size"] * p.grad)


class Raises(Base):
    def update(self, p, group):
        raise KeyError("mean")


class Explodes(Base):
    def update(self, p, group):
        p.div_(0)


class Sleeps(Base):
    def update(self, p, group):
        pass


class Rows(Base):
    def update(self, p, group):
        super().update(p, group)
        self.state[p]["rows"] = p.sum(-1)


def function(params):
    pass


def late(step, total_steps, train):
    return -1 if step > 5 else train.learning_rate


def text(step, total_steps, train):
    return "1e-3"


def short(step):
    return 1e-3


def linear(step, total_steps, train):
    return train.learning_rate * (1 - step / (total_steps + 1))
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(textwrap.dedent(CODE))
    return path


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Missing", {}, "has no function or class `Missing`; it has: Base, Raises"),
        ("function", {}, "is not an optimizer; an optimizer is a subclass of torch.optim.Optimizer, called with"),
        ("Base", dict(beta=3), "raised TypeError: Base.__init__() got an unexpected keyword argument 'beta'"),
        ("Raises", {}, r"own.py:"),
        ("Explodes", {}, "made parameters NaN or infinite from gradients of at most 1; correct the formula"),
        ("Sleeps", {}, "changed no parameter in two steps with lr=0.01; correct the formula"),
        ("Rows", {}, "keeps `rows` ([2]) for a parameter of [2, 3], which a checkpoint cannot shard; keep tensors"),
    ],
)
def test_an_optimizer_that_cannot_train_is_refused(name, options, message, file):
    with pytest.raises(ProblemError) as error:
        own_optimizer(TrainSection(optimizer=f"{file}:{name}", optimizer_args=options))
    assert message in str(error.value) and str(error.value).startswith(f"train.optimizer: `{file}:{name}` ")


def test_an_optimizer_gets_its_arguments(file):
    import torch

    build = own_optimizer(TrainSection(optimizer=f"{file}:Base", optimizer_args=dict(size=2.0)))
    weight = torch.nn.Parameter(torch.ones(2))
    own = build([weight], lr=0.5, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-8)
    weight.grad = torch.tensor([1.0, -1.0])
    own.step()
    assert weight.tolist() == [0.0, 2.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("late", "returned -1 for step 10 of 10; a schedule takes (step, total_steps, train) and returns the learning"),
        ("text", "returned '1e-3' for step 1 of 10; a schedule"),
        ("short", "raised TypeError: short() takes 1 positional argument but 3 were given"),
    ],
)
def test_a_schedule_without_a_rate_is_refused(name, message, file):
    with pytest.raises(ProblemError) as error:
        own_schedule(TrainSection(lr_scheduler_type=f"{file}:{name}"))
    assert message in str(error.value) and str(error.value).startswith("train.lr_scheduler_type: `")


def test_a_schedule_is_used_as_it_is(file):
    train = TrainSection(lr_scheduler_type=f"{file}:linear", learning_rate=0.5)
    assert own_schedule(train)(1, 9, train) == pytest.approx(0.45)


OWN = ["train.optimizer=own.py:Base", "train.distributed_optimizer=false"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            OWN[:1],
            "train.distributed_optimizer: true shards matrices, but train.optimizer your own needs whole matrices",
        ),
        (
            [*OWN, "train.optimizer_offload=true"],
            "train.optimizer_state_dtype: train.optimizer your own keeps its state",
        ),
        (
            ["train.optimizer_args={beta: 1}"],
            "train.optimizer_args: has no effect on train.optimizer adam; leave it out",
        ),
        (
            ["train.lr_scheduler_type=own.py:linear", "train.warmup_steps=3"],
            "train.warmup_steps: your own schedule returns the whole learning rate, so these have no effect; leave",
        ),
        (["train.optimizer=lion"], "train.optimizer: must be 'adam', 'muon', or your own as FILE.py:NAME"),
        (["train.lr_scheduler_type=wsd"], "train.lr_scheduler_type: must be 'constant', 'linear', 'cosine', or your"),
    ],
)
def test_what_does_not_go_with_own_code_is_refused(overrides, message, tmp_path):
    _, problem = problems(write(tmp_path, SMALLEST), *overrides)
    assert problem.startswith(message), problem


@pytest.mark.parametrize("key", ["optimizer", "lr_scheduler_type"])
def test_the_audit_says_that_it_does_not_recompute_own_code(key):
    from megagrpo.proof.audit.update_checks import check_update

    train = TrainSection(**{key: "own.py:name"})
    sections = dict(run=SimpleNamespace(num_steps=3), algorithm=SimpleNamespace(updates_per_step=1))
    step = SimpleNamespace(config=SimpleNamespace(train=train, **sections))
    update = SimpleNamespace(metrics={"grad_norm": 1.0}, metric=lambda name: 1e-6, steps_before=0, optimizer={})
    checks = list(check_update(step, update, None))
    assert checks[-1].note == f"not recomputed: train.{key} is own.py:name"
    assert [check.quantity for check in checks[:-1]] == ["learning_rate"] * (key == "optimizer")
