"""Records the inputs and outputs of every layer in one pass, and replays a pass with another model's recorded
inputs."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from megagrpo.policy.specs import LAYERS_PER_BLOCK

Key = tuple[int, str]  # decoder layer of the whole model, and its half (see PARTS)
PARTS = ("attention", "mlp")


@dataclass
class Crossings:
    """The tensors of one layer, on the host, one per micro-batch in order.

    `before` and `after` are the hidden states [rows, 1, H] around the layer. `added` is the output of its attention or
    MLP. `gradient` is the gradient of `after`.
    """

    before: list[Tensor] = field(default_factory=list)
    added: list[Tensor] = field(default_factory=list)
    after: list[Tensor] = field(default_factory=list)
    gradient: dict[int, Tensor] = field(default_factory=dict)


Tape = dict[Key, Crossings]


def layers_of(chunks: Sequence[nn.Module]) -> dict[Key, nn.Module]:
    """Return the layers of this rank's bare chunks. A hybrid layer is half a decoder layer: first attention, then the
    MLP or the experts."""
    layers: list[nn.Module] = [layer for chunk in chunks for layer in attrgetter("decoder.layers")(chunk)]
    numbered: list[tuple[int, nn.Module]] = [(attrgetter("layer_number")(layer) - 1, layer) for layer in layers]
    return {(number // LAYERS_PER_BLOCK, PARTS[number % LAYERS_PER_BLOCK]): layer for number, layer in numbered}


@contextlib.contextmanager
def recording(chunks: Sequence[nn.Module], like: Tape | None = None) -> Iterator[Tape]:
    """Context manager: record a forward and backward pass of the chunks inside it.

    With `like` each layer gets the hidden states of this tape, and in the backward pass its gradient. The differences
    between the two tapes are then each layer's own; the model's final output is meaningless. Activations must not be
    recomputed, and both passes must run the same micro-batches in the same order.
    """
    tape: Tape = defaultdict(Crossings)
    with contextlib.ExitStack() as hooks:
        for key, layer in layers_of(chunks).items():
            before, added, after = _hooks(tape[key], None if like is None else like[key])
            half = layer.get_submodule("self_attention" if key[1] == "attention" else "mlp")
            hooks.callback(layer.register_forward_pre_hook(before, with_kwargs=True).remove)
            hooks.callback(half.register_forward_hook(added).remove)
            hooks.callback(layer.register_forward_hook(after).remove)
        yield tape


def _hooks(
    crossings: Crossings, like: Crossings | None
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Return the hooks before a layer, after its attention or MLP, and after the layer."""

    def before(
        layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden = kwargs["hidden_states"]
        if like is not None:
            hidden = _InPlaceOf.apply(hidden, like.before[len(crossings.before)].to(hidden))
        crossings.before.append(_on_host(hidden))
        return args, kwargs | {"hidden_states": hidden}

    def added(half: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor | None]) -> None:
        crossings.added.append(_on_host(output[0]))

    def after(layer: nn.Module, args: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        index, hidden = len(crossings.after), output[0] if isinstance(output, tuple) else output
        crossings.after.append(_on_host(hidden))

        def took(gradient: Tensor) -> Tensor:
            taken = gradient if like is None else like.gradient[index].to(gradient)
            crossings.gradient[index] = _on_host(taken)
            return taken

        if hidden.requires_grad:
            hidden.register_hook(took)

    return before, added, after


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


class _InPlaceOf(torch.autograd.Function):
    """Replaces a tensor's values; the gradient goes to the replaced tensor."""

    @staticmethod
    def forward(ctx: FunctionCtx, hidden: Tensor, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
