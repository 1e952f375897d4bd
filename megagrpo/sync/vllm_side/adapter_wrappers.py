"""vLLM's wrappers of linears that take adapters, which are taken off while the linears' own weights are loaded."""

from __future__ import annotations

from torch import nn


class AdapterWrappers:
    """The wrappers in `model`, if it takes adapters. Without them its modules have the names that its loaders know."""

    def __init__(self, model: nn.Module):
        self.model = model
        self._off: list[tuple[nn.Module, str, nn.Module]] = []  # parent, name in it, wrapper

    def take_off(self) -> None:
        """Put the linears in the place of their wrappers. Does nothing on a second call."""
        # imports most of vLLM, which the plugin loader has not done in every process
        from vllm.lora.layers import BaseLayerWithLoRA

        for name, module in [*self.model.named_modules(remove_duplicate=False)]:
            if isinstance(module, BaseLayerWithLoRA):
                parent, _, last = name.rpartition(".")
                self._off.append((self.model.get_submodule(parent), last, module))
        for parent, last, module in self._off:
            setattr(parent, last, module.base_layer)

    def put_back(self) -> None:
        """Put the wrappers back."""
        while self._off:
            setattr(*self._off.pop())
