"""Uploads to a hub: a local server with the hub's routes."""

import os
import subprocess
import sys

import pytest
from huggingface_hub import constants

from megagrpo.weights.hub.upload import PushError, push
from tests.unit.weights.hub.hub_server import TOKEN, hub

CALL = "import sys; from megagrpo.weights.hub.upload import push; print(push(*sys.argv[1:]))"
NO_SERVER = "http://127.0.0.1:9"
FILES = {"README.md": "---\ntags: [grpo]\n---\n# `x`\n", "config.json": "{}", "sub/vocab.txt": "a\nb\n"}


@pytest.fixture
def folder(tmp_path):
    for name, text in FILES.items():
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text(text)
    return tmp_path / "out"


@pytest.fixture
def upload(folder, monkeypatch):
    """Returns what `push` of `folder` returns or raises, as text, for a hub at `url`. The library reads these settings
    at import."""
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder.parent / "no_token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)

    def push_to(
        url: str, repo: str = "me/model", *, token: str | None = TOKEN, offline: bool = False, **options
    ) -> str:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        if token is not None:
            monkeypatch.setenv("HF_TOKEN", token)
        try:
            return push(folder, repo, **options)
        except PushError as error:
            return f"refused {error}"

    return push_to


def test_a_folder_becomes_a_repository_and_a_second_call_updates_it(folder, upload):
    with hub() as server:
        assert upload(server.url) == f"{server.url}/me/model"
        assert {path: data.decode() for path, data in server.repos["me/model"]["main"].items()} == FILES
        assert server.private == set()
        (folder / "config.json").write_text('{"more": 1}')
        upload(server.url)
        assert server.repos["me/model"]["main"]["config.json"] == b'{"more": 1}'


def test_a_process_takes_address_and_token_from_its_environment(folder):
    with hub() as server:
        environment = os.environ | {"HF_ENDPOINT": server.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}
        done = subprocess.run(
            [sys.executable, "-c", CALL, folder, "me/model"], env=environment, capture_output=True, text=True
        )
        assert done.stdout.strip() == f"{server.url}/me/model", done.stderr
        assert sorted(server.repos["me/model"]["main"]) == sorted(FILES)


def test_a_private_repository_and_a_branch_are_created(upload):
    with hub() as server:
        assert upload(server.url, "team/model", private=True, revision="v1") == f"{server.url}/team/model/tree/v1"
        assert server.private == {"team/model"}
        branches = server.repos["team/model"]
        assert branches["main"] == {} and sorted(branches["v1"]) == sorted(FILES)


@pytest.fixture
def refused(folder, upload):
    """Asserts that the upload fails with every text of `expected`, and that the export is kept."""

    def check(url: str, *expected: str, **options) -> None:
        said = upload(url, **options)
        assert said.startswith("refused me/model: "), said
        for text in (*expected, f"The export is kept; upload it with: hf upload me/model {folder} ."):
            assert text in said
        assert sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()) == sorted(FILES)

    return check


def test_without_a_token_the_message_says_how_to_get_one(refused):
    refused(NO_SERVER, "no token for the hub", "hf auth login", "HF_TOKEN", token=None)


def test_a_wrong_token_is_named_as_the_cause(refused):
    with hub() as server:
        refused(server.url, "the hub rejected the token", "hf auth login", token="hf_wrong")


@pytest.mark.parametrize(
    ("status", "cause"), [(403, "the token may not write to this repository"), (400, "responded with status 400")]
)
def test_a_refused_commit_is_reported_with_its_status(refused, status, cause):
    with hub(refuse={"/commit/": status}) as server:
        refused(server.url, cause, "not today")


def test_without_a_network_the_message_names_the_address(refused):
    refused(NO_SERVER, f"cannot upload to {NO_SERVER}", "check the network")


def test_offline_mode_is_named_as_the_cause(refused):
    refused(NO_SERVER, "HF_HUB_OFFLINE is set; unset it", offline=True)


@pytest.mark.parametrize("repo", ["a/b/c", "", "me/mo del", "me/model.git"])
def test_a_name_that_the_hub_does_not_allow_is_refused_before_anything_is_sent(upload, repo):
    assert "is no name on the hub; write OWNER/NAME" in upload(NO_SERVER, repo)


def test_the_command_that_uploads_a_kept_export_has_the_options(upload):
    assert upload(NO_SERVER, private=True, revision="v1").endswith(" . --private --revision v1")


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(PushError, match="is no folder; export the checkpoint first"):
        push(tmp_path / "none", "me/model")
