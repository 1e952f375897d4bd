"""The rendezvous stores of vLLM's processes cannot be reached from other hosts."""

import psutil
from torch.distributed import TCPStore

from megagrpo.sync.vllm_side.engine import _private


def addresses_of(port):
    return {
        each.laddr.ip
        for each in psutil.Process().net_connections()
        if each.status == "LISTEN" and each.laddr.port == port
    }


def test_a_store_listens_on_its_own_address_and_a_second_one_shares_its_server():
    construct = _private(TCPStore)
    first = construct("127.0.0.1", 0, None, is_master=True, wait_for_workers=False, multi_tenant=True)
    assert addresses_of(first.port) == {"127.0.0.1"}
    second = construct(
        host_name="127.0.0.1", port=first.port, is_master=True, wait_for_workers=False, multi_tenant=True
    )
    first.set("key", "value")
    assert second.get("key") == b"value" and addresses_of(first.port) == {"127.0.0.1"}


def test_a_store_of_another_process_is_joined():
    first = _private(TCPStore)("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = _private(TCPStore)("127.0.0.1", first.port, is_master=False, wait_for_workers=False)
    client.set("key", "value")
    assert first.get("key") == b"value"
