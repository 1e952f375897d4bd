"""Routes that an engine sends are those of the model, or an error names the token and the layer."""

import numpy as np
import pytest

from megagrpo.data.packing.routed_experts import InvalidRoutes, RouteShape, joined_routes

SHAPE = RouteShape(layers=(1, 2, 4), num_layers=5, experts=8, per_token=3)


def sent(rows: int, shape: RouteShape = SHAPE) -> np.ndarray:
    """Random valid routes with zeros in layers without experts, as vLLM sends them."""
    draw = np.random.default_rng(0).random((rows, shape.num_layers, shape.experts)).argsort(-1)[..., : shape.per_token]
    draw[:, [layer for layer in range(shape.num_layers) if layer not in shape.layers]] = 0
    return draw.astype(np.uint8 if shape.experts <= 256 else np.uint16)


def test_the_layers_without_experts_are_left_out():
    routes = sent(6)
    found = SHAPE.checked(routes, 5)
    assert np.array_equal(found, routes[:5][:, [1, 2, 4]]) and found.dtype == np.uint8
    assert SHAPE.bytes_per_token == found[0].nbytes == 9


def test_many_experts_have_two_bytes_each_with_a_sign_because_torch_has_no_other():
    shape = RouteShape(layers=(0, 1), num_layers=2, experts=384, per_token=8)
    found = shape.checked(sent(4, shape), 4)
    assert found.dtype == np.int16 and shape.bytes_per_token == found[0].nbytes == 32


def changed(token: int, layer: int, experts: list[int]) -> np.ndarray:
    routes = sent(6)
    routes[token, layer] = experts
    return routes


@pytest.mark.parametrize(
    ("routes", "said"),
    [
        (None, "sent no routed_experts; start it with --enable-return-routed-experts"),
        (sent(6)[:4], "sent no route for token 4 in layer 1: 4 rows of routed_experts for 5 tokens"),
        (sent(6)[:, :4], "sent routed_experts of shape [6, 4, 3]; the model's are [tokens, 5, 3]"),
        (changed(3, 4, [0, 0, 0]), "sent no route for token 3 in layer 4: experts [0, 0, 0]"),
        (changed(2, 2, [1, 8, 3]), "sent no route for token 2 in layer 2: experts [1, 8, 3]"),
    ],
)
def test_a_missing_route_names_its_token_and_layer(routes, said):
    with pytest.raises(InvalidRoutes) as caught:
        SHAPE.checked(routes, 5)
    assert str(caught.value) == said


def test_fillers_are_valid_routes_and_load_all_experts_alike():
    filler = SHAPE.filler(np.arange(16), SHAPE.num_layers)
    assert np.array_equal(SHAPE.checked(filler, 16), filler[:, :3])
    assert np.bincount(filler[:, 0].flatten()).tolist() == [6] * 8


def test_routes_of_a_later_request_never_replace_those_of_tokens_that_were_read_before():
    first, later = np.zeros((5, 2, 2), np.uint8), np.ones((9, 2, 2), np.uint8)
    assert joined_routes(first, later)[:, 0, 0].tolist() == [0] * 5 + [1] * 4
    assert joined_routes(later, first)[:, 0, 0].tolist() == [1] * 9
