"""Environment variables that a launcher or a user sets for the processes of a run: their names, and the values for
OpenMP and glibc."""

TOKEN_VARIABLE = "MEGAGRPO_TOKEN"  # the token of the servers and, on several nodes, of the ranks
TOKEN_FILE_VARIABLE = "MEGAGRPO_TOKEN_FILE"  # the file that holds the token
RENDEZVOUS_VARIABLE = (
    # the folder in which the ranks of one node meet; megagrpo/platform/launch/launcher_rendezvous.py makes it
    "MEGAGRPO_RENDEZVOUS"
)
# hold the index of this node in a Slurm step, or in a job of Kubernetes
NODE_INDICES = ("SLURM_NODEID", "JOB_COMPLETION_INDEX")

OPENMP = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}
"""How OpenMP's threads wait for each other on a CPU: they spin for 10,000 iterations, 0.1 to 0.5 milliseconds, and then
sleep.

Without spinning, each operation on two threads wakes a sleeping thread: a bf16 step takes 1.3 times as long
(`benchmarks/step_cost.py`). With the default, many milliseconds, threads that wait take the cores from threads that
compute.
"""

KEPT_BYTES = 32 * 2**20
"""Size of the largest tensor whose memory a process without a GPU keeps for its next tensors
(`device.reuse_freed_memory`): glibc's limit."""
# In the kernel's default pages of 4 KiB, new memory for the weights of a sync takes longer than their copy.
MALLOC = f"glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold={KEPT_BYTES}:glibc.malloc.trim_threshold={2**31 - 1}"
"""GLIBC_TUNABLES of a vLLM server without a GPU: it allocates in huge pages, and keeps freed memory as the trainer
does."""
