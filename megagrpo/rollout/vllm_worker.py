"""The name that users give to the servers they start themselves: `--worker-extension-cls megagrpo.rollout.vllm_worker.WorkerVerbs`."""

from megagrpo.vllm_plugin.worker_verbs import WorkerVerbs as WorkerVerbs
