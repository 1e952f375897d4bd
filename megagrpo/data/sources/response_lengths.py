"""The response lengths of each prompt's last visit, for the order in which prompts begin."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class ResponseLengths:
    """The mean length of the responses to each prompt of a data set at its last visit: 4 bytes a prompt.

    Every rank learns the same lengths, so a prompt has its expected length on whichever rank generates it. Checkpoints
    leave them out, because they change no result: a resumed run learns them again as it visits prompts.
    """

    def __init__(self) -> None:
        self._means = np.zeros(0, np.float32)

    def learn(self, prompt_ids: Sequence[int], lengths: Sequence[int]) -> None:
        """Store the lengths of responses in tokens; `prompt_ids` has the prompt of each response."""
        ids, of_response = np.unique(prompt_ids, return_inverse=True)
        if missing := max(0, int(ids[-1]) + 1 - self._means.size):
            self._means = np.pad(self._means, (0, missing))
        self._means[ids] = np.bincount(of_response, lengths) / np.bincount(of_response)

    def expected(self, prompt_id: int) -> float:
        """Return the mean length at the prompt's last visit; 0 if it had none."""
        return float(self._means[prompt_id]) if prompt_id < self._means.size else 0.0
