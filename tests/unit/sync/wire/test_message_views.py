"""The bytes of messages: elements and checksums, for any dtype and number of elements."""

import torch

from megagrpo.families.shared.boxes import cut
from megagrpo.sync.wire.messages import Message, Slice, describe, empty_message, message_views
from tests.unit.for_each import for_each


def message_of(*counts, tensor="model.layers.3.w"):
    """A message of slices with this number of elements."""
    offsets = [sum(counts[:i]) for i in range(len(counts))]
    slices = (
        Slice(f"{tensor}{i}", cut((n,), 0, 0, n), at) for i, (n, at) in enumerate(zip(counts, offsets, strict=True))
    )
    return Message(0, 1, 0, tuple(slices))


@for_each("dtype", [torch.float32, torch.bfloat16])
@for_each("counts", [(1,), (4,), (3, 2), (8, 1, 6)])
def test_elements_and_checksums_share_a_buffer_without_overlap(dtype, counts):
    message = message_of(*counts)
    sent = empty_message(message, dtype, torch.device("cpu")).zero_()
    elements, sums = message_views(sent, message, dtype)
    assert (elements.shape, elements.dtype) == ((sum(counts),), dtype) and (sums.shape, sums.dtype) == (
        (len(counts),),
        torch.int64,
    )
    elements.copy_(torch.arange(1, sum(counts) + 1))
    sums.copy_(torch.arange(len(counts)) - 2**62)
    received = torch.frombuffer(bytearray(sent.numpy().tobytes()), dtype=torch.uint8)
    for view, other in zip(message_views(received, message, dtype), (elements, sums), strict=True):
        assert torch.equal(view, other)
    assert elements.tolist() == list(range(1, sum(counts) + 1)) and sums.tolist() == [
        n - 2**62 for n in range(len(counts))
    ]


def test_a_message_is_described_by_its_layer_and_its_first_tensor():
    assert describe(message_of(2)) == "layer 3 (model.layers.3.w0)"
    assert describe(message_of(2, 2, 2)) == "layer 3 (model.layers.3.w0 and 2 more)"
    assert describe(message_of(2, tensor="embed")) == "tensors outside of layers (embed0)"
