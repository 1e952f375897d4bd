"""The options of `megagrpo export` and `merge` for the hub are checked before anything is exported."""

import pytest

from megagrpo.__main__ import main


@pytest.mark.parametrize("command", ["export", "merge"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--push", "a/b/c"], "--push: 'a/b/c' is no name on the hub; write OWNER/NAME"),
        (["--private"], "--private: has no effect without --push; add --push OWNER/NAME"),
        (["--revision", "v1"], "--revision: has no effect without --push; add --push OWNER/NAME"),
    ],
)
def test_a_wrong_option_for_the_hub_exports_nothing(command, words, message, tmp_path, capfd):
    assert main([command, str(tmp_path / "none"), str(tmp_path / "out"), *words]) == 2
    assert message in capfd.readouterr().err and not (tmp_path / "out").exists()
