"""The smallest training under hostile environments: it ends with the result that it has without them
(docs/environment.md)."""

import os
import subprocess

import pytest

from megagrpo.platform.process.environment import IGNORED, PASSED, REMOVED, row_of
from tests.e2e import world

GONE = "/dev/null/gone"  # nobody can create it
HOSTILE = {
    "ranks": dict(RANK="3", LOCAL_RANK="1", NODE_RANK="1", GROUP_RANK="1", MASTER_ADDR="gone.invalid")
    | dict(MASTER_PORT="tcp://10.0.0.1:29500", TORCHELASTIC_RUN_ID="other", MEGAGRPO_RENDEZVOUS=GONE)
    | dict(PET_NNODES="4", PET_STANDALONE="1", PET_NO_PYTHON="1"),
    "schedulers": dict(SLURM_JOB_ID="1", SLURM_JOB_END_TIME="1700000000", SLURM_NODEID="7", SLURM_PROCID="3")
    | dict(SLURM_NTASKS="16", SLURM_STEP_NUM_TASKS="16", SLURM_JOB_NODELIST="gone[1-4]")
    | dict(SLURM_RESTART_COUNT="5", PMI_RANK="3", PMI_SIZE="16", PMIX_RANK="3", PMIX_NAMESPACE="gone")
    | dict(OMPI_COMM_WORLD_RANK="3", OMPI_COMM_WORLD_SIZE="16", JOB_COMPLETION_INDEX="4")
    | dict(ACCELERATE_USE_FSDP="true"),
    "proxies": dict(HTTP_PROXY="http://127.0.0.1:9", https_proxy="http://127.0.0.1:9", ALL_PROXY="socks5://127.0.0.1:9")
    | dict(all_proxy="socks://127.0.0.1:9", NO_PROXY="example.com", SSL_CERT_FILE=GONE),
    "vllm": dict(VLLM_API_KEY="theirs", VLLM_HOST_IP="203.0.113.1", VLLM_LOOPBACK_IP="203.0.113.1")
    | dict(VLLM_PORT="tcp://10.0.0.1:8000", VLLM_SERVICE_HOST="10.0.0.1", VLLM_RPC_BASE_PATH=GONE)
    | dict(VLLM_PLUGINS="", VLLM_DP_RANK="3", VLLM_DP_SIZE="8", VLLM_DP_MASTER_IP="203.0.113.1")
    | dict(VLLM_CPU_OMP_THREADS_BIND="0-999", VLLM_CPU_KVCACHE_SPACE="99999")
    | dict(VLLM_CPU_NUM_OF_RESERVED_CPU="999", VLLM_TARGET_DEVICE="tpu", VLLM_USE_RUST_FRONTEND="1")
    | dict(VLLM_USE_V2_MODEL_RUNNER="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")
    | dict(VLLM_WORKER_MULTIPROC_METHOD="spawn", VLLM_TEST_FORCE_LOAD_FORMAT="dummy", VLLM_USE_MODELSCOPE="1")
    | dict(VLLM_MAX_N_SEQUENCES="1", VLLM_BATCH_INVARIANT="1", VLLM_CONFIGURE_LOGGING="0")
    | dict(VLLM_LOGGING_CONFIG_PATH=GONE, VLLM_LOGGING_LEVEL="ERROR", VLLM_PROCESS_NAME_PREFIX="theirs")
    | dict(VLLM_DISABLE_REQUEST_ID_RANDOMIZATION="1", VLLM_UNKNOWN="1"),
    "Python": dict(PYTHONWARNINGS="error", PYTHONDEVMODE="1", PYTHONDONTWRITEBYTECODE="1", PYTHONHASHSEED="1")
    | dict(PYTHONIOENCODING="ascii", PYTHONSAFEPATH="1", PYTHONINTMAXSTRDIGITS="640", PYTHONSTARTUP=GONE),
    "threads": dict(OMP_PLACES="{0}", OMP_PROC_BIND="true", GOMP_CPU_AFFINITY="0", KMP_AFFINITY="compact")
    | dict(OMP_DYNAMIC="true", MKL_NUM_THREADS="64"),
    "GPUs": dict(CUDA_VISIBLE_DEVICES="0,GPU-0a1b,-1", NCCL_SOCKET_IFNAME="gone0", GLOO_SOCKET_IFNAME="gone0")
    | dict(NCCL_ALGO="Gone", CUDA_LAUNCH_BLOCKING="1", TORCH_DISTRIBUTED_DEBUG="DETAIL")
    | dict(TORCH_SHOW_CPP_STACKTRACES="1", LOGLEVEL="DEBUG"),
    "system": dict(TMPDIR=GONE, HOME=GONE, XDG_CACHE_HOME=GONE, XDG_CONFIG_HOME=GONE, HF_HOME=GONE)
    | dict(HF_TOKEN="hf_not_a_token", TRANSFORMERS_OFFLINE="1", LC_ALL="C", LANG="xx_XX", TERM="gone")
    | dict(COLUMNS="1", NO_COLOR="1", WANDB_MODE="gone"),
}


def same_as_plain(run):
    """Check that a run took the steps of `world.plain`."""
    assert run.code == 0, run.out + run.err
    assert [line["reward"] for line in run.metrics] == [line["reward"] for line in world.plain().metrics]
    assert [line["grad_norm"] for line in run.metrics] == pytest.approx(
        [line["grad_norm"] for line in world.plain().metrics], rel=1e-4
    )


@pytest.mark.parametrize(
    "launched", [False, pytest.param(True, marks=pytest.mark.full)], ids=["a server that runs", "its own server"]
)
def test_all_hostile_environments_together_change_no_result(launched, tmp_path):
    everything = {name: value for environment in HOSTILE.values() for name, value in environment.items()}
    assert {row_of(name).fate for name in everything} == {PASSED, IGNORED, REMOVED}
    run = world.train(tmp_path, prepare=lambda: os.environ.update(everything), launched=launched)
    same_as_plain(run)
    assert "RANK" in run.err


@pytest.mark.full
@pytest.mark.parametrize("name", HOSTILE)
def test_each_hostile_environment_changes_no_result(name, tmp_path):
    run = world.finish(world.start(tmp_path, launched=True, **HOSTILE[name]), tmp_path)
    same_as_plain(run)


NAMELESS = "hostname gone-host && ip link set lo up"
SIX = """hostname six && ip link set lo up && ip -6 addr add fd00::1/128 dev lo && ip -6 route add default dev lo &&
    echo 'fd00::1 six' > {folder}/hosts && mount --bind {folder}/hosts /etc/hosts"""
HOSTS = {"no network and a name that does not resolve": NAMELESS, "IPv6 only": SIX}


@pytest.mark.full
@pytest.mark.parametrize("host", HOSTS)
def test_hosts_without_a_name_or_an_ipv4_network_change_no_result(host, tmp_path):
    namespaces = ["unshare", "--uts", "--net", "--mount", "sh", "-c"]
    made = subprocess.run([*namespaces, "ip link set lo up"], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"namespaces need root and the package iproute2: {made.stderr.strip()}")
    within = [*namespaces, f'{HOSTS[host].format(folder=tmp_path)} && exec "$@"', "sh"]
    environment = {"NPROC": "2", "MASTER_ADDR": "gone.invalid"}
    same_as_plain(world.finish(world.start(tmp_path, launched=True, within=within, **environment), tmp_path))
