"""The LM head and its softmax in one Triton kernel, used by `vocab_logprobs(..., fused=True)`.

Without gradients ahead of the backward pass (`upstream`), the forward pass is one product, and no logit is written to
memory. A program multiplies one block of tokens with one part of the vocabulary, tile by tile, and keeps four numbers
per token. torch combines the parts, then the tensor-parallel ranks.

With gradients it works on one chunk of tokens at a time. The kernel also writes the chunk's logits, 16 bits each, to
scratch. Once the ranks know the chunk's normaliser, a second kernel turns the logits into gradients in place. Two
cuBLAS products then make the gradients of hidden states and head. The scratch is `SCRATCH_BYTES` at most: a larger
vocabulary means fewer tokens per chunk, not more memory.

- With gradients ahead of the backward pass: three products of N x V x H in all, as many as a head that keeps all
  logits. In addition each logit is written once, read and written once, and read twice, at 2 bytes; each chunk adds to
  the head's gradient in float32.
- Without: four products, since the forward pass keeps nothing.

The 16-bit value is not the logit but its distance from the largest logit so far, so likely tokens are the most precise.
Log-probs and entropy come from float32 sums.

With an FP8 recipe hidden states and head are multiplied as float8_e4m3, scaled to its range. "tensorwise" has one scale
per tensor. "blockwise" has one per token and 128 features, and one per 128 x 128 of the head. The gradients' products
use the unquantized inputs, in their own dtype (a straight-through gradient). The FP8 copies take one byte per element.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megagrpo.config.sections.training import FUSED_SCRATCH_BYTES
from megagrpo.platform import device
from megagrpo.policy.lm_head.fp8 import FP8_BLOCK, Factor, in_fp8
from megagrpo.policy.lm_head.task import HeadTask
from megagrpo.policy.lm_head.vocab_shard import LOWEST, Softmax, VocabShard

SCRATCH_BYTES = FUSED_SCRATCH_BYTES
MAX_SPLITS = 128  # limit of the vocabulary's parts; each takes 16 bytes per token
GRADIENT_TILE = 16  # tokens whose logits one program turns into gradients
# blocks of tokens that share rows of the head in the L2 cache; 11 x 12 parts fill the 132 processors of an H100
GROUP = 11


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of one program's products, and its warps and pipeline stages."""

    tokens: int = 128
    vocab: int = 256
    hidden: int = 64
    warps: int = 8
    stages: int = 4


TILES = Tiles()
FP8_TILES = Tiles(vocab=128, hidden=FP8_BLOCK)  # restarting the sums takes registers: half as many columns


def refusal(
    hidden_dtype: torch.dtype, hidden_size: int, truncation: bool, exact_kl: bool, fp8: bool = False
) -> str | None:
    """Return why the kernels cannot run, as the rest of a sentence; None when they can."""
    if exact_kl:
        return "exact KL needs the logits of two models"
    if truncation:
        return "top_p, top_k and min_p need sorted logits"
    if reason := device.no_fused_kernels():
        return reason
    if hidden_dtype != torch.bfloat16 and not (hidden_dtype == torch.float32 and device.interprets_triton()):
        return f"the kernels multiply bfloat16, not {str(hidden_dtype).removeprefix('torch.')}"
    itemsize = 1 if fp8 else hidden_dtype.itemsize
    if hidden_size * itemsize % 16:
        return f"rows of {hidden_size} features of {itemsize} byte(s) are not a multiple of 16 bytes"
    return None


def num_splits(num_blocks: int, num_tiles: int, processors: int) -> int:
    """Return how many parts split the vocabulary's tiles, so that token blocks times parts keep all processors busy.

    It is the number that takes the fewest rounds of tiles; on a tie the smallest.
    """
    rounds = {
        s: -(-num_blocks * s // processors) * -(-num_tiles // s) for s in range(1, min(MAX_SPLITS, num_tiles) + 1)
    }
    return min(rounds, key=lambda s: (rounds[s], s))


def chunk_tokens(num_columns: int, itemsize: int, tiles: Tiles) -> int:
    """Return how many tokens' logits and references fit into the scratch; a multiple of a block if one block fits."""
    bytes_per_token = _width(num_columns) * itemsize + -(-num_columns // tiles.vocab) * 4
    fitting = max(1, SCRATCH_BYTES // bytes_per_token)
    return fitting // tiles.tokens * tiles.tokens or fitting


def _width(num_columns: int) -> int:
    """Return the columns of the scratch: a multiple of 16, so that the compiler can use vector loads and stores."""
    return -(-num_columns // 16) * 16


class FusedPass:
    """One pass over the tokens, `chunk` at a time: log-probs, entropy and, with `stores`, the logits' gradients."""

    def __init__(self, hidden: Tensor, weight: Tensor, task: HeadTask, stores: bool):
        self._hidden, self._weight, self._task, self._stores = hidden, weight, task, stores
        self.shard: VocabShard = task.shard(weight)
        self._tiles = TILES if task.fp8 is None else FP8_TILES
        self._width = _width(self.shard.num_rows)
        itemsize = 2 if hidden.dtype == torch.bfloat16 else 4
        # Sized by the head's rows with padding: that number is equal on all ranks, which must combine the same tokens.
        most = chunk_tokens(weight.shape[0], itemsize, self._tiles) if stores else hidden.shape[0]
        self.chunk = max(1, min(most, hidden.shape[0]))

    @cached_property
    def _factors(self) -> tuple[Factor, Factor]:
        """The operands: hidden states, and the head's rows without padding."""
        hidden, head, recipe = (
            self._hidden.detach().contiguous(),
            self._weight.detach()[: self.shard.num_rows],
            self._task.fp8,
        )
        if recipe is None:
            return Factor(hidden, None), Factor(head, None)
        return in_fp8(hidden, recipe, rows_per_block=1), in_fp8(head, recipe, rows_per_block=FP8_BLOCK)

    @cached_property
    def _scratch(self) -> Tensor:
        """[chunk, width] memory: float16 or float32 logits of the inputs' size, then gradients in the inputs' dtype."""
        return torch.empty(self.chunk, self._width, dtype=self._hidden.dtype, device=self._hidden.device)

    @cached_property
    def _references(self) -> Tensor:
        """Memory for one float32 per token of a chunk and tile of the vocabulary."""
        size = -(-self.shard.num_rows // self._tiles.vocab) * self.chunk
        return torch.empty(size, dtype=torch.float32, device=self._hidden.device)

    def forward(self, rows: slice) -> Tensor:
        """Return log-probs, entropy and log-normaliser [3, n] float32 of the tokens `rows`."""
        statistics = self._statistics(rows)
        softmax = _combined(statistics, self.shard)
        return torch.stack((softmax.logprobs, softmax.entropy, softmax.log_normaliser))

    def compute_logits_again(self, rows: slice, results: Tensor) -> None:
        """Recompute the logits [n, v] of `rows` into the scratch, as `forward` left them."""
        self._statistics(rows)

    def _statistics(self, rows: slice) -> Tensor:
        """Return the kernel's statistics [4, splits, n] float32. With `stores` the scratch holds logits of `rows`."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        from megagrpo.policy.lm_head import fused_logprobs_kernels as kernels

        tiles, num_tokens, columns = self._tiles, rows.stop - rows.start, self.shard.num_rows
        if columns == 0:
            empty = self._hidden.new_zeros(4, 1, num_tokens, dtype=torch.float32)
            empty[0] = LOWEST
            return empty
        (hidden, hidden_scales), (head, head_scales) = self._factors
        blockwise = self._task.fp8 == "blockwise"
        blocks = -(-num_tokens // tiles.tokens)
        splits = num_splits(blocks, -(-columns // tiles.vocab), device.num_processors())
        statistics = self._hidden.new_empty(4, splits, num_tokens, dtype=torch.float32)
        stored = None
        if self._stores:
            logits = self._scratch[:num_tokens].view(self._stored_dtype)
            stored = TensorDescriptor.from_tensor(logits, [tiles.tokens, tiles.vocab // 2])
        kernels.head_statistics[(blocks * splits,)](
            TensorDescriptor.from_tensor(hidden[rows], [tiles.tokens, tiles.hidden]),
            TensorDescriptor.from_tensor(head, [tiles.vocab, tiles.hidden]),
            hidden_scales[rows] if blockwise and hidden_scales is not None else hidden_scales,
            head_scales,
            self._columns_of_labels(rows),
            statistics,
            stored,
            self._references if self._stores else None,
            num_tokens,
            columns,
            self._hidden.shape[1],
            splits,
            self._task.temperature,
            self._task.logit_cap or 1.0,
            LOWEST=LOWEST,
            BLOCK_N=tiles.tokens,
            BLOCK_V=tiles.vocab,
            BLOCK_H=tiles.hidden,
            GROUP=GROUP,
            FP8=self._task.fp8,
            CAPPED=self._task.logit_cap is not None,
            STORE=self._stores,
            WIDEN=device.interprets_triton(),
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
        return statistics

    def grad_logits(self, rows: slice, results: Tensor, upstream: Tensor) -> Tensor:
        """Return the gradient of logits before cap and temperature [n, v], in the inputs' dtype; it overwrites them.

        `results` is the result of `forward` for these rows. `upstream` holds the gradients of log-probs and, with
        `entropy_gradient`, of entropy.
        """
        from megagrpo.policy.lm_head import fused_logprobs_kernels as kernels

        tiles, num_tokens, columns = self._tiles, results.shape[1], self.shard.num_rows
        scratch = self._scratch[:num_tokens]
        if columns:
            kernels.gradient_of_stored[(-(-num_tokens // GRADIENT_TILE), -(-self._width // tiles.vocab))](
                scratch.view(self._stored_dtype),
                scratch,
                self._references,
                self._columns_of_labels(rows),
                results[2].contiguous(),
                results[1].contiguous(),
                upstream[0].contiguous(),
                upstream[1].contiguous() if self._task.entropy_gradient else torch.zeros_like(upstream[0]),
                num_tokens,
                columns,
                self._width,
                self._task.temperature,
                self._task.logit_cap or 1.0,
                BLOCK_N=GRADIENT_TILE,
                BLOCK_V=tiles.vocab,
                CAPPED=self._task.logit_cap is not None,
                num_warps=4,
            )
        return scratch[:, :columns]

    @property
    def _stored_dtype(self) -> torch.dtype:
        return torch.float16 if self._hidden.dtype == torch.bfloat16 else torch.float32

    def _columns_of_labels(self, rows: slice) -> Tensor:
        """Return [n] int64: the column of each label among this rank's rows, or -1 where another rank holds it."""
        columns = self._task.labels[rows] - self.shard.first_row
        return torch.where((columns >= 0) & (columns < self.shard.num_rows), columns, -1)


def _combined(statistics: Tensor, shard: VocabShard) -> Softmax:
    """Combine statistics [4, parts, n] of this rank's parts into each token's softmax over the whole vocabulary.

    One maximum and three sums per token cross the ranks.
    """
    maxima, totals, moments, picked = statistics
    maximum = maxima.amax(dim=0)
    shard.all_reduce(maximum, torch.distributed.ReduceOp.MAX)
    distance = maxima - maximum
    fade = distance.exp()
    sums = torch.stack(((totals * fade).sum(0), (fade * (moments + totals * distance)).sum(0), picked.sum(0)))
    shard.all_reduce(sums, torch.distributed.ReduceOp.SUM)
    total, moment, label = sums
    return Softmax(maximum, total, moment, label, torch.zeros_like(total))
