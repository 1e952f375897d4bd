"""Triton kernels of the fused log-probs: an LM head whose logits stay on chip, and the gradient of stored logits.

Operands are N tokens x H, and a rank's v rows of the head x H. Both are read through descriptors (TMA on Hopper and
later), which return 0 out of bounds. Products accumulate in float32. Under Triton's interpreter (TRITON_INTERPRET=1)
the same kernels run on a CPU. The interpreter multiplies neither bfloat16 nor FP8, so there operands are cast to
float32 first (`WIDEN`). This changes no product.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# Triton reads annotations: only compile-time constants have one, and the other arguments are described by comments.

from __future__ import annotations

import triton
import triton.language as tl

SCALE_BLOCK = tl.constexpr(128)  # elements along H, and rows of the head, that share a scale with FP8 "blockwise"
# probability 0, and finite in 16 bits; minus infinity times a probability of 0 would be NaN
LEAST_STORED = tl.constexpr(-6e4)
VARYING = ["num_tokens", "num_columns", "num_splits"]  # not specialised: no second compilation for multiples of 16


@triton.jit
def _logits(
    hidden,
    weight,
    hidden_scale,
    weight_scale,
    first_token,
    first_column,
    num_tokens,
    num_columns,
    hidden_size,
    temperature,
    cap,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    FP8: tl.constexpr,
    CAPPED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Return logits [BLOCK_N, BLOCK_V] float32 of the sampled distribution: after scales, cap and temperature."""
    products = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    if FP8 == "blockwise":
        tokens = first_token + tl.arange(0, BLOCK_N)
        tl.static_assert(
            SCALE_BLOCK % BLOCK_V == 0 and BLOCK_H == SCALE_BLOCK, "a tile must not need two scales of the head"
        )
        blocks = tl.cdiv(hidden_size, SCALE_BLOCK)
    for start in range(0, hidden_size, BLOCK_H):
        left, right = hidden.load([first_token, start]), weight.load([first_column, start])
        if WIDEN:
            left, right = left.to(tl.float32), right.to(tl.float32)
        if FP8 == "blockwise":
            # Each block of features has its own scales: its sum starts from 0 and is added to the total in float32.
            block = start // SCALE_BLOCK
            scales = tl.load(hidden_scale + tokens * blocks + block, mask=tokens < num_tokens, other=0.0)
            scales *= tl.load(weight_scale + first_column // SCALE_BLOCK * blocks + block)
            products += tl.dot(left, right.T, out_dtype=tl.float32) * scales[:, None]
        elif FP8 == "tensorwise":
            # Hopper accumulates FP8 products with 14 bits; after every BLOCK_H of them the sum is added to the total in
            # float32.
            products = tl.dot(left, right.T, products, max_num_imprecise_acc=BLOCK_H)
        else:
            products = tl.dot(left, right.T, products, input_precision="ieee")
    if FP8 == "tensorwise":
        products *= tl.load(hidden_scale) * tl.load(weight_scale)
    if CAPPED:
        products = cap * (2 * tl.sigmoid(products * (2 / cap)) - 1)  # cap tanh(products / cap)
    return products * (1 / temperature)


@triton.jit
def _locate(program, num_tokens, num_splits, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Return (first token, split) of a program.

    Programs that run at the same time cover GROUP blocks of tokens times as many splits as fit. They share both tokens
    and rows of the head in the L2 cache.
    """
    blocks = tl.cdiv(num_tokens, BLOCK_N)
    group = program // (GROUP * num_splits)
    width = min(blocks - group * GROUP, GROUP)
    within = program % (GROUP * num_splits)
    return (group * GROUP + within % width) * BLOCK_N, within // width


@triton.jit(do_not_specialize=VARYING)
def head_statistics(
    hidden,  # descriptor of [N, H], blocks [BLOCK_N, BLOCK_H]
    weight,  # descriptor of [v, H], blocks [BLOCK_V, BLOCK_H]
    hidden_scale,  # float32, with FP8 "tensorwise" [1], with "blockwise" [N, H / 128]
    weight_scale,  # float32, with FP8 "tensorwise" [1], with "blockwise" [v / 128, H / 128]
    # [N] int64, the label's column among this rank's rows; outside 0 .. v where another rank holds it
    columns_of_labels,
    # [4, num_splits, N] float32: maximum z, sum e, sum e (z - maximum), the label's z; with e = exp(z - maximum)
    statistics,
    stored,  # descriptor of [N, v], blocks [BLOCK_N, BLOCK_V / 2], with STORE: z - references
    references,  # [v / BLOCK_V, N] float32, with STORE
    num_tokens,
    num_columns,
    hidden_size,
    num_splits,
    temperature,
    cap,
    LOWEST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GROUP: tl.constexpr,
    FP8: tl.constexpr,
    CAPPED: tl.constexpr,
    STORE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute softmax statistics of a token block over one of `num_splits` vocabulary parts in one pass over logits z.

    With STORE the logits are also written, in the dtype of `stored`, minus the largest logit that this pass has seen so
    far (`references`). Likely tokens, where rounding would matter, are therefore close to 0.
    """
    first_token, split = _locate(tl.program_id(0), num_tokens, num_splits, BLOCK_N, GROUP)
    tokens = first_token + tl.arange(0, BLOCK_N)
    inside = tokens < num_tokens
    labels = tl.load(columns_of_labels + tokens, mask=inside, other=-1).to(tl.int32)
    maximum = tl.full((BLOCK_N,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    moment = tl.zeros((BLOCK_N,), tl.float32)
    picked = tl.zeros((BLOCK_N,), tl.float32)
    num_tiles = tl.cdiv(num_columns, BLOCK_V)
    walk = tl.cdiv(num_tiles, num_splits)
    for tile in tl.range(split * walk, min((split + 1) * walk, num_tiles), flatten=True):
        first_column = tile * BLOCK_V
        columns = first_column + tl.arange(0, BLOCK_V)
        logits = _logits(
            hidden, weight, hidden_scale, weight_scale, first_token, first_column, num_tokens, num_columns, hidden_size,
            temperature, cap, BLOCK_N, BLOCK_V, BLOCK_H, FP8, CAPPED, WIDEN,
        )  # fmt: skip
        logits = tl.where((columns < num_columns)[None, :], logits, LOWEST)
        highest = tl.maximum(maximum, tl.max(logits, axis=1))
        picked += tl.sum(tl.where(columns[None, :] == labels[:, None], logits, 0.0), axis=1)
        logits -= highest[:, None]
        if STORE:
            # Stores go through shared memory. Writing half a tile at a time leaves room for one more pipeline stage.
            halves = (
                tl.maximum(logits, LEAST_STORED).to(stored.dtype).reshape(BLOCK_N, 2, BLOCK_V // 2).permute(0, 2, 1)
            )
            left, right = halves.split()
            stored.store([first_token, first_column], left)
            stored.store([first_token, first_column + BLOCK_V // 2], right)
            tl.store(references + tile * num_tokens + tokens, highest, mask=inside)
        exponentials = tl.exp(logits)
        fade = tl.exp(maximum - highest)
        moment = fade * (moment + total * (maximum - highest)) + tl.sum(exponentials * logits, axis=1)
        total = fade * total + tl.sum(exponentials, axis=1)
        maximum = highest
    target = statistics + split * num_tokens + tokens
    step = num_splits * num_tokens
    tl.store(target, maximum, mask=inside)
    tl.store(target + step, total, mask=inside)
    tl.store(target + 2 * step, moment, mask=inside)
    tl.store(target + 3 * step, picked, mask=inside)


@triton.jit
def _gradient(
    log_p, columns, labels, at_labels, at_entropy, entropy, normaliser, temperature, cap, CAPPED: tl.constexpr
):
    """Turn log p [n, v] and gradients [n] of log-prob and entropy into logit gradients before cap and temperature.

    d log p(label) / d z is 1 at the label, minus p. d entropy / d z is -p (log p + entropy).
    """
    here = tl.where(columns[None, :] == labels[:, None], at_labels[:, None], 0.0)
    gradient = here - tl.exp(log_p) * (at_labels[:, None] + at_entropy[:, None] * (log_p + entropy[:, None]))
    if CAPPED:
        share = (log_p + normaliser[:, None]) * (temperature / cap)
        gradient *= tl.maximum(1 - share * share, 0.0)
    return gradient * (1 / temperature)


@triton.jit(do_not_specialize=VARYING)
def gradient_of_stored(
    stored,  # [N, width], the logits that `head_statistics` stored
    gradient,  # [N, width], may be the same memory as `stored`
    references,  # [v / BLOCK_V, N] float32
    columns_of_labels,  # [N] int64
    normaliser,  # [N] float32, log sum exp z over all ranks
    entropy,  # [N] float32
    at_labels,  # [N] float32, d loss / d log-prob
    at_entropy,  # [N] float32, d loss / d entropy
    num_tokens,
    num_columns,
    width,
    temperature,
    cap,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Turn stored logits elementwise into gradients before cap and temperature; 0 from `num_columns` to `width`."""
    tile = tl.program_id(1)
    tokens = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = tokens < num_tokens
    labels = tl.load(columns_of_labels + tokens, mask=inside, other=-1).to(tl.int32)
    z = tl.load(normaliser + tokens, mask=inside, other=0.0)
    h = tl.load(entropy + tokens, mask=inside, other=0.0)
    to_label = tl.load(at_labels + tokens, mask=inside, other=0.0)
    to_entropy = tl.load(at_entropy + tokens, mask=inside, other=0.0)
    reference = tl.load(references + tile * num_tokens + tokens, mask=inside, other=0.0)
    offsets = tokens[:, None].to(tl.int64) * width + columns[None, :]
    valid = inside[:, None] & (columns < width)[None, :]
    log_p = tl.load(stored + offsets, mask=valid, other=0.0).to(tl.float32) + (reference - z)[:, None]
    result = _gradient(log_p, columns, labels, to_label, to_entropy, h, z, temperature, cap, CAPPED)
    result = tl.where((columns < num_columns)[None, :], result, 0.0)
    tl.store(gradient + offsets, result.to(gradient.dtype.element_ty), mask=valid)
