"""Access control: by a secret token of the run, on the configured interface, and by notes that only members can
write."""

import asyncio
import json
import os
import socket
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from megagrpo.config import ConfigError, load_config
from megagrpo.engine.http.access import TokenGuard, address_of, headers
from megagrpo.engine.servers import serving
from megagrpo.engine.servers.launcher import Launcher
from megagrpo.engine.servers.options import ServerOptions
from megagrpo.platform.process.access_token import read_token
from megagrpo.platform.process.variables import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from megagrpo.platform.rendezvous.store_exchange import Deadline, Store
from megagrpo.trainer import engine_side
from megagrpo.types import WeightSyncError

QUICKSTART = Path(__file__).parents[3] / "configs/quickstart.yaml"
TOKEN = "a-token-of-the-tests-1234"


def ask(guard, path, *sent, kind="http"):
    """The result of a request to a guard: "in" if it gets through, else the status or the code of the closed
    connection, and the text."""
    messages = []

    async def send(message):
        messages.append(message)

    asyncio.run(guard({"type": kind, "path": path, "method": "POST", "headers": list(sent)}, None, send))
    if messages[0]["type"] == "websocket.close":
        return messages[0]["code"]
    if "in" in messages[0]["type"] and len(messages) == 1:
        return messages[0]
    return messages[0]["status"], json.loads(messages[1]["body"])["error"]["message"]


@pytest.fixture
def guard(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)

    async def app(scope, receive, send):
        await send({"type": "in"})

    return TokenGuard(app)


def bearer(token):
    return b"authorization", f"Bearer {token}".encode()


@pytest.mark.parametrize("path", ["/v1/models", "/collective_rpc", "/sleep", "/", "/health/", "/metrics", "//health"])
def test_every_route_but_the_health_check_wants_the_token(guard, path):
    for sent in (
        [],
        [bearer("")],
        [bearer(TOKEN[:-1])],
        [bearer(TOKEN + "x")],
        [(b"authorization", TOKEN.encode())],
        [bearer(TOKEN)] * 2,
    ):
        status, text = ask(guard, path, *sent)
        assert status == 401 and "rollout.token_file" in text and TOKEN not in text
    assert ask(guard, path, bearer(TOKEN)) == ask(guard, "/health") == {"type": "in"}
    assert ask(guard, path, kind="websocket") == 1008 and ask(guard, path, bearer(TOKEN), kind="websocket") == {
        "type": "in"
    }


def test_a_guard_without_a_token_does_not_start_and_one_with_it_hands_it_to_no_child(monkeypatch, tmp_path):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(
        ValueError, match="no token is set; set MEGAGRPO_TOKEN to it, or MEGAGRPO_TOKEN_FILE to the name of its file"
    ):
        TokenGuard(None)
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    assert read_token(None) == TOKEN and TOKEN_VARIABLE not in os.environ and read_token(None) is None


def test_a_token_file_is_for_its_owner_alone_and_holds_one_long_word(monkeypatch, tmp_path):
    file = tmp_path / "token"
    with pytest.raises(ValueError, match=r"rollout\.token_file: .*token cannot be read: No such file"):
        read_token(file)
    file.touch(0o600)
    for bad in ("", "short", "two words that are long", "a-word-with-an-ä-in-it-1234"):
        file.write_text(bad)
        with pytest.raises(ValueError, match="a token must be one word of 16 or more characters"):
            read_token(file)
    file.write_text(TOKEN + "\n")
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(file))
    assert read_token(file) == TOKEN and TokenGuard(None) and headers(None) == {}
    file.chmod(0o640)
    with pytest.raises(ValueError, match=r".* is readable by other users; run chmod 600 on it"):
        read_token(file)


def test_a_launched_server_gets_its_token_by_a_pipe_and_neither_by_its_environment_nor_by_its_command_line(
    tmp_path, monkeypatch
):
    monkeypatch.setenv(TOKEN_VARIABLE, "that of servers of others")
    options = ServerOptions(str(tmp_path), "float32", 64)
    guarded = Launcher(options, tmp_path, token=TOKEN, host="127.0.0.2")
    command = guarded._command(8000)
    environment = guarded._environment(0)
    assert TOKEN not in str(environment) and TOKEN not in str(command) and "TokenGuard" in str(command)
    assert environment[TOKEN_FILE_VARIABLE] == "/dev/stdin"
    assert command[command.index("--host") + 1] == "127.0.0.2"
    assert not {TOKEN_VARIABLE, TOKEN_FILE_VARIABLE} & Launcher(options, tmp_path)._environment(0).keys()
    read = "from megagrpo.engine.http.access import TokenGuard; print(TokenGuard(None)._expected)"
    monkeypatch.setattr(guarded, "_command", lambda port: [sys.executable, "-c", read])
    server = guarded._launch(0, 8000)
    server.supervisor.wait(30)
    assert server.log_tail().strip() == f"b'Bearer {TOKEN}'"


def test_an_interface_is_named_and_has_an_address():
    assert address_of("lo") == "127.0.0.1"
    with pytest.raises(ValueError, match=r"rollout\.interface: nope0 has no IPv4 address here; choose one of .*lo"):
        address_of("nope0")


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["rollout.urls=[http://a:1]", "rollout.interface=eth0"],
            "rollout.interface: eth0 only applies to servers that the run starts",
        ),
        (["rollout.urls=[http://me:secret@a:1]"], "rollout.urls: an address must not contain a password"),
        (["rollout.urls_file=u"], "rollout.urls_file: needs initial servers, but rollout.urls is empty"),
        (["rollout.extra_args=[--api-key, k]"], "rollout.extra_args: --api-key would show a secret to every user"),
        (["rollout.extra_args=[--host=0.0.0.0]"], "rollout.extra_args: --host is set by rollout.interface"),
    ],
)
def test_settings_that_give_secrets_away_or_do_nothing_are_refused(overrides, problem):
    with pytest.raises(ConfigError, match=problem):
        load_config(QUICKSTART, overrides)


def test_what_the_config_says_about_servers_reaches_them(tmp_path):
    rollout = load_config(
        QUICKSTART, ["rollout.urls=[http://a:1]", "rollout.urls_file=u", "rollout.reconnect_timeout=7"]
    ).rollout
    limits = engine_side.engine_limits(rollout)
    assert limits["patience"] == 7 and limits["urls_file"] == Path("u").absolute()
    launchers = [serving.make_launcher(load_config(QUICKSTART, []), tmp_path, tmp_path, "float32") for _ in range(2)]
    assert {launcher.host for launcher in launchers} == {"127.0.0.1"} and launchers[0].token != launchers[1].token
    assert len(launchers[0].token) >= 32
    with pytest.raises(ValueError, match=r"rollout\.interface: nope0 has no IPv4 address"):
        serving.make_launcher(load_config(QUICKSTART, ["rollout.interface=nope0"]), tmp_path, tmp_path, "float32")


def test_notes_of_strangers_and_notes_that_were_moved_are_refused():
    board = Store("127.0.0.1", 0, Deadline(5), "the secret", serve=True)
    stranger = Store("127.0.0.1", board.port, Deadline(5), "a guess")
    stranger.put("key", {"seconds": 1})
    with pytest.raises(
        WeightSyncError, match="key key has an invalid HMAC; a process without this run's secret wrote it"
    ):
        board.find("key")
    board.put("mine", [1])
    stranger.tcp_store.set("other", stranger.tcp_store.get("mine"))  # a true value under another key
    for forged in ("other", "junk", "empty"):
        stranger.tcp_store.set("junk", b"\x80\x04not a note")
        stranger.tcp_store.set("empty", b"")
        with pytest.raises(WeightSyncError, match=f"key {forged} has an invalid HMAC"):
            board.find(forged)
    board.of_group("group1").set("a", "b")
    assert not dist.PrefixStore("group1", stranger.tcp_store).check(["a"]) and not stranger.of_group("group1").check(
        ["a"]
    )


def test_a_board_listens_on_the_address_it_was_given():
    boards = [Store("127.0.0.2", 0, Deadline(5), "s", serve=True) for _ in range(5)]
    # another process may listen on one of these ports at 127.0.0.1
    assert not all(accepts("127.0.0.1", board.port) for board in boards)
    assert all(accepts("127.0.0.2", board.port) for board in boards)
    assert Store("127.0.0.2", boards[0].port, Deadline(5), "s").answers()
    everywhere = Store("", 0, Deadline(5), "s", serve=True)
    assert Store("127.0.0.3", everywhere.port, Deadline(5), "s").answers()


def accepts(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True
