"""Graphs of training without a GPU; `tests/ops/test_cuda_kernels.py` runs this file under Triton's interpreter.

`Launches` stands for CUDA's capture: it records what PyTorch and Triton launch, and refuses what reads a value.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep import build_model
from lockstep.config import TrainConfig
from lockstep.model import Lora, ModelConfig
from lockstep.model.config import DeltaNet
from lockstep.model.layers import projections
from lockstep.model.rotary import RotaryTables
from lockstep.train import Trainer, graphs, pack, target_log_probs, trainer
from lockstep.train.graphs import TIMES_BEFORE_RECORDING, GraphedModel, Size
from lockstep.train.packing import pack_scored
from tests.ops.cuda_kernels import dots_of_fixed_order, form, in_kernels  # noqa: F401 - fixtures

SHAPE = ModelConfig(
    family="qwen3", vocab_size=40, dim=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=32,
    qk_norm="head", max_positions=128,
)  # fmt: skip
READS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_consecutive", "is_nonzero"}
"""Operators for which CUDA waits, which a capture does not allow."""


class Launches(TorchDispatchMode):
    """Records calls in the memory of their first results, and calls them again."""

    def __init__(self):
        super().__init__()
        self.calls, self.inside_triton = [], False

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        options = options or {}
        result = function(*arguments, **options)
        if not self.inside_triton:
            name = function.overloadpacket.__name__
            if name in READS or (name == "repeat_interleave" and options.get("output_size") is None):
                raise RuntimeError(f"{name} reads a value")
            self.calls.append((function, arguments, options, result))
        return result

    def launch(self, executor, arguments, options):
        self.inside_triton = True
        self.calls.append((executor, arguments, options, None))
        try:
            launched(executor, *arguments, **options)
        finally:
            self.inside_triton = False

    def replay(self):
        for function, arguments, options, result in self.calls:
            new = launched(function, *arguments, **options) if result is None else function(*arguments, **options)
            for into, value in zip(tree_leaves(result), tree_leaves(new)):
                if isinstance(into, torch.Tensor) and into.data_ptr() != value.data_ptr():
                    into.copy_(value)


class Capture:
    """`CudaCapture` without CUDA."""

    def warm_up(self, function):
        return function()

    def record(self, function):
        before = torch.is_grad_enabled()
        with Launches() as launches, pytest.MonkeyPatch.context() as patch:
            patch.setattr(interpreter.GridExecutor, "__call__", lambda e, *a, **o: launches.launch(e, a, o))
            results = function()
        assert torch.is_grad_enabled() == before

        @torch.no_grad()
        def replay():
            launches.replay()
            return results

        return replay


class Declining(Capture):
    def record(self, function):
        raise RuntimeError("nothing can be captured")


interpreter = pytest.importorskip("triton.runtime.interpreter")
launched = interpreter.GridExecutor.__call__


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    monkeypatch.setattr(graphs, "ROWS", 16)
    monkeypatch.setattr(graphs, "SEQUENCES", 2)

    # On a CPU they read the largest position.
    def rows(tables, at):
        return [(cos[at], sin[at]) for cos, sin in tables.reserve(0, at.device)]

    monkeypatch.setattr(RotaryTables, "__call__", rows)
    with in_kernels():
        yield


def drawn(seed, *lengths):
    generator = torch.Generator().manual_seed(seed)
    return pack([torch.randint(SHAPE.vocab_size, (n,), generator=generator).tolist() for n in lengths])


def sharing(seed, *prompts):
    """Answers of some tokens that share their prompt, per (tokens of the prompt, of each answer)."""
    generator = torch.Generator().manual_seed(seed)
    sequences, left_out = [], []
    for prompt, *answers in prompts:
        shared = torch.randint(SHAPE.vocab_size, (prompt,), generator=generator).tolist()
        sequences += [shared + torch.randint(SHAPE.vocab_size, (n,), generator=generator).tolist() for n in answers]
        left_out += [0] + [prompt - 1] * (len(answers) - 1)
    scored = [range(out + 1, len(sequence)) for sequence, out in zip(sequences, left_out)]
    return pack_scored(sequences, scored, left_out)


def loss_of(model, row):
    return -target_log_probs(model, row)[0].sum() / 8


def gradients(model):
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = None
    return found


def assert_same(ones, others):
    assert ones.keys() == others.keys()
    for name, one in ones.items():
        assert (one is None) == (others[name] is None) and (one is None or torch.equal(one, others[name])), name


def graphed_and_direct(model):
    """`model` with graphs, and with padding alone."""
    direct = GraphedModel(model, Declining)
    with pytest.warns(UserWarning, match="without CUDA graphs"):
        [loss_of(direct, drawn(0, 9, 5)) for _ in range(TIMES_BEFORE_RECORDING)]
    return GraphedModel(model, Capture), direct


WHOLE = [drawn(seed, *lengths) for seed, lengths in enumerate([(9, 5), (3, 12), (15,)])]
SHARED = [sharing(4, (6, 3, 5, 2), (3, 7)), sharing(5, (6, 6, 4, 5), (4, 5)), sharing(6, (9, 1, 2, 2), (2, 9))]


@pytest.mark.parametrize(("rows", "size"), [(WHOLE, Size(16, 2, 16)), (SHARED, Size(32, 4, 16, 64))])
def test_a_replay_has_the_bits_of_a_direct_pass_and_hidden_states_those_without_padding(rows, size):
    model = build_model(SHAPE, "float32", seed=1)
    graphed, direct = graphed_and_direct(model)
    for row in rows:
        replayed, expected = loss_of(graphed, row), loss_of(direct, row)
        assert torch.equal(replayed, expected) and torch.equal(replayed, loss_of(model, row))
        replayed.backward()
        found = gradients(model)
        expected.backward()
        assert_same(found, gradients(model))
    assert graphed.recorded == [size]


HYBRID = replace(SHAPE, num_layers=2, delta=DeltaNet(1, 2, 16, 16), delta_layers=(True, False), attention_gate=True)


@pytest.mark.parametrize("rows", [pytest.param(each[:2], marks=pytest.mark.slow) for each in (WHOLE, SHARED)])
def test_a_replay_of_linear_attention_has_the_bits_of_a_direct_pass(rows):
    model = build_model(HYBRID, "float32", seed=1)
    graphed, direct = graphed_and_direct(model)
    for row in rows:
        replayed, expected = loss_of(graphed, row), loss_of(direct, row)
        assert torch.equal(replayed, expected) and torch.equal(replayed, loss_of(model, row))
        replayed.backward()
        found = gradients(model)
        expected.backward()
        assert_same(found, gradients(model))
    assert len(graphed.recorded) == 1


def trained(dtype, monkeypatch, capture):
    """Losses and weights after steps of two micro-batches, of which all but the first are replayed."""
    monkeypatch.setattr(trainer, "can_graph", lambda model, config: True)
    monkeypatch.setattr(trainer, "GraphedModel", lambda model: GraphedModel(model, capture))
    model = build_model(SHAPE, "float32", seed=1).to(dtype)
    of_model = Trainer(model, TrainConfig(learning_rate=0.01, warmup_steps=0), 9)
    steps = [of_model.step([drawn(10 * n, 9, 5), drawn(10 * n + 1, 4, 10)], loss_of) for n in range(2)]
    assert of_model.recorded_sizes == (capture is Capture)
    return [(step["loss"], step["grad_norm"]) for step in steps], dict(model.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_steps_of_several_micro_batches_train_the_weights_of_direct_ones(dtype, monkeypatch):
    losses, weights = trained(dtype, monkeypatch, Capture)
    with pytest.warns(UserWarning, match="without CUDA graphs"):
        expected, direct = trained(dtype, monkeypatch, Declining)
    assert losses == expected and losses[0] != losses[1]
    assert_same(weights, direct)


def test_what_a_replay_would_overwrite_or_leave_out_is_run_directly():
    model = build_model(SHAPE, "float32", seed=1)
    model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    graphed, direct = graphed_and_direct(model)
    rows = [drawn(seed, 9, 5) for seed in range(3)]
    calls = []
    for _ in range(TIMES_BEFORE_RECORDING):
        loss_of(graphed, rows[0])
    assert graphed.recorded
    (loss_of(graphed, rows[0]) + loss_of(graphed, rows[1]) * 2).backward()  # the second before the first's backward
    found = gradients(model)
    (loss_of(direct, rows[0]) + loss_of(direct, rows[1]) * 2).backward()
    assert_same(found, gradients(model))
    loss = loss_of(graphed, rows[0])
    [loss_of(graphed, drawn(7, 20, 9)) for _ in range(TIMES_BEFORE_RECORDING + 1)]
    assert len(graphed.recorded) == 1, "recording would overwrite what the open forward saved"
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward"):
        loss.backward()
    up = model.layers[0].mlp.up_proj
    moved = nn.Parameter(up.weight * 2, requires_grad=False)
    for change in (lambda: setattr(up, "weight", moved), moved.requires_grad_):
        change()
        gradients(model)
        loss_of(graphed, rows[2]).backward()
        found = gradients(model)
        loss_of(direct, rows[2]).backward()
        assert_same(found, gradients(model))
    states = [graphed(row.tokens, row.positions, row.attend()).detach() for row in rows]
    assert not torch.equal(states[0], states[1]), "they are not the graph's own memory"
    block = model.layers[0]
    for register in (block.register_forward_hook, block.register_full_backward_hook):
        hook = register(lambda *_: calls.append(1))
        loss_of(graphed, rows[2]).backward()
        hook.remove()
    assert len(calls) == 2
    up.weight.register_hook(lambda grad: grad * 2)
    row = drawn(7, 20, 9)
    for _ in range(TIMES_BEFORE_RECORDING):
        gradients(model)
        loss_of(graphed, row).backward()
    found = gradients(model)
    loss_of(direct, row).backward()
    assert_same(found, gradients(model))


@pytest.mark.slow
def test_an_adapter_that_is_switched_or_scaled_is_recorded_again():
    shape = replace(
        SHAPE,
        num_layers=1,
        lora=Lora(rank=2, alpha=4.0, modules=("layers.0.self_attn.q_proj", "layers.0.mlp.down_proj")),
    )
    model = build_model(shape, "float32", seed=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora" in name or name == "norm.weight")
            if "lora_B" in name:
                parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    graphed, direct = graphed_and_direct(model)
    layers = [layer for _, layer in projections(model) if layer.lora_A is not None]
    losses = set()
    for scaling, adapted in ((2.0, False), (2.0, True), (3.0, True)):
        for layer in layers:
            layer.scaling, layer.adapted = scaling, adapted
        for _ in range(TIMES_BEFORE_RECORDING):
            gradients(model)
            loss = loss_of(graphed, WHOLE[0])
            loss.backward()
        losses.add(float(loss.detach()))
        found = gradients(model)
        loss_of(direct, WHOLE[0]).backward()
        assert_same(found, gradients(model))
    assert len(losses) == 3 and graphed.recorded


def test_a_replay_with_other_bits_is_not_used():
    class Wrong(Capture):
        def record(self, function):
            replay = super().record(function)
            return lambda: tuple(each if each is None else each.add_(1e-6) for each in replay())

    model = build_model(SHAPE, "float32", seed=1)
    graphed = GraphedModel(model, Wrong)
    with pytest.warns(UserWarning, match="other bits"):
        [loss_of(graphed, drawn(0, 9, 5)) for _ in range(TIMES_BEFORE_RECORDING)]
    assert not graphed.recorded


COUNTS = st.integers(1, 200_000)


@given(rows=COUNTS, sequences=COUNTS, longest=COUNTS, keys=st.one_of(st.just(0), COUNTS))
def test_a_size_has_room_and_at_most_an_eighth_of_padding(rows, sequences, longest, keys):
    size = Size.of(rows, sequences, longest, keys)
    assert rows <= size.rows <= max(rows + 63, rows * 9 / 8) and size == Size.of(*size)
    assert sequences <= size.sequences and keys <= size.keys and (keys > 0) == (size.keys > 0)
    assert min(longest, keys or rows) <= size.longest <= (size.keys or size.rows)
