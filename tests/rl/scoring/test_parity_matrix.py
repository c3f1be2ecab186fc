"""Trainer and generator in every layout against each other, on real processes."""

import json
import shutil
from dataclasses import replace
from itertools import combinations, cycle, product
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.progress import Progress
from lockstep.rl.scoring.parity_matrix import (
    BACKENDS,
    DTYPES,
    EXPERT_LAYOUTS,
    GENERATORS,
    JOBS,
    LAYOUTS,
    MIXTURE,
    MODELS,
    RECOMPUTE,
    SHAPES,
    _work,
    compare,
    run_jobs,
    scoring_jobs,
    table,
    write_results,
)

COVERING = scoring_jobs(covering=True)
RUN = [job for job in COVERING if job.backend == "none" or job.shape != MIXTURE]
"""Compiled mixtures are in parallel/test_compile.py, under `make test-slow`."""


def _few():
    """So many that each layout, shape, dtype and way to recompute occurs, and something compiled over ranks.

    Engines take most of the time: each shape is sampled in one dtype, and compiled by one process.
    """
    eager = [job for job in RUN if job.backend == "none"]
    dense = [job for job in eager if job.shape != MIXTURE]
    assert [job.layout for job in dense] == [layout for layout in LAYOUTS for _ in RECOMPUTE]
    chosen = [dense[3 * row + row % 3] for row in range(len(LAYOUTS))]
    chosen += [job for job in eager if job.shape == MIXTURE and job.layout in EXPERT_LAYOUTS]
    dtypes = dict(zip(MODELS, cycle(DTYPES)))
    yield from (replace(job, dtype=dtypes[job.shape]) for job in chosen)
    compiled = next(job for job in RUN if job.backend == "inductor" and job.layout.name == "TP 2")
    yield replace(compiled, generators=(1,))


FEW = list(_few())


def test_every_setting_occurs_in_the_few_jobs():
    for name, values in {"shape": SHAPES, "dtype": DTYPES, "backend": BACKENDS, "recompute": RECOMPUTE}.items():
        assert {getattr(job, name) for job in FEW} >= set(values), name
    assert [job.layout for job in FEW[:-1]] == [*LAYOUTS, *EXPERT_LAYOUTS]


def test_every_two_settings_meet_in_the_covering_jobs():
    axes = {"shape": SHAPES, "dtype": DTYPES, "backend": BACKENDS, "layout": LAYOUTS, "recompute": RECOMPUTE}
    jobs = [job for job in COVERING if job.shape != MIXTURE]
    (split,) = (layout for layout in LAYOUTS if layout.parallel.pipeline_schedule == "zbv")  # is never compiled
    for first, second in combinations(axes, 2):
        met = {(getattr(job, first), getattr(job, second)) for job in jobs}
        assert met == set(product(axes[first], axes[second])) - {("inductor", split)}, (first, second)
    full = scoring_jobs(covering=False)
    assert len({job.name for job in full}) == len(full) == (13 + 12) * 4 * 2 * 3 + 6 * 2 * 3
    of_mixtures = {job.layout for job in COVERING if job.shape == MIXTURE}
    assert of_mixtures == {*LAYOUTS, *EXPERT_LAYOUTS}
    assert {job.name for job in COVERING} <= {job.name for job in full}


@pytest.fixture(scope="module", params=[FEW, pytest.param(RUN, marks=pytest.mark.slow)], ids=["few", "covering"])
def computed(request, tmp_path_factory):
    """Jobs, and the folder of their results."""
    folder = tmp_path_factory.mktemp("matrix")
    run_jobs(folder, request.param)
    return request.param, folder


def test_every_pair_of_layouts_agrees_in_every_bit(computed, tmp_path):
    jobs, folder = computed
    cells = compare(folder, jobs)
    assert len(cells) == ((13 * 3 + 12 + 13 + 6) * len(GENERATORS) + 2 if jobs is RUN else 19 * len(GENERATORS) + 1)
    assert all(cell.checked > 200 and cell.different == 0 and cell.largest == 0.0 for cell in cells)
    write_results(cells, tmp_path)
    written = json.loads((tmp_path / "parity.json").read_text())
    assert len(written["cells"]) == len(cells) and written["reduction_chunks"] == 4
    assert (tmp_path / "parity.png").read_bytes().startswith(b"\x89PNG")
    assert table(cells).count(" / 0") == (13 * 6 + 12 * 3 + 1 + 6 * 3 if jobs is RUN else 19 * 3 + 1)


def test_gradients_have_the_same_norms_in_all_layouts(computed):
    first = {}
    jobs, folder = computed
    for job in jobs:
        found = json.loads((folder / f"{job.name}.0.json").read_text())["gradient_norms"]
        expected = first.setdefault((job.shape, job.dtype), found)
        # Layouts add the same terms in other orders, in bfloat16 rounded on the way: not the same bits.
        tolerance = 1e-5 if job.dtype == "float32" else 1e-2
        assert len(found) > 3 and found == pytest.approx(expected, rel=tolerance), job.name


@pytest.mark.slow
def test_what_ranks_have_compiled_is_found_by_later_processes(tmp_path, monkeypatch):
    compiled = tmp_path / "compiled"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(compiled))
    kept = []
    for run in ("first", "second"):
        folder = tmp_path / run
        folder.mkdir()
        jobs = [job for job in RUN if job.layout.name == "TP 2" and job.backend == "inductor"]
        run_jobs(folder, [replace(job, generators=(1, 2)) for job in jobs])
        kept.append({path for path in compiled.rglob("*") if path.is_file()})
    assert len(kept[0]) > 10 and kept[1] == kept[0]


def test_a_rank_that_fails_ends_all_with_its_last_words(tmp_path):
    job = next(job for job in RUN if job.ranks == 2)
    (tmp_path / JOBS).write_text(json.dumps([job.name]))  # nobody has sampled for it
    with pytest.raises(RuntimeError, match=r"(?s)a rank of 2 failed \(1\):.*FileNotFoundError"):
        _work(tmp_path, [2], Progress("parity", 1, "layout"))
    assert not [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in read_bytes(p)]


def read_bytes(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


def changed(folder, name, change):
    results = json.loads((folder / name).read_text())
    change(results)
    (folder / name).write_text(json.dumps(results))


def test_what_differs_is_counted_where_it_is(computed, tmp_path):
    jobs, folder = computed[0], tmp_path / "copy"
    shutil.copytree(computed[1], folder)
    lost, flipped, replayed, sampled = jobs[:4]

    def flip(results):
        results["bits"][5] ^= 1

    def lose(results):
        del results["bits"][7], results["tokens"][7]

    def replay(results):
        results["replays_different"] = 2

    def sample(requests):
        requests[3]["completions"][0]["bits"][0] = 0x7FC00000  # not a number

    changed(folder, f"{flipped.name}.0.json", flip)
    assert lost.ranks == 1  # of several each has some of the tokens
    changed(folder, f"{lost.name}.0.json", lose)
    changed(folder, f"{replayed.name}.0.json", replay)
    for rank in range(4):
        changed(folder, f"{sampled.sampled_by(4).name}.{rank}.json", sample)
    cells = compare(folder, computed[0])
    found = {(cell.trainer, cell.generator): cell.different for cell in cells if cell.different}
    of_the_engine = {job for job in jobs if job.sampled_by(4) == sampled.sampled_by(4)}
    for generator in GENERATORS:
        more = generator == 4
        assert found.pop((flipped, generator)) == 1 + (more and flipped in of_the_engine)
        assert found.pop((lost, generator)) == 1 + (more and lost in of_the_engine)
        assert found.pop((replayed, generator)) == 2 + (more and replayed in of_the_engine)
    assert found.keys() == {(job, 4) for job in of_the_engine - {flipped, lost, replayed}}
    assert set(found.values()) == {1}
    assert {cell.largest for cell in cells if cell.trainer == sampled and cell.generator == 4} == {float("inf")}


def test_ranks_that_sample_different_tokens_make_all_of_a_cell_different(computed, tmp_path):
    (job, *_), folder = computed[0], tmp_path / "copy"
    shutil.copytree(computed[1], folder)

    def change(requests):
        requests[0]["completions"][0]["tokens"][0] += 1

    changed(folder, f"{job.sampled_by(2).name}.1.json", change)
    cells = [cell for cell in compare(folder, computed[0]) if cell.trainer == job]
    assert [(cell.generator, cell.different) for cell in cells] == [(1, 0), (2, cells[0].checked), (4, 0)]


def test_a_token_that_all_ranks_draw_otherwise_makes_all_of_a_cell_different(computed, tmp_path):
    (job, *_), folder = computed[0], tmp_path / "copy"
    shutil.copytree(computed[1], folder)

    def change(requests):
        requests[0]["completions"][0]["tokens"][0] += 1

    for rank in range(2):
        changed(folder, f"{job.sampled_by(2).name}.{rank}.json", change)
    cells = [cell for cell in compare(folder, computed[0]) if cell.trainer == job]
    assert [(cell.generator, cell.different) for cell in cells] == [(1, 0), (2, cells[0].checked), (4, 0)]
    assert cells[1].largest == float("inf")


def test_not_a_number_on_both_sides_is_a_difference(computed, tmp_path):
    (job, *_), folder = computed[0], tmp_path / "copy"
    shutil.copytree(computed[1], folder)
    assert job.ranks == 1
    broken = 0x7FC00000
    place = []

    def break_sample(requests):
        bits = requests[0]["completions"][0]["bits"]
        place.append(bits[0])
        bits[0] = broken

    def break_score(results):
        results["bits"][results["bits"].index(place[0])] = broken

    for rank in range(2):
        changed(folder, f"{job.sampled_by(2).name}.{rank}.json", break_sample)
    changed(folder, f"{job.name}.0.json", break_score)
    cells = [cell for cell in compare(folder, computed[0]) if cell.trainer == job]
    assert [(cell.generator, cell.different) for cell in cells] == [(1, 1), (2, 1), (4, 1)]


def test_what_the_matrix_does_not_read_is_refused(capsys):
    assert main(["parity", "--matrix", "full", "--tokens", "5", "--parallel.tensor", "2"]) == 2
    assert "--matrix uses its own models and settings; leave out --tokens, --parallel" in capsys.readouterr().err


def test_a_matrix_needs_no_model_and_a_model_no_matrix(capsys):
    assert main(["parity"]) == main(["parity", "--matrix", "full", "--model", "qwen3:micro"]) == 2
    assert capsys.readouterr().err.count("give either a model with --model DIR or --matrix") == 2
