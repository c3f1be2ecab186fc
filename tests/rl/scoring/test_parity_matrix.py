"""Trainer and generator in every layout against each other, on real processes."""

import copy
import json
from dataclasses import replace
from itertools import combinations, product
from multiprocessing import get_context

import pytest
from torch.multiprocessing.spawn import ProcessException

from lockstep.cli import main
from lockstep.ops import FORMATS
from lockstep.rl.scoring.parity_matrix import (
    BACKENDS,
    BLOCKS,
    DTYPES,
    EXPERT_LAYOUTS,
    GENERATORS,
    LAYOUTS,
    MIXTURE,
    MODELS,
    QUANTIZED,
    RECOMPUTE,
    SHAPES,
    Scoring,
    compare,
    run_jobs,
    scoring_jobs,
    table,
    write_results,
)

COVERING = scoring_jobs(covering=True)
RUN = [job for job in COVERING if job.backend == "none" or job.shape != MIXTURE]
"""Compiled mixtures are in parallel/test_compile.py, under `make test-slow`."""


QUICK = {
    "1": "none", "TP 2": "selective", "CP 2": "full", "PP 2, ZBV": "none", "FSDP 2 x TP 2": "full",
    "CP 2 x TP 2": "selective",
}  # fmt: skip
"""Layouts in which each kind of parallelism occurs, and a way to recompute for each."""
FEW = [
    Scoring("int8 cache, grouped heads 3:1", "float32", "none", layout, QUICK[layout.name])
    for layout in LAYOUTS
    if layout.name in QUICK
]
FEW += [
    Scoring(MIXTURE, "float32", "none", EXPERT_LAYOUTS[3], "none", (1, 2)),
    Scoring("int8", "float32", "none", LAYOUTS[8], "none", (1,)),
    Scoring("int4", "float32", "none", LAYOUTS[5], "none", (1,)),
    *(Scoring(name, "float32", "none", LAYOUTS[3], "none", (1, 2)) for name in ("int8", "int4", "float8_rowwise")),
    # The first of a shape is what the others' gradients are compared with.
    *(Scoring(name, "float32", "none", LAYOUTS[0], "none", (1,)) for name in BLOCKS),
    *(Scoring(name, "float32", "none", LAYOUTS[3], "none", (1, 2)) for name in BLOCKS),
]


def test_every_two_settings_meet_in_the_covering_jobs():
    axes = {"shape": SHAPES, "dtype": DTYPES, "backend": BACKENDS, "layout": LAYOUTS, "recompute": RECOMPUTE}
    jobs = [job for job in COVERING if job.shape in SHAPES]
    (split,) = (layout for layout in LAYOUTS if layout.parallel.pipeline_schedule == "zbv")  # is never compiled
    for first, second in combinations(axes, 2):
        met = {(getattr(job, first), getattr(job, second)) for job in jobs}
        assert met == set(product(axes[first], axes[second])) - {("inductor", split)}, (first, second)
    full = scoring_jobs(covering=False)
    assert len(full) == (13 + 12) * (4 + 4) * 2 * 3 + 6 * 2 * 3 + (13 + 12) * 4 * 2
    assert {job.layout for job in COVERING if job.shape == MIXTURE} == {*LAYOUTS, *EXPERT_LAYOUTS}
    assert {replace(job, generators=GENERATORS) for job in COVERING} <= set(full)
    assert {job.shape for job in COVERING if job.layout.parallel.tensor > 1} >= QUANTIZED.keys() | BLOCKS.keys()


@pytest.fixture(scope="module", params=[FEW, pytest.param(RUN, marks=pytest.mark.slow)], ids=["few", "covering"])
def computed(request):
    """Jobs, and their results."""
    return request.param, run_jobs(request.param)


def test_every_pair_of_layouts_agrees_in_every_bit_and_in_the_norms_of_gradients(computed, tmp_path):
    jobs, results = computed
    cells = compare(results, jobs)
    assert len(cells) == (
        (13 * 3 + 12 + 13 + 6 + 13 + 52) * len(GENERATORS) + 15 if jobs is RUN else 6 * len(GENERATORS) + 22
    )
    assert all(cell.checked > 200 and cell.different == 0 and cell.largest == 0.0 for cell in cells)
    write_results(cells, tmp_path)
    written = json.loads((tmp_path / "parity.json").read_text())
    assert len(written["cells"]) == len(cells) and written["reduction_chunks"] == 4
    assert (tmp_path / "parity.png").read_bytes().startswith(b"\x89PNG")
    assert table(cells).count(" / 0") == (13 * 6 + 12 * 3 + 1 + 2 + 6 * 3 if jobs is RUN else 6 * 3 + 2)

    first = {}
    for job in jobs:
        found = results[job, 0]["gradient_norms"]
        # Compiled loops may round last bits otherwise, which codes of few bits magnify.
        form = job.backend if job.shape in QUANTIZED else None
        expected = first.setdefault((job.shape, job.dtype, form), found)
        # Layouts add the same terms in other orders, in bfloat16 rounded on the way: not the same bits.
        tolerance = 1e-5 if job.dtype == "float32" else 1e-2
        if FORMATS[MODELS[job.shape].precision.linear].gradients is not None:
            tolerance = 2e-2  # of a rank's outputs in float8, whose scales are finer: 3 bits, over many numbers
        assert len(found) > 3 and found == pytest.approx(expected, rel=tolerance), job


@pytest.mark.slow
def test_what_ranks_have_compiled_is_found_by_later_processes(tmp_path, monkeypatch):
    compiled = tmp_path / "compiled"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(compiled))
    jobs = [replace(j, generators=(1, 2)) for j in RUN if j.layout.name == "TP 2" and j.backend == "inductor"]
    kept = []
    for _ in range(2):
        # In a new process: the server that ranks are forked from has the environment of its start.
        process = get_context("spawn").Process(target=run_jobs, args=(jobs,))
        process.start()
        process.join()
        assert process.exitcode == 0
        kept.append({path for path in compiled.rglob("*") if path.is_file()})
    assert len(kept[0]) > 10 and kept[1] == kept[0]


def test_a_rank_that_fails_ends_all_with_its_traceback():
    job = replace(next(job for job in FEW if job.ranks == 2), dtype="float16")
    with pytest.raises(ProcessException, match="(?s)Process . terminated.*float16"):
        run_jobs([replace(job, generators=())])


def changed_cells(computed, change):
    """The cells of changed results."""
    jobs, results = computed
    results = copy.deepcopy(results)
    change(results)
    return compare(results, jobs)


def first_of(results, job, generator):
    """The first completion of each rank of a job's generator."""
    return [results[job.sampled_by(generator), rank][0]["completions"][0] for rank in range(generator)]


NOT_A_NUMBER = 0x7FC00000


def test_what_differs_is_counted_where_it_is(computed):
    lost, flipped, replayed, sampled = computed[0][:4]

    def change(results):
        assert lost.ranks == 1  # of several each has some of the tokens
        del results[lost, 0]["bits"][7], results[lost, 0]["tokens"][7]
        results[flipped, 0]["bits"][5] ^= 1
        results[replayed, 0]["replays_different"] = 2
        for completion in first_of(results, sampled, 4):
            completion["bits"][0] = NOT_A_NUMBER

    cells = changed_cells(computed, change)
    found = {(cell.trainer, cell.generator): cell.different for cell in cells if cell.different}
    of_the_engine = {job for job in computed[0] if job.sampled_by(4) == sampled.sampled_by(4)}
    for generator in GENERATORS:
        for job, count in {flipped: 1, lost: 1, replayed: 2}.items():
            assert found.pop((job, generator)) == count + (generator == 4 and job in of_the_engine)
    assert found == {(job, 4): 1 for job in of_the_engine - {flipped, lost, replayed}}
    assert {cell.largest for cell in cells if cell.trainer == sampled and cell.generator == 4} == {float("inf")}


def test_another_token_makes_all_of_a_cell_different_if_one_rank_has_it_or_all(computed):
    job = computed[0][0]
    for ranks in ([1], [0, 1]):

        def change(results, ranks=ranks):
            for rank in ranks:
                first_of(results, job, 2)[rank]["tokens"][0] += 1

        cells = [cell for cell in changed_cells(computed, change) if cell.trainer == job]
        assert [(cell.generator, cell.different) for cell in cells] == [(1, 0), (2, cells[0].checked), (4, 0)]
        assert cells[1].largest == float("inf")


def test_not_a_number_on_both_sides_is_a_difference(computed):
    job = computed[0][0]

    def change(results):
        bits = results[job, 0]["bits"]
        bits[bits.index(first_of(results, job, 2)[0]["bits"][0])] = NOT_A_NUMBER
        for completion in first_of(results, job, 2):
            completion["bits"][0] = NOT_A_NUMBER

    cells = [cell for cell in changed_cells(computed, change) if cell.trainer == job]
    assert [(cell.generator, cell.different) for cell in cells] == [(1, 1), (2, 1), (4, 1)]


def test_settings_that_the_matrix_does_not_read_are_refused(capsys):
    assert main(["parity", "--matrix", "full", "--tokens", "5", "--parallel.tensor", "2"]) == 2
    assert "--matrix uses its own models and settings; leave out --tokens, --parallel" in capsys.readouterr().err
    assert main(["parity"]) == main(["parity", "--matrix", "full", "--model", "qwen3:micro"]) == 2
    assert capsys.readouterr().err.count("give either a model with --model DIR or --matrix") == 2
