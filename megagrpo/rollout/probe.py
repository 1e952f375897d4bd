"""What servers that somebody else started must be able to do, asked before anything else begins."""

from __future__ import annotations

from collections.abc import Sequence

import httpx

from megagrpo.rollout.access import headers
from megagrpo.rollout.vllm_http import CERTIFICATES, error_text

BACKEND = """--weight-transfer-config '{"backend": "megagrpo"}'"""
VERBS = "--worker-extension-cls megagrpo.rollout.vllm_worker.WorkerVerbs"
NEEDED = f"{BACKEND} {VERBS}, with megagrpo installed where it runs and VLLM_SERVER_DEV_MODE=1 in its environment"


def check_plugin(urls: Sequence[str], token: str | None = None, quantization: str = "none") -> None:
    """ValueError that names the first server of `rollout.urls` that refuses `token`, whose workers cannot take weights from here, or which
    makes something else of them than `quantization` says. Changes nothing there."""
    for url in urls:
        try:
            asked = dict(json={"init_info": {}}, headers=headers(token), timeout=60, trust_env=False, verify=CERTIFICATES)
            answer = httpx.post(f"{url}/init_weight_transfer_engine", **asked)
        except httpx.TransportError as error:
            raise ValueError(f"rollout.urls: {url} does not answer: {error!r}") from error
        if answer.status_code == 401:
            raise ValueError(f"rollout.urls: {url} does not let this run in: {error_text(answer)}")
        if answer.status_code == 404:
            raise ValueError(f"rollout.urls: {url} has no routes for new weights (vLLM 0.25 or later has); start it with {NEEDED}")
        if answer.status_code != 200:
            raise ValueError(f"rollout.urls: {url} cannot take weights from here; start it with {NEEDED}. It says: {answer.text[:300]}")
        answer = httpx.post(f"{url}/collective_rpc", **asked | dict(json={"method": "quantization"}))
        if answer.status_code != 200:
            raise ValueError(f"rollout.urls: {url} lacks {VERBS}, of this version. It says: {answer.text[:300]}")
        if (its := answer.json()["results"][0]) != quantization:
            raise ValueError(
                f"rollout.quantization: {quantization} is not what {url} has been started with, which is {its}; set it to that, or "
                "start the server with `megagrpo serve` and this config"
            )
