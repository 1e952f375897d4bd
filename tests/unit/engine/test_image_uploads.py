"""Pixels go to a server once: requests that wait at once share an upload, and a failed request forgets it."""

import asyncio
import gc
from pathlib import Path

import pytest

from megagrpo.data.images.prompt_images import ImageReader
from megagrpo.engine import image_features
from megagrpo.engine.http.connections import ConnectionFailed
from megagrpo.engine.image_features import image_hashes
from megagrpo.engine.image_uploads import ImageUploads
from megagrpo.engine.requests import GroupRequest, Request
from megagrpo.types import Prompt, SamplingParams
from tests.distributed.tiny_vision import image, write_model

TOKEN = 69


@pytest.fixture(scope="module")
def group(tmp_path_factory) -> GroupRequest:
    folder: Path = tmp_path_factory.mktemp("model")
    write_model(folder)
    ids, inputs = ImageReader(folder, TOKEN, 2).placed([5, TOKEN, 7], [image(56, 56, 1)])
    return GroupRequest(Prompt(0, ids, "", inputs=inputs), 4, SamplingParams(1.0, 8), 3, 0)


def test_requests_at_once_share_one_upload_and_a_failure_forgets_it(group):
    uploads, asked = ImageUploads(), []

    async def upload() -> int:
        asked.append(1)
        await asyncio.sleep(0.01)
        return 200

    async def lost() -> int:
        raise ConnectionFailed("refused")

    async def refused() -> int:
        return 500

    async def all_of(url, send) -> list[bool]:
        return await asyncio.gather(*(uploads.has(url, group, send) for _ in range(4)))

    for failing in (lost, refused):
        assert asyncio.run(all_of("one", failing)) == [False] * 4
    assert asyncio.run(all_of("one", upload)) == [True] * 4 and len(asked) == 1
    assert asyncio.run(all_of("one", upload)) == [True] * 4 and len(asked) == 1
    assert asyncio.run(all_of("other", upload)) == [True] * 4 and len(asked) == 2
    uploads.forget("one")
    assert asyncio.run(all_of("one", upload)) == [True] * 4 and len(asked) == 3


def test_vllm_reads_an_upload_and_a_request_that_names_images(group):
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

    upload = GenerateRequest.model_validate_json(group.upload("id"))
    named = GenerateRequest.model_validate_json(Request(group, 1).body("id", pixels=False))
    whole = GenerateRequest.model_validate_json(Request(group, 1).body("id"))
    assert upload.sampling_params.max_tokens == 1 and upload.features == whole.features
    assert named.features.kwargs_data is None and named.sampling_params == whole.sampling_params
    for name in ("mm_hashes", "mm_placeholders"):
        assert getattr(named.features, name) == getattr(whole.features, name)


def test_hashes_live_as_long_as_the_images(tmp_path):
    write_model(tmp_path)
    _, inputs = ImageReader(tmp_path, TOKEN, 2).placed([TOKEN], [image(56, 56, 1)])
    assert image_hashes(inputs) is image_hashes(inputs), "pixels are computed once"
    count = len(image_features._HASHES)
    del inputs
    gc.collect()
    assert len(image_features._HASHES) == count - 1
