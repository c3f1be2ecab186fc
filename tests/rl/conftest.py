import pytest

from tests.rl.small_runs import write_model


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """A policy, another model of its vocabulary, and one of another."""
    root = tmp_path_factory.mktemp("models")
    return write_model(root / "policy"), write_model(root / "other", seed=1), write_model(root / "larger", vocab=300)
