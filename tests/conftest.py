"""Small real models and tokenizers, and what all tests share."""

import inspect
import os
import shutil
import sysconfig
from dataclasses import replace
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before torch is imported, and for all processes that tests start: the workers fill the cores already.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import tests.typechecker

if os.environ.get("LOCKSTEP_CHECK_TYPES"):
    tests.typechecker.install()  # before the package is imported

import pytest
from hypothesis import settings
from hypothesis.configuration import set_hypothesis_home_dir

from lockstep.observe.garbage import GarbageCollection

# The same examples in every run; `pytest --hypothesis-profile random` draws others.
# A busy machine makes no test fail.
settings.register_profile("random", deadline=None)
settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
settings.load_profile("fixed")
set_hypothesis_home_dir(Path(__file__).parent.parent / ".hypothesis")  # not in the working folder

LONGEST = [
    "rl/scoring/test_parity_matrix.py",
    "parallel/test_compile.py",
    "checkpoint/test_kills.py",
    "rl/generators/test_colocated.py",
    "rl/generators/test_soak.py",
    "ops/test_cuda_kernels.py",
    "parallel/test_deterministic_layout.py",
    "parallel/test_layouts.py",
    "rl/test_digest.py",
]
"""Files that come first, so that no long test begins when the other processes have ended."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """More than there are cores: a test that waits for its processes leaves its core to others. Four on two cores gain
    nothing (benchmarks/NOTES.md)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores * 3 // 2


def pytest_collection_modifyitems(items):
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(LONGEST)))


@pytest.fixture(autouse=True)
def without_whole_collections(request, monkeypatch):
    """A run looks through all that is alive before its first step, once; beside all that tests import that takes
    longer than the steps of most of them."""
    from lockstep.observe import observer

    if request.module.__name__ != "tests.observe.test_observer":
        monkeypatch.setattr(observer, "GarbageCollection", lambda every: GarbageCollection(0))


@pytest.fixture(autouse=True)
def without_pictures(request, monkeypatch):
    """A report's curves take a third of a second, half of many a run that is not looked at."""
    if "report" not in request.module.__name__:
        monkeypatch.setattr("lockstep.observe.report.curves_svg", lambda *arguments: [])


@pytest.fixture(autouse=True, scope="module")
def arithmetic_of_the_processor():
    """A run sets its process's arithmetic: the next module's tests begin with the processor's own again."""
    from lockstep.ops import native

    before = native.arithmetic()
    yield
    if native.arithmetic() != before:
        native.set_arithmetic("auto")


@pytest.fixture(scope="session")
def empty_folder(tmp_path_factory):
    """The working folder of all tests and of the processes they start, which find these tests through PYTHONPATH."""
    folder, root = tmp_path_factory.mktemp("empty"), str(Path(__file__).parent.parent)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")])))
        yield folder


@pytest.fixture(autouse=True)
def nothing_in_the_working_folder(empty_folder):
    """What lies in a user's working folder changes no test, and no test leaves anything there."""
    yield
    left = os.listdir(empty_folder)
    for name in left:  # or the tests after it would be accused too
        (shutil.rmtree if (empty_folder / name).is_dir() else os.remove)(empty_folder / name)
    assert not left, f"the test wrote {left} into the working folder"


def pytest_runtest_setup():
    tests.typechecker.test[0] += 1


def pytest_configure():
    """torch.compile keeps what it compiled by the function's code, which all wrapped functions would share."""
    from lockstep.model.decoder import Block

    Block.before_attention = inspect.unwrap(Block.before_attention)
    Block.after_attention = inspect.unwrap(Block.after_attention)


@pytest.fixture(scope="session")
def bpe_tokenizer():
    """A real byte-level BPE tokenizer, trained on text that every Python installation carries."""
    from lockstep.data import train_bpe

    library = Path(sysconfig.get_paths()["stdlib"])
    return train_bpe(
        [(library / name).read_text() for name in ("argparse.py", "json/decoder.py", "statistics.py")], 512
    )


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory, bpe_tokenizer):
    """A Hugging Face folder: a small Qwen3 with random weights, and the BPE tokenizer."""
    from lockstep.model import build_model, preset, save_model

    folder = tmp_path_factory.mktemp("model")
    config = preset("qwen3:micro", bpe_tokenizer.vocab_size, (bpe_tokenizer.eos_id,))
    # Half of its layers: most tests start a run of it.
    save_model(build_model(replace(config, num_layers=2), dtype="bfloat16", seed=1), folder)
    bpe_tokenizer.save(folder)
    return folder
