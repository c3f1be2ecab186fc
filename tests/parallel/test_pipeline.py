"""Pipelines against one process: every schedule, tied and untied, and what cannot run is refused by name."""

import importlib

import pytest
import torch

from lockstep.config import CompileConfig, ParallelConfig, RecomputeConfig
from lockstep.errors import UserError
from lockstep.model import Decoder, ScoringModel, preset
from lockstep.parallel import Pipeline
from lockstep.parallel.pipeline_schedule import PipelinePlan, bubble_fraction, read_table
from lockstep.parallel.pipeline_split import split_layers
from lockstep.parallel.pipeline_stage import Computed, Stage
from tests.parallel.launch import launch
from tests.parallel.training import train

STEPS = 6
IN_BACKWARD = {"optimizer_in_backward": True, "max_grad_norm": 0.0}
TOGETHER = "0F0,0F1,,,0B0,0F2,0B1,0F3,0I2,0W2,,0B3\n,1F0,1F1,1I0,1W0,1B1,1F2,1F3,1B2,1B3\n"


@pytest.fixture(scope="module")
def alone():
    """One process's training, tied or not, in a dtype."""
    known = {}

    def of(tied, dtype="float32", steps=STEPS):
        key = tied, dtype, steps
        if key not in known:
            known[key] = launch(1, train, ParallelConfig(), dtype, steps, "qwen3:micro", 258, tied)[0]
        return known[key]

    return of


def test_a_schedule_from_csv_trains_as_one_process_does(alone, tmp_path):
    table = tmp_path / "own.csv"
    table.write_text(TOGETHER)
    layout = ParallelConfig(pipeline=2, pipeline_schedule=str(table), pipeline_split="layers.1")
    _compare(launch(2, train, layout, "float32", STEPS, "qwen3:micro", 258, True), alone(True))


@pytest.mark.parametrize("schedule, mode", [("zbv", "full"), ("zbv", "selective"), ("dualpipev", "selective")])
def test_a_split_backward_recomputes_activations(alone, schedule, mode):
    layout = ParallelConfig(pipeline=2, pipeline_schedule=schedule)
    recompute = RecomputeConfig(mode=mode)
    traces = launch(2, train, layout, "float32", 5, "qwen3:micro", 258, True, None, recompute)
    _compare(traces, alone(True, steps=5))


@pytest.mark.parametrize("ranks, schedule", [(2, "1f1b"), (4, "1f1b"), (2, "zbv")])
def test_a_stage_whose_parameters_are_all_frozen_passes_gradients_on(alone, ranks, schedule):
    rules = {"rules": ("embed_tokens.* frozen=true", "layers.0.* frozen=true", "layers.1.* frozen=true")}
    layout = ParallelConfig(pipeline=2, pipeline_schedule=schedule)
    # Clipping, on the ranks that have gradients and on those that have none, is part of it.
    (expected,) = launch(1, train, ParallelConfig(), "float32", 3, "qwen3:micro", 258, True, rules)
    assert expected.norms[0] > 1.0
    for trace in launch(ranks, train, layout, "float32", 3, "qwen3:micro", 258, True, rules):
        assert trace.losses == pytest.approx(expected.losses, rel=1e-5)
        assert trace.norms == pytest.approx(expected.norms, rel=1e-4)
        for name, weight in trace.weights.items():
            assert (weight - expected.weights[name]).norm() <= 1e-4 * expected.weights[name].norm(), name


@pytest.mark.slow
def test_compiled_stages_train_as_one_compiled_process_does():
    own = ("float32", 3, "llama3:micro", 258, False, None, None, True)
    (expected,) = launch(1, train, ParallelConfig(), *own, seconds=300)
    _compare(launch(2, train, ParallelConfig(pipeline=2), *own, seconds=300), expected)


def test_a_loss_sees_no_more_of_a_pipelines_last_stage_than_of_any_model():
    shape = preset("qwen3:micro", 258)
    assert isinstance(Decoder(shape, torch.float32, "meta"), ScoringModel)
    last = Stage(shape, torch.float32, 1, [range(2), range(2, 4)])
    computed = Computed(last, torch.empty(3, shape.dim))
    assert isinstance(computed, ScoringModel) and computed.head_weight is last.embed_tokens.weight
    assert not hasattr(computed, "layers") and not issubclass(Pipeline, Decoder)


def _compare(traces, expected, tolerance=1e-5, bits=True):
    if bits:
        assert torch.equal(torch.cat([trace.log_probs for trace in traces]), expected.log_probs)
    weights = {}
    for trace in traces:
        # Micro-batches' gradients are added in another order, and those of a tied weight apart.
        assert trace.losses == pytest.approx(expected.losses, rel=tolerance)
        # Every rank knows the norm over all stages, a tied weight counted once.
        assert trace.norms == pytest.approx(expected.norms, rel=10 * tolerance)
        assert not weights.keys() & trace.weights.keys() or trace.weights.keys() <= weights.keys()
        weights |= trace.weights
    assert weights.keys() == expected.weights.keys()
    for name, weight in weights.items():
        # Many steps on, what sums of another order and AdamW's division by small moments leave.
        difference = (weight - expected.weights[name]).float().norm() / expected.weights[name].float().norm()
        assert difference < 10 * tolerance, name


@pytest.mark.parametrize(
    "layers, stages, settings, expected",
    [
        (4, 2, {}, [2, 2]),
        (5, 2, {}, [3, 2]),
        (8, 4, {"pipeline_head_layers": 2.0}, [2, 2, 3, 1]),
        (12, 3, {"pipeline_embedding_layers": 3.0, "pipeline_head_layers": 3.0}, [3, 6, 3]),
        (3, 3, {"pipeline_head_layers": 9.0}, [1, 1, 1]),
        (6, 3, {"pipeline_split": "layers.1, layers.5"}, [1, 4, 1]),
    ],
)
def test_layers_are_split_by_work_or_by_name(layers, stages, settings, expected):
    split = split_layers(layers, stages, ParallelConfig(**settings))
    assert [len(own) for own in split] == expected
    assert [layer for own in split for layer in own] == list(range(layers))


def test_splits_that_cannot_be_are_refused():
    with pytest.raises(
        UserError, match=r"4 stages needs at least as many layers, but the model has 3; lower parallel.pipeline"
    ):
        split_layers(3, 4, ParallelConfig())
    with pytest.raises(UserError, match=r'no stage can begin with "norm"; name layers.1 to layers.5'):
        split_layers(6, 2, ParallelConfig(pipeline_split="norm"))
    with pytest.raises(UserError, match=r'"layers.2" does not make 3 stages; name the 2 layers'):
        split_layers(6, 3, ParallelConfig(pipeline_split="layers.2"))


def test_the_bubble_is_that_of_the_papers():
    def table(name, ranks, count):
        ahead = [count if name == "gpipe" else min(count, ranks - rank) for rank in range(ranks)]
        from lockstep.parallel.pipeline_schedule import _alternating

        return [_alternating(rank, count, ahead[rank]) for rank in range(ranks)]

    for ranks, count in ((2, 4), (4, 8), (4, 4)):
        # (p - 1) / (m + p - 1) for p equal stages and m micro-batches (arXiv 1811.06965, 2104.04473).
        share = (ranks - 1) / (count + ranks - 1)
        assert bubble_fraction(table("gpipe", ranks, count), [1.0] * ranks) == pytest.approx(share)
        assert bubble_fraction(table("1f1b", ranks, count), [1.0] * ranks) == pytest.approx(share)
    assert bubble_fraction(table("gpipe", 2, 4), [1.0, 2.0]) > bubble_fraction(table("gpipe", 2, 4), [1.5, 1.5])


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("0F0,0B0\n", r"has 1 lines, but the pipeline has 2 ranks"),
        ("0F0,0X0\n1F0,1B0\n", r'line 1, field 2: "0X0" is not an action; write the stage'),
        ("0F0\n1F0,1B0\n", r"stage 0 must run micro-batch 0 forward once \(F\) and backward once"),
        ("0F0,0B0,1F0\n1B0\n", r"stage 1 is on lines \[1, 2\]"),
        ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", r"last stage must run its forwards in the order of the micro-batches"),
        ("0B0,0F0\n1F0,1B0\n", r"the ranks wait for each other: rank 0 for 0B0's inputs, rank 1 for 1F0's inputs"),
    ],
)
def test_a_table_that_cannot_run_is_refused_with_its_place(tmp_path, text, complaint):
    path = tmp_path / "own.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=complaint):
        read_table(path, 2)


@pytest.mark.parametrize(
    "settings, count, complaint",
    [
        ({"pipeline_schedule": "1f1b"}, 3, r'3 micro-batches per rank, but .* "1f1b" on 4 ranks needs 4 or more'),
        ({"pipeline_schedule": "dualpipev"}, 7, r"needs 8 or more"),
        ({"pipeline_schedule": "interleaved"}, 9, r"needs a multiple of 4"),
        ({"pipeline_schedule": "zbv", "reshard_after_forward": "always"}, 4, r"halves of the backward"),
        ({"pipeline_schedule": "nowhere.csv"}, 4, r"nowhere.csv cannot be read"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, count, complaint):
    with pytest.raises(UserError, match=complaint):
        PipelinePlan(ParallelConfig(pipeline=4, **settings)).check_microbatches(count)


def test_a_split_backward_is_refused_for_compiled_blocks():
    with pytest.raises(UserError, match=r'set compile.backend = "none"'):
        PipelinePlan(ParallelConfig(pipeline=2, pipeline_schedule="zbv")).check_compile(CompileConfig("inductor"))


def test_halves_of_a_backward_compute_each_product_once(monkeypatch):
    from lockstep import ops

    linear = importlib.import_module("lockstep.ops.linear")
    computed = []
    for name in ("input_gradient", "weight_gradient"):
        exact = getattr(linear, name)
        monkeypatch.setattr(linear, name, lambda *a, n=name, f=exact: (computed.append(n), f(*a))[1])
    weight = torch.randn(24, 8, requires_grad=True)
    x = torch.randn(16, 8, requires_grad=True)
    out = ops.linear(x * 2, weight).sum()
    (grad_x,) = torch.autograd.grad(out, [x], retain_graph=True)
    assert computed == ["input_gradient"]
    (grad_weight,) = torch.autograd.grad(out, [weight], retain_graph=True)
    assert computed == ["input_gradient", "weight_gradient"]
    out.backward()
    assert torch.equal(x.grad, grad_x) and torch.equal(weight.grad, grad_weight)
