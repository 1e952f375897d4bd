"""What the Qwen families read from config.json: windows, and blocks with experts."""

from __future__ import annotations

from megagrpo.families.shared.family import Raw, windows

UPPER_WINDOWS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")  # read by `upper_windows`


def window(raw: Raw) -> int | None:
    """Return how many tokens a token sees in blocks with a window, or None."""
    return raw.get("sliding_window", 4096) if raw.get("use_sliding_window") else None


def upper_windows(raw: Raw) -> tuple[int | None, ...]:
    """Return the windows of a dense Qwen: blocks from `max_window_layers` on, unless `layer_types` overrides it."""
    return windows(raw, window(raw), lambda block: block >= raw.get("max_window_layers", 28))


def moe_blocks(raw: Raw) -> frozenset[int]:
    """Return the blocks with experts: each `decoder_sparse_step`th, but those of `mlp_only_layers`."""
    dense, every = raw.get("mlp_only_layers") or [], raw.get("decoder_sparse_step") or 1
    return frozenset(b for b in range(raw["num_hidden_layers"]) if b not in dense and (b + 1) % every == 0)
