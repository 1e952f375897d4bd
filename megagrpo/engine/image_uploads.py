"""Sends the pixels of a prompt's images to a server once. Later requests name their hashes."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable

from megagrpo.engine.http.connections import ConnectionFailed
from megagrpo.engine.image_features import image_hashes
from megagrpo.engine.requests import GroupRequest


class ImageUploads:
    """The images that each server has been sent. vLLM keeps their pixels by hash (`--mm-processor-cache-gb`).

    A server that has dropped an image responds with an error, and the retry sends the pixels. Used from several threads
    with an event loop each.
    """

    def __init__(self) -> None:
        self._sent: dict[str, set[str]] = defaultdict(set)  # server -> hashes
        self._running: dict[tuple[object, str, int], asyncio.Future[bool]] = {}

    async def has(self, url: str, group: GroupRequest, upload: Callable[[], Awaitable[int]]) -> bool:
        """Whether the server has the images of the group's prompt, after `upload` if they were not sent. `upload`
        returns the status code of a request with them; requests that wait at once share it."""
        if self._sent[url].issuperset(image_hashes(group.prompt.inputs)):
            return True
        key = asyncio.get_running_loop(), url, id(group.prompt.inputs)
        if key not in self._running:
            running = self._running[key] = asyncio.ensure_future(self._upload(url, group, upload))
            running.add_done_callback(lambda _: self._running.pop(key))
        return await asyncio.shield(self._running[key])

    def forget(self, url: str) -> None:
        """Send all images to the server again: a request failed there."""
        self._sent.pop(url, None)

    async def _upload(self, url: str, group: GroupRequest, upload: Callable[[], Awaitable[int]]) -> bool:
        try:
            was_sent = await upload() == 200
        except (ConnectionFailed, TimeoutError):  # the request with the pixels fails too, and is retried
            return False
        if was_sent:
            self._sent[url] |= {*image_hashes(group.prompt.inputs)}
        return was_sent
