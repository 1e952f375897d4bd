"""Values of a coroutine as an iterator."""

import asyncio

import pytest

from megagrpo.engine.load_balancing import stream


def test_each_value_comes_before_the_next_one_is_made():
    made = []

    async def work(put):
        for number in range(3):
            await asyncio.sleep(0.01)
            made.append(number)
            put(number)

    assert [(value, len(made)) for value in stream(work)] == [(0, 1), (1, 2), (2, 3)]


def test_an_error_comes_after_the_values_before_it():
    async def work(put):
        put(None)
        raise ValueError("no server is left")

    values = stream(work)
    assert next(values) is None
    with pytest.raises(ValueError, match="no server is left"):
        next(values)


def test_closing_the_iterator_cancels_the_work():
    cancelled = []

    async def work(put):
        try:
            put(1)
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    values = stream(work)
    next(values)
    values.close()
    assert cancelled == [True]
