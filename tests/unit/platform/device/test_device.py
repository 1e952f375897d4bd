"""The CPU platform: it leaves global state alone, and gives megatron-core an Adam."""

import ctypes
import resource
import subprocess
import sys
import warnings

import pytest
import torch
from ranks import run_ranks
from tiny_policy import tiny_model, tiny_run

from megagrpo.platform import device
from megagrpo.platform.device import cpu
from megagrpo.platform.device.adam import FusedAdam
from megagrpo.platform.device.memory_in_use import resident_gb
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.megatron_policy import MegatronPolicy

cpu_only = pytest.mark.skipif(device.has_gpu(), reason="nothing is patched on a GPU")


def test_installing_twice_changes_nothing():
    before = torch.empty, torch.Tensor.type, torch.cuda.current_device
    device.install()
    assert (torch.empty, torch.Tensor.type, torch.cuda.current_device) == before


@cpu_only
def test_literal_cuda_tensors_land_on_the_cpu_and_others_stay_where_they_were_asked_for():
    assert torch.zeros(2, device="cuda").device == device.device() == torch.device("cpu")
    assert torch.empty(2, pin_memory=True).device.type == "cpu"
    assert torch.zeros(2, device="meta").device.type == "meta"
    with torch.device("meta"):
        assert torch.empty(2).device.type == torch.arange(2).device.type == torch.ones(2).device.type == "meta"


@cpu_only
def test_other_libraries_still_see_no_gpu():
    assert not torch.cuda.is_available() and device.backend() == "gloo"
    assert torch.zeros(2).type() == "torch.FloatTensor"


@cpu_only
def test_a_fresh_process_imports_the_platform_before_megatron():
    code = (
        "import megagrpo.platform.parallel; from megatron.core import optimizer; from megagrpo.platform.device.adam "
        "import FusedAdam;assert optimizer.Adam is FusedAdam and not optimizer.USING_PYTORCH_OPTIMIZER"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr == "", done.stderr


def page_faults_and_returned_gb():
    """Page faults of one layer's tensors after another, by default and once this process holds a policy; then the
    memory that `release_memory` returns to the system."""

    def faults():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(5):
            layers = [torch.ones(3 * 2**20) for _ in range(20)]
            while layers:
                torch.ones(3 * 2**20)
                layers.pop()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    libc = ctypes.CDLL(None)
    # another test of this process may have kept freed memory: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
    for setting in (-1, -3):
        libc.mallopt(setting, 128 * 1024)
    faults()
    by_default = faults()
    config = tiny_run()
    MegatronPolicy(config, init_layout(config.parallel), tiny_model("llama_tied"))
    faults()
    reused, kept = faults(), resident_gb()
    device.release_memory()
    return by_default, reused, kept - resident_gb()


@pytest.mark.full
@cpu_only
def test_a_policy_uses_the_memory_of_freed_tensors_again_until_it_is_released():
    ((by_default, reused, returned_gb),) = run_ranks(page_faults_and_returned_gb, 1)
    assert reused < by_default / 10 and returned_gb > 0.2, (by_default, reused, returned_gb)


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_a_named_precision_is_taken_on_every_cpu(name, dtype, monkeypatch):
    for kind in cpu.CPU_KINDS:
        monkeypatch.setenv(cpu.VARIABLE, kind)
        assert device.resolve_precision(name) == dtype
    with pytest.raises(ValueError, match="'fp64' is not one of auto, bf16, fp16, fp32"):
        device.resolve_precision("fp64")


@cpu_only
@pytest.mark.parametrize(
    ("kind", "dtype"), [("intel", "float32"), ("intel_amx", "bfloat16"), ("amd", "float32"), ("amd_bf16", "bfloat16")]
)
def test_auto_precision_and_the_engines_dtype_follow_the_cpu(kind, dtype, monkeypatch):
    monkeypatch.setenv(cpu.VARIABLE, kind)
    assert device.resolve_precision("auto") == getattr(torch, dtype)
    assert device.engine_precision(torch.bfloat16) == getattr(torch, dtype), (
        "vLLM computes bf16 only where the CPU multiplies it"
    )
    assert device.engine_precision(torch.float32) == torch.float32


def test_ram_is_in_gib_and_holds_this_process():
    total = int(next(line for line in open("/proc/meminfo") if line.startswith("MemTotal")).split()[1]) / 2**20
    assert device.memory_gb() < device.host_memory_gb() <= total * 1.001


def test_peak_memory_is_in_gib():
    assert 0.05 < device.memory_gb() < 1000


@pytest.mark.parametrize("decoupled", [True, False])
def test_fused_adam_equals_torchs_and_counts_steps_in_the_group(decoupled):
    torch.manual_seed(0)
    start = [torch.randn(5, 3), torch.randn(7)]
    options = dict(lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    ours, theirs = ([torch.nn.Parameter(p.clone()) for p in start] for _ in range(2))
    mine = FusedAdam(ours, adam_w_mode=decoupled, **options)
    reference = (torch.optim.AdamW if decoupled else torch.optim.Adam)(theirs, **options)
    for _ in range(4):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        mine.step()
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
    assert mine.param_groups[0]["step"] == 4 and set(mine.state[ours[0]]) == {"exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(
    ("dtype", "users", "expected"),
    [(torch.float32, None, "0"), (torch.float32, "1", "1"), (torch.bfloat16, None, None)],
)
def test_a_gpu_multiplies_float32_exactly_unless_the_user_says_otherwise(monkeypatch, dtype, users, expected):
    environment = {} if users is None else {"NVIDIA_TF32_OVERRIDE": users}
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    monkeypatch.setattr(device, "ENVIRONMENT", environment)
    device.prepare_precision(dtype)
    assert environment.get("NVIDIA_TF32_OVERRIDE") == expected


@pytest.mark.parametrize("users", [None, "0"])
def test_a_gpu_multiplies_the_tokens_of_all_experts_in_one_kernel_unless_the_user_says_otherwise(monkeypatch, users):
    environment = {} if users is None else {"NVTE_USE_CUTLASS_GROUPED_GEMM": users}
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    monkeypatch.setattr(device, "ENVIRONMENT", environment)
    device.prepare_precision(torch.bfloat16)
    assert environment["NVTE_USE_CUTLASS_GROUPED_GEMM"] == (users or "1")


def test_notices_of_collectives_that_megatron_calls_are_silenced():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        device.quiet()
        warnings.warn("barrier(): using the device under current context. You can specify", UserWarning, stacklevel=1)
        warnings.warn("`torch.distributed._all_gather_base` is a private function", FutureWarning, stacklevel=1)
        warnings.warn("another", UserWarning, stacklevel=1)
    assert [str(one.message) for one in seen] == ["another"]
