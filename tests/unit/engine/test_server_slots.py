"""The number of requests that a server gets, by its slots and its waiting queue."""

import pytest

from megagrpo.engine.server_slots import Queue, Slots, read_queue

METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="policy"} 250.0
vllm:num_requests_running{engine="1",model_name="policy"} 3.0
vllm:num_requests_waiting{engine="0",model_name="policy"} 1e+01
vllm:num_requests_waiting{engine="1",model_name="policy"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="policy",reason="capacity"} 9.0
"""


def test_the_queue_is_the_sum_over_the_engines_of_a_server():
    assert read_queue(METRICS) == Queue(253, 10)
    assert read_queue("") is None and read_queue("vllm:num_requests_running 3.0\n") is None


def test_clients_begin_with_equal_shares_and_one_client_keeps_a_few_in_the_queue():
    alone, shared = Slots(256), Slots(256, clients=32)
    assert (alone.slots("a"), alone.limit("a")) == (256, 264)
    assert (shared.slots("a"), shared.limit("a")) == (8, 8)
    assert Slots(2, clients=7).limit("a") == 1


@pytest.mark.parametrize("capacity", [100, 256])
@pytest.mark.parametrize("clients", [1, 4])
def test_the_waiting_queue_stays_just_above_empty_whatever_the_server_can_take(capacity, clients):
    """`capacity` sequences have room in the KV cache. All clients always have more requests."""
    slots = [Slots(256, clients) for _ in range(clients)]
    mine = [0] * clients
    waits = []
    for _ in range(40):
        for i in range(clients):  # a tenth of the running sequences ends in each round
            ended = min(mine[i], round(min(capacity, sum(mine)) * mine[i] / max(1, sum(mine)) / 10))
            mine[i] = max(mine[i] - ended, slots[i].limit("a"))
        running = min(capacity, sum(mine))
        for i in range(clients):
            slots[i].observe("a", Queue(running, sum(mine) - running), mine[i])
        waits.append(sum(mine) - running)
    # never empty with work left, and at most a tenth of the slots wait
    assert max(waits[20:]) <= 26 and sum(mine) >= capacity, waits


def test_a_client_takes_the_room_that_others_leave():
    slots = Slots(256, clients=32)
    mine = slots.limit("a")
    for _ in range(12):
        slots.observe("a", Queue(mine, 0), mine)
        mine = slots.limit("a")
    assert mine == 264


def test_a_client_gives_up_its_part_of_a_long_queue_and_keeps_one_request():
    slots = Slots(256)
    slots.observe("a", Queue(256, 256), 128)  # a quarter of all sequences are its own
    assert slots.limit("a") == 128 - 62 and slots.limit("b") == 264
    slots.observe("a", Queue(0, 10_000), 1)
    assert slots.limit("a") == 1
