import os

import pytest

from lockstep.workers.processes import descendants
from tests.rl.small_runs import write_model


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """A policy, another model of its vocabulary, and one of another."""
    root = tmp_path_factory.mktemp("models")
    return write_model(root / "policy"), write_model(root / "other", seed=1), write_model(root / "larger", vocab=300)


@pytest.fixture(scope="module")
def checked_at_once():
    """Supervisors of workers look ten times a second, and of what the module starts nothing may be left at its end."""
    before = set(descendants(os.getpid()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lockstep.rl.grading.supervisor_process.CHECK_SECONDS", 0.1)
        yield
    assert set(descendants(os.getpid())) <= before, "no process is left behind"
