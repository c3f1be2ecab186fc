"""Same seed, same run: one digest in fresh processes, whatever the threads and the library's instruction set."""

import pytest

from tests.rl.digest import digests_of_a_process


@pytest.fixture(scope="module")
def of_one_thread(tmp_path_factory):
    return digests_of_a_process(tmp_path_factory.mktemp("one"), OMP_NUM_THREADS="1")


# Plain vectors of torch's: whatever of a library depends on the width of a vector shows here.
@pytest.mark.parametrize("environment", [{}, {"ATEN_CPU_CAPABILITY": "default"}], ids=["own", "plain"])
def test_a_run_in_float32_is_the_same_run_in_any_process(tmp_path, of_one_thread, environment):
    assert digests_of_a_process(tmp_path, OMP_NUM_THREADS="2", **environment) == of_one_thread


@pytest.mark.xfail(reason="waits for products of our own: the library's have other bits on another instruction set")
def test_a_run_in_float32_is_the_same_run_on_an_older_processor(tmp_path, of_one_thread):
    assert digests_of_a_process(tmp_path, OMP_NUM_THREADS="2", ONEDNN_MAX_CPU_ISA="SSE41") == of_one_thread
