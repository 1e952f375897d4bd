"""What all tests of data share."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Use another cache folder than the user's."""
    import datasets

    patch = pytest.MonkeyPatch()
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    yield
    patch.undo()
