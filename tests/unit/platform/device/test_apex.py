"""NVIDIA's apex: a step with a package of its interface, which computes on the CPU, in a process of its own."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from tiny_policy import tiny_model, tiny_run

from megagrpo.cluster.doctor.checkup import package_checks
from megagrpo.platform import device
from megagrpo.proof.verify.shrink import random_samples
from megagrpo.proof.verify.verified_step import take_step
from megagrpo.proof.verify.verify_compare import compare, silent_tensors

STAND_IN = {
    "apex/__init__.py": "import collections\nCALLS = collections.Counter()\n",
    "apex/optimizers/__init__.py": """
import torch, apex
from torch.optim import SGD as FusedSGD

class FusedAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True,
                 weight_decay=0.0, **_):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, bias_correction=True))

    @torch.no_grad()
    def step(self, closure=None):
        apex.CALLS["FusedAdam"] += 1
        for group in self.param_groups:
            (one, two), group["step"] = group["betas"], group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["exp_avg"].lerp_(p.grad, 1 - one)
                state["exp_avg_sq"].lerp_(p.grad.square(), 1 - two)
                mean, square = state["exp_avg"] / (1 - one ** group["step"]), state["exp_avg_sq"] / (1 - two ** group["step"])
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * mean / (square.sqrt() + group["eps"]))
""",
    "apex/multi_tensor_apply.py": "def multi_tensor_applier(op, noop, lists, *args):\n    return op(65536, noop, lists, *args)\n",
    "apex/normalization/__init__.py": "",
    "apex/normalization/fused_layer_norm.py": """
import torch, apex

class FusedLayerNormAffineFunction: ...

def fused_rms_norm_affine(input, weight, normalized_shape, eps=1e-6, memory_efficient=False):
    apex.CALLS["FusedRMSNorm"] += 1
    return torch.nn.functional.rms_norm(input, normalized_shape, weight, eps)
""",
    "amp_C.py": """
import torch

def multi_tensor_l2norm(chunk_size, noop, lists, per_tensor=False):
    return torch.stack([t.norm() for tensors in lists for t in tensors]).norm().view(1), None

def multi_tensor_scale(chunk_size, noop, lists, scale):
    for source, target in zip(*lists):
        target.copy_(source * scale)
""",
}
STEP = """
import json, sys, torch
from tiny_policy import tiny_model, tiny_run
from megagrpo.platform import device
from megagrpo.cluster.doctor.checkup import package_checks
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.optimizer.policy_optimizer import apex_note
from megagrpo.proof.verify.shrink import random_samples
from megagrpo.proof.verify.verified_step import take_step

torch.save(take_step(tiny_run(), tiny_model("qwen3_untied"), random_samples()), sys.argv[1])
import apex
calls = dict(apex.CALLS)
layout = init_layout(tiny_run().parallel)
policies = [MegatronPolicy(tiny_run(train=train), layout, tiny_model("llama_tied")).optimizer for train in ({}, {"optimizer_state_dtype": "bf16"})]
lines = [apex_note(policy) for policy in policies]
print(json.dumps([calls, lines, [str(line) for line in package_checks("cpu") if line.subject == "apex"]]))
"""


@pytest.fixture
def installed(tmp_path) -> dict[str, str]:
    """An environment in which the stand-in is installed."""
    for name, text in STAND_IN.items():
        (tmp_path / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / name).write_text(text)
    folders = [tmp_path / "site", Path(tiny_run.__code__.co_filename).parent]
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}


@pytest.mark.full
@pytest.mark.skipif(device.has_gpu() or device.has_apex(), reason="needs a CPU without apex")
def test_apex_takes_the_step_and_the_numbers_are_those_of_torch(installed, tmp_path):
    command = [sys.executable, "-c", STEP, str(tmp_path / "outcome")]
    done = subprocess.run(command, env=installed, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    calls, lines, doctor = json.loads(done.stdout.splitlines()[-1])
    assert calls["FusedAdam"] == 2 and calls["FusedRMSNorm"] > 20, "a trial at the start, and the step"
    assert lines == ["NVIDIA's apex: FusedAdam, FusedRMSNorm", "NVIDIA's apex: FusedRMSNorm"]
    assert len(doctor) == 1 and "its FusedAdam and FusedRMSNorm are used" in doctor[0]
    outcome = torch.load(tmp_path / "outcome", weights_only=False)
    (expected,) = run_ranks(take_step, 1, tiny_run(), tiny_model("qwen3_untied"), random_samples())
    assert silent_tensors(outcome) == []
    assert [difference for difference in compare(outcome, expected) if not difference.passed] == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("broken", "text"),
    [
        pytest.param("apex/optimizers/__init__.py", "raise ImportError('libcuda.so.1')\n", marks=pytest.mark.full),
        (
            "apex/optimizers/__init__.py",
            "class FusedAdam:\n    def __init__(self, _):\n        raise TypeError('no GPU')\n",
        ),
        pytest.param("amp_C.py", None, marks=pytest.mark.full),
    ],
)
def test_an_apex_that_cannot_compute_here_is_left_alone(broken, text, installed, tmp_path):
    """A build for GPUs on a machine without one, and the other project of this name."""
    (tmp_path / "site" / broken).unlink() if text is None else (tmp_path / "site" / broken).write_text(text)
    code = (
        "from megagrpo.platform import device; from megagrpo.platform.device.adam import FusedAdam;from megatron.core "
        "import optimizer; assert optimizer.Adam is FusedAdam and not device.has_apex()"
    )
    done = subprocess.run([sys.executable, "-c", code], env=installed, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_the_other_project_of_this_name_is_not_used(tmp_path, monkeypatch):
    for name in (name for name in STAND_IN if name != "amp_C.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(STAND_IN[name])
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.util.find_spec("apex") and not device.has_apex.__wrapped__()


def test_without_apex_there_is_no_line(monkeypatch):
    monkeypatch.setattr(
        "megagrpo.cluster.doctor.checkup.installed_version", lambda name: "" if name == "apex" else "1.0"
    )
    assert not [line for line in package_checks("cpu") if line.subject == "apex"]
