"""FP8 linears and FP8 weights of the policy. To follow one weight through a step, read the files in this order:

1. `fp8_settings`: the recipe that the config selects, and what it means for a matrix: which elements share a scale.
2. `rounding`: the arithmetic. A matrix becomes tiles, a tile gets a scale, and its elements become FP8 numbers.
3. `tensor`: a weight stored as FP8 numbers and scales (`model.fp8_param`), and functions that read any weight, FP8 or
   not.
4. `products`: a linear rounds its operands and multiplies them, in the forward and the backward pass. An operand's
   scale comes from the tensor itself (`CurrentScaling`).
5. `masters`: after the optimizer's step the FP8 weights are rounded from their float32 masters. Scales are max-reduced
   over the ranks that shard the masters.
6. `dense_access`: dense reads and writes of an FP8 weight, for code that slices tensors: loading, checkpoints and
   weight sync.

Beside the path of a weight `megatron_patches` adapts Megatron's own use of Transformer Engine. Without Transformer
Engine `products` emulates FP8 in torch.
"""
