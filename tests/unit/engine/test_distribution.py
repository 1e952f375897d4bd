"""Which server gets which request: groups stay together, and no slot is idle. Real servers with fixed delays."""

from collections import Counter
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest

from megagrpo.engine.client import VllmEngine
from megagrpo.types import Prompt, SamplingParams
from tests.unit.engine.stand_ins import StandIn

SAMPLING = SamplingParams(1.0, 4)


@pytest.fixture
def servers():
    """A factory of stand-ins that are closed at the end."""
    with ExitStack() as stack:
        yield lambda *words, **options: stack.enter_context(closing(StandIn(*words, **options)))


def prompts(count):
    return [Prompt(i, (1, 2, i + 3), "") for i in range(count)]


def rollouts(servers, count, n, **options):
    engine = VllmEngine([server.url for server in servers], str, **options)
    return engine.generate(prompts(count), n, SAMPLING, seed=5)


def asked(server):
    """Prompt's last token -> requests for the prompt."""
    return Counter(body["token_ids"][-1] for body in server.asked)


def test_the_requests_of_a_group_go_to_one_server(servers):
    both = servers(delay=0.05), servers(delay=0.05)
    rollouts(both, 6, 4, max_num_seqs=12)
    counts = [asked(server) for server in both]
    assert not counts[0].keys() & counts[1].keys()
    assert [sum(count.values()) for count in counts] == [12, 12] and set(counts[0].values()) == {4}


def test_a_server_with_a_free_slot_takes_a_request_of_a_group_that_another_one_has_no_slot_for(servers):
    both = servers(delay=0.3), servers(delay=0.3)
    rollouts(both, 1, 8, max_num_seqs=4)
    assert [asked(server) for server in both] == [Counter({3: 4})] * 2


def test_a_slot_takes_the_next_response_as_soon_as_one_response_of_a_group_has_ended(servers):
    """As many requests run as there are slots, although a group has more responses than a server has slots."""
    one = servers(delay=0.05)
    running, most = Counter(), []
    serve = one._serve

    def counted(*words):
        running["now"] += 1
        most.append(running["now"])
        try:
            return serve(*words)
        finally:
            running["now"] -= 1

    one._serve = counted
    rollouts([one], 3, 8, max_num_seqs=5)
    assert len(one.asked) == 24 and max(most) <= 6  # and one for a health check or metrics


def test_seeds_and_responses_do_not_depend_on_servers_slots_and_order(servers):
    one = servers()
    expected = rollouts([one], 7, 3)
    for options in dict(max_num_seqs=2), dict(max_num_seqs=4, clients=2, client=1), dict(longest_first=True):
        assert rollouts([servers(delay=0.01), servers(), servers()], 7, 3, **options) == expected
    group = [body for body in one.asked if body["token_ids"] == one.asked[0]["token_ids"]]  # they come in any order
    seeds = sorted(body["sampling_params"]["seed"] for body in group)
    assert [seed - seeds[0] for seed in seeds] == [0, 1, 2]
    assert {body["sampling_params"]["n"] for body in one.asked} == {1}


def test_clients_begin_with_different_servers(servers):
    three = [servers() for _ in range(3)]
    for client in range(3):
        rollouts(three, 1, 2, clients=3, client=client)
    assert [len(server.asked) for server in three] == [2, 2, 2]


def test_prompts_with_the_longest_expected_responses_begin_first(servers):
    one = servers()
    lengths = {0: 10.0, 1: 0.0, 2: 30.0, 3: 19.0, 4: 18.0}  # prompt 1 is new: it counts as the mean of the others
    asked_for = [replace(prompt, expected_length=lengths[prompt.prompt_id]) for prompt in prompts(5)]
    groups = {}
    for first in False, True:
        one.asked.clear()
        engine = VllmEngine([one.url], str, max_num_seqs=1, longest_first=first)
        groups[first] = engine.generate(asked_for, 2, SAMPLING, seed=5)
        begun = list(dict.fromkeys(body["token_ids"][-1] - 3 for body in one.asked))
        assert begun == ([2, 1, 3, 4, 0] if first else [0, 1, 2, 3, 4])
    assert groups[True] == groups[False]


def test_a_server_that_is_faster_gets_more_groups(servers):
    """Groups are not assigned when a step begins: a slow server, or one with long responses, gets fewer."""
    slow, fast = servers(delay=0.4), servers(delay=0.01)
    rollouts([slow, fast], 12, 2, max_num_seqs=2)
    assert len(slow.asked) + len(fast.asked) == 24 and len(fast.asked) >= 3 * len(slow.asked)
