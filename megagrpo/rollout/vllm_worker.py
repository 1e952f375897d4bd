"""Public name of WorkerVerbs for servers that users start themselves: `--worker-extension-cls megagrpo.rollout.vllm_worker.WorkerVerbs`."""

from megagrpo.vllm_plugin.worker_verbs import WorkerVerbs as WorkerVerbs
