"""Responses are read into arrays as strictly as by the naive reader: only a complete, consistent response passes."""

import base64
import io
import json

import numpy as np
import pytest

from megagrpo.engine.responses import InvalidResponse, Response, Span, joined, read_response
from tests.unit.engine.test_async_client import choice
from tests.unit.for_each import for_each


def naive(content, max_tokens):
    """The reader of Python objects: token ids, log-probs, finish reason. ValueError for an invalid response."""
    try:
        (one,) = json.loads(content)["choices"]
        ids, content = one["token_ids"], (one["logprobs"] or {}).get("content") or ()
        values = [entry["logprob"] for entry in content]
        valid = one["index"] == 0 and isinstance(one["finish_reason"], str) and len(ids) <= max_tokens
        valid = valid and all(type(token) is int and 0 <= token < 2**31 for token in ids)
        valid = valid and ids == [entry["token_id"] for entry in content if entry["token_id"] is not True]
        valid = valid and all(type(value) in (int, float) and value == value for value in values)
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError from error
    if not valid:
        raise ValueError
    return ids, values, one["finish_reason"]


def body(**changes):
    entries = [{"token_id": 7, "logprob": -0.1, "rank": 1, "top_logprobs": [{"token_id": 7, "logprob": -0.1}]}]
    entries.append({"token_id": 2**31 - 1, "logprob": -1e-05, "rank": None, "top_logprobs": []})
    one = {"index": 0, "logprobs": {"content": entries}, "finish_reason": "stop", "token_ids": [7, 2**31 - 1]}
    return {
        "request_id": "x",
        "model": None,
        "choices": [one | {"weight_versions": None, "routed_experts": None} | changes],
    }


def logprobs(*entries):
    return {"content": [{"token_id": token, "logprob": value} for token, value in entries]}


BODIES = {
    "whole": body(),
    "no tokens": body(token_ids=[], logprobs=None, finish_reason="abort"),
    "no content": body(token_ids=[], logprobs={"content": None}),
    "whole numbers as log-probs": body(token_ids=[7], logprobs=logprobs((7, -1))),
    "no choice": {"choices": []},
    "two choices": {"choices": body()["choices"] * 2},
    "second choice": body(index=1),
    "no index": {"choices": [{"token_ids": [], "finish_reason": "stop", "logprobs": None}]},
    "list": [body()],
    "text": "hello",
    "null": None,
    "choices as a number": {"choices": 3},
    "true": body(token_ids=[True], logprobs=logprobs((1, -1.0))),
    "true in the entry": body(token_ids=[1], logprobs=logprobs((True, -1.0))),
    "negative": body(token_ids=[-1], logprobs=logprobs((-1, -1.0))),
    "too large": body(token_ids=[2**31], logprobs=logprobs((2**31, -1.0))),
    "much too large": body(token_ids=[2**70], logprobs=logprobs((2**70, -1.0))),
    "fraction": body(token_ids=[1.5], logprobs=logprobs((1.5, -1.0))),
    "words": body(token_ids=["7"], logprobs=logprobs((7, -1.0))),
    "no ids": body(token_ids=None),
    "NaN": body(token_ids=[7], logprobs=logprobs((7, float("nan")))),
    "null log-prob": body(token_ids=[7], logprobs=logprobs((7, None))),
    "words as log-prob": body(token_ids=[7], logprobs=logprobs((7, "-1"))),
    "true as log-prob": body(token_ids=[7], logprobs=logprobs((7, True))),
    "no log-prob": body(token_ids=[7], logprobs={"content": [{"token_id": 7}]}),
    "fewer log-probs": body(logprobs=logprobs((7, -1.0))),
    "no log-probs": body(logprobs=None),
    "other ids": body(logprobs=logprobs((7, -1.0), (8, -1.0))),
    "too long": body(token_ids=[7] * 9, logprobs=logprobs(*[(7, -1.0)] * 9)),
    "no reason": body(finish_reason=None),
    "a number as reason": body(finish_reason=3),
}


@for_each("kind", BODIES)
def test_a_body_is_read_or_refused_as_by_the_naive_reader(kind):
    content = json.dumps(BODIES[kind]).encode()
    try:
        expected = naive(content, 8)
    except ValueError:
        with pytest.raises(InvalidResponse):
            read_response(content, 8)
    else:
        read = read_response(content, 8)
        assert (read.token_ids.tolist(), read.finish_reason) == (expected[0], expected[2])
        assert read.logprobs.tolist() == np.array(expected[1], np.float32).tolist()
        assert (read.token_ids.dtype, read.logprobs.dtype) == (np.int32, np.float32)


def test_a_body_that_is_cut_off_anywhere_is_refused():
    content = json.dumps(body()).encode()
    for length in range(len(content)):
        with pytest.raises(InvalidResponse, match="not a response to a prompt"):
            read_response(content[:length], 8)
    with pytest.raises(InvalidResponse, match=r"not a response to a prompt .*<html>"):
        read_response(b"\xff<html>", 8)


def test_log_probs_of_float32_are_read_exactly():
    values = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    one = choice([5] * 1000, "stop")
    one["logprobs"]["content"] = [{"token_id": 5, "logprob": float(value)} for value in values]
    assert (read_response(json.dumps({"choices": [one]}).encode(), 1000).logprobs == values).all()


def test_a_continuation_follows_its_beginning_with_shifted_weight_versions():
    first = read_response(json.dumps({"choices": [choice([5, 6], "abort", ("1", 0, 2))]}).encode(), 8)
    more = read_response(json.dumps({"choices": [choice([7], "stop", ("2", 0, 1))]}).encode(), 8)
    whole = joined(first, more)
    assert whole.token_ids.tolist() == [5, 6, 7] and whole.logprobs.tolist() == [-0.5] * 3 and whole.joined
    assert whole.finish_reason == "stop" and whole.spans == (Span("1", 0, 2), Span("2", 2, 3))


def sent(routes: np.ndarray) -> str:
    """An array as vLLM sends it: a .npy file in base64."""
    with io.BytesIO() as file:
        np.save(file, routes)
        return base64.b64encode(file.getvalue()).decode()


def with_routes(routes: np.ndarray, *choices_of) -> Response:
    one = choice(*choices_of) | {"routed_experts": sent(routes)}
    return read_response(json.dumps({"choices": [one]}).encode(), 8)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_routes_are_read_as_they_were_sent(dtype):
    routes = np.arange(5 * 3 * 2, dtype=dtype).reshape(5, 3, 2)
    assert np.array_equal(with_routes(routes, [5, 6], "stop").routes, routes)
    assert read_response(json.dumps(body()).encode(), 8).routes is None


def test_an_array_that_holds_no_routes_is_refused():
    for routes in (np.zeros((2, 2, 2), np.float32), np.array([{}], object)):
        with pytest.raises(InvalidResponse):
            with_routes(routes, [5], "stop")


def test_a_token_keeps_the_route_of_its_first_pass_when_a_response_is_continued():
    # a prompt of two tokens: the first part was read up to its last but one token, the whole text in the second request
    first, more = np.zeros((3, 1, 2), np.uint8), np.arange(10, dtype=np.uint8).reshape(5, 1, 2)
    parts = (with_routes(first, [5, 6], "abort"), with_routes(more, [7, 8], "stop"))
    assert joined(*parts).routes.tolist() == [*first.tolist(), *more[3:].tolist()]
    nothing = read_response(json.dumps({"choices": [choice([], "abort")]}).encode(), 8)
    assert np.array_equal(joined(nothing, parts[1]).routes, more)
    assert np.array_equal(joined(parts[0], nothing).routes, first)
