"""Routes: the experts that a mixture of experts took for each token, as arrays of numbers of experts.

A route [k] has the k experts of one token in one layer with experts. Routes of a sample of L tokens are [L - 1, M, k]
for M layers with experts: the last token was sampled but never read, so the engine has no route for it. Position t is
the route of token t as an input.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np

from megagrpo.types import Routes


class InvalidRoutes(ValueError):
    """Routes are missing or are not routes of this model; the message names the token and the layer."""


@dataclass(frozen=True)
class RouteShape:
    """What the routes of a model look like."""

    layers: tuple[int, ...]  # decoder layers with experts, ascending, counted from 0
    num_layers: int  # decoder layers
    experts: int
    per_token: int  # k

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The smallest type that holds the number of an expert, and that torch computes with."""
        return np.dtype(np.uint8 if self.experts <= 256 else np.int16)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the routes of one token in all layers."""
        return len(self.layers) * self.per_token * self.dtype.itemsize

    def filler(self, positions: np.ndarray, num_layers: int) -> Routes:
        """Return valid routes [n, num_layers, k] for tokens that no loss depends on: experts in turn, by position."""
        experts = (positions[:, None] * self.per_token + np.arange(self.per_token)) % self.experts
        return np.repeat(experts[:, None], num_layers, axis=1).astype(self.dtype)

    def checked(self, routes: np.ndarray | None, rows: int) -> Routes:
        """Return the first `rows` routes [rows, M, k] of the engine's [n, layers, k], which has rows of layers without
        experts too. Raises InvalidRoutes for a missing route, and for one whose experts repeat or do not exist."""
        if routes is None:
            raise InvalidRoutes("sent no routed_experts; start it with --enable-return-routed-experts")
        if routes.ndim != 3 or routes.shape[1:] != (self.num_layers, self.per_token):
            expected = f"[tokens, {self.num_layers}, {self.per_token}]"
            raise InvalidRoutes(f"sent routed_experts of shape {list(routes.shape)}; the model's are {expected}")
        if len(routes) < rows:
            missing = f"no route for token {len(routes)} in layer {self.layers[0]}"
            raise InvalidRoutes(f"sent {missing}: {len(routes)} rows of routed_experts for {rows} tokens")
        chosen = routes[:rows, list(self.layers)]
        ordered = np.sort(chosen, axis=-1)
        bad = (ordered[..., -1] >= self.experts) | (ordered[..., 1:] == ordered[..., :-1]).any(-1)
        if bad.any():
            token, layer = (int(index[0]) for index in np.nonzero(bad))
            where = f"token {token} in layer {self.layers[layer]}"
            raise InvalidRoutes(f"sent no route for {where}: experts {chosen[token, layer].tolist()}")
        return chosen.astype(self.dtype, copy=False)


def read_routes(content: bytes) -> np.ndarray:
    """Return the array [n, layers, k] of the bytes of a .npy file. Raises ValueError for other bytes."""
    routes = np.load(io.BytesIO(content), allow_pickle=False)
    if routes.dtype not in (np.uint8, np.uint16):
        raise ValueError(f"routed_experts are {routes.dtype}, not uint8 or uint16")
    return routes


def joined_routes(first: np.ndarray | None, more: np.ndarray | None) -> np.ndarray | None:
    """Return the routes of a text of which the engine read the first part before, and all of it now: a token keeps the
    route of its first pass, with which its successor was sampled."""
    if first is None or more is None:
        return more if first is None else first
    return np.concatenate([first, more[len(first) :]])
