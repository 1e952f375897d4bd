"""A model's own `load_weights` over lazy tensors during vLLM's reload, which keeps only what goes through parameters' weight loaders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from megagrpo.rollout.shard_reader import ShardReader

EXPERTS = ".mlp.experts."


def load_weights(model: nn.Module, reader: ShardReader) -> set[str]:
    """Run the model's loaders over all tensors of `reader`; names of the parameters that they loaded."""
    tensors = reader.tensors()
    # vLLM's GPT-OSS copies a tensor of all experts into its parameters itself, and one expert's through weight loaders.
    if hasattr(getattr(model, "model", None), "_try_load_streamed_expert"):
        tensors = one_by_one(tensors)
    loaded = set(model.load_weights(tensors))
    _repeat_lost_copies(model, reader)
    return loaded


def one_by_one(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """A tensor of all experts of a block as one of each: x.mlp.experts.down_proj becomes x.mlp.experts.0.down_proj and so on."""
    for name, tensor in tensors:
        block, experts, projection = name.partition(EXPERTS)
        if experts:
            yield from ((f"{block}{experts}{number}.{projection}", part) for number, part in enumerate(tensor.unbind()))
        else:
            yield name, tensor


def _repeat_lost_copies(model: nn.Module, reader: ShardReader) -> None:
    """A loader that copies into a parameter itself (the sinks of GPT-OSS) does so into one without data. Once more, through the weight
    loader."""
    for module in model.modules():
        info = get_layerwise_info(module)
        if not info.can_load() or info.load_numel > 0:
            continue  # loaded, or about to be when the update is finished
        for parameter in list(module.parameters(recurse=False)):  # loading puts others in their place
            if (lost := reader.copies.get(parameter.untyped_storage()._cdata)) is not None:
                parameter.weight_loader(parameter, lost)
