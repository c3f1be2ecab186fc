"""The Triton kernels' logic on CPU tensors, under the interpreter; `test_cuda_kernels.py` runs this file.

The interpreter has no bfloat16 products, so float16 stands for the half-precision path. It computes a tile's product
with the CPU's BLAS, whose sums depend on the tile's height; a product of fixed order stands in for it, as a tensor core
has one. What holds here is the kernels' indexing, masking and order of pieces, not the GPU's arithmetic.
"""

import inspect
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import Engine, EngineConfig, SamplingParams, build_model, ops, score
from lockstep.model import ModelConfig
from lockstep.ops import attention_reference, cuda, head_gradients, logprobs, sampling
from lockstep.ops.cuda import attention, linear, vocabulary
from lockstep.ops.cuda.attention_backward import attend_backward
from lockstep.ops.cuda.kernel import launch
from lockstep.ops.linear import product_sums, tree_sum
from lockstep.ops.vocabulary import piece_bounds
from tests.ops.attention_checks import (
    FEW_SHARES,
    assert_only_those_who_see_it_break,
    assert_pieces_add_up,
    assert_pieces_agree,
)

# One rounding to the dtype on values up to 8, and float32 sums of some hundred terms in another order.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 4e-2}
DTYPES = [torch.float32, torch.float16]
pieces_of = linear.pieces_of
compare, agree = linear.agrees.__wrapped__, attention.high_tiles_agree.__wrapped__
SINKS = torch.tensor([0.5, -2.0, 3.0, 0.0])


@pytest.fixture(scope="module", autouse=True)
def form():
    """The kernels have one form: the folder's own fixture would run everything several times."""


@pytest.fixture(scope="module", autouse=True)
def dots_of_fixed_order():
    from triton.runtime import interpreter

    patch = pytest.MonkeyPatch()
    patch.setattr(interpreter.np, "matmul", _dot)
    # Comparing the tiles of every shape takes the interpreter minutes. In float32 they agree by their order of sums;
    # in half precision what agrees depends on how a tensor core adds, which nothing here stands for.
    patch.setattr(linear, "agrees", lambda *_, **__: True)
    patch.setattr(linear, "HALF_TILES", linear.HALF_TILES[:1])
    patch.setattr(linear, "ENOUGH", 4)  # so that these small products have tiles of both sizes
    patch.setattr(attention, "ROWS", dict.fromkeys(attention.ROWS, 16))
    patch.setattr(attention, "LONG", 24)
    patch.setattr(attention, "CHUNK", attention.BLOCK)  # so that these sequences have several
    patch.setattr(attention, "AHEAD", 2)
    patch.setattr(attention, "PROGRAMS", 8)  # few rows only: the interpreter takes long to join them
    patch.setattr(attention, "high_tiles_agree", lambda dtype, *_: dtype == torch.float16)
    patch.setattr(vocabulary, "BLOCK", 32)  # so that a piece of a small vocabulary has several
    _do_nothing_twice(patch, interpreter)
    yield
    patch.undo()


def _do_nothing_twice(patch, interpreter) -> None:
    """Two fifths of the interpreter's time: sums to look for overflows, which it reports in debugging alone, and lists
    that every launch makes again."""
    options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    patch.setattr(interpreter.interpreter_builder, "options", options)
    is_builtin = interpreter.tl.core.is_builtin
    builtins = cache(lambda package: [name for name, _ in inspect.getmembers(package, is_builtin)])

    def patch_builtin(package, builder, scope):
        for name in builtins(package):
            if is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, scope)

    patch.setattr(interpreter, "_patch_builtin", patch_builtin)


def _dot(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
    # In this memory order numpy adds along the first axis one after the other, whatever the others' lengths.
    products = np.multiply(a.astype(dtype).T[:, :, None], b.astype(dtype)[:, None, :], order="C")
    return np.add.reduce(products, 0, dtype=dtype)


@contextmanager
def in_kernels():
    """Sends CPU tensors to the kernels, as CUDA tensors are elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "usable", lambda x: True)
        yield


@pytest.fixture
def kernels():
    with in_kernels():
        yield


def give_copy_engine(patch):
    patch.setattr(linear, "has_copy_engine", lambda x: True)
    patch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=3))


def _product(x: torch.Tensor, weight: torch.Tensor, chunks: int = 1) -> torch.Tensor:
    return linear.product(x, weight, chunks if chunks > 1 else 0, x.dtype)


def _randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _close(ours, expected, dtype: torch.dtype) -> None:
    for mine, theirs in zip(ours, expected, strict=True):
        assert (mine.float() - theirs.float()).abs().max() <= TOLERANCE[dtype] * max(1.0, float(theirs.abs().max()))


@pytest.mark.parametrize(("dtype", "inner", "outer"), [(torch.float32, 64, 96), (torch.float16, 200, 35)])
def test_a_product_equals_the_library_and_a_row_is_the_same_in_any_company(dtype, inner, outer):
    x, weight = _randn(0, 70, inner, dtype=dtype), _randn(1, outer, inner, dtype=dtype) * inner**-0.5
    expected = _product(x, weight)
    _close([expected], [x.float() @ weight.float().T], dtype)

    @settings(max_examples=2)
    @given(chosen=st.lists(st.integers(0, 69), min_size=1, max_size=40))
    def same(chosen):
        assert torch.equal(_product(x[chosen], weight), expected[chosen])

    same()


@pytest.mark.parametrize(("inner", "pieces"), [(300, 1), (520, 2), pytest.param(1100, 4, marks=pytest.mark.slow)])
def test_pieces_in_programs_of_their_own_and_in_one_program_give_the_same_bits(inner, pieces):
    x, weight = _randn(0, 35, inner), _randn(1, 40, inner)
    assert linear.pieces_of(inner, 40) == pieces
    apart, together = (linear.Tile(32, 32, 32, 4, 2, split) for split in (True, False))
    assert torch.equal(linear.product_with(apart, x, weight), linear.product_with(together, x, weight))
    # The counters are back at zero: a second product meets as the first did.
    assert torch.equal(linear.product_with(apart, x, weight), linear.product_with(together, x, weight))


@pytest.mark.parametrize(
    ("dtype", "inner", "outer", "looped"),
    [(torch.float16, 256, 64, False), (torch.float32, 512, 48, False), (torch.float16, 256, 72, True)],
)
def test_described_tiles_have_the_bits_of_others(monkeypatch, dtype, inner, outer, looped):
    x, weight = _randn(0, 35, inner, dtype=dtype), _randn(1, outer, inner, dtype=dtype)
    used = _launches(monkeypatch)
    monkeypatch.setattr(linear, "pieces_of", lambda *_: 1 if looped else min(2, pieces_of(inner, outer)))
    pointers = linear.product_with(linear.Tile(32, 32, 32, 4, 2), x, weight)
    give_copy_engine(monkeypatch)
    described = linear.product_with(linear.Tile(32, 32, 32, 4, 2, looped=looped), x, weight)
    assert used == [linear._linear_kernel, linear._looped_kernel if looped else linear._described_kernel]
    assert torch.equal(described, pointers)
    # Pieces that end within a step, and rows that do not begin at multiples of 16 bytes, cannot be described.
    linear.product_with(linear.Tile(32, 32, 32, 4, 2), x[:, :224], weight[:, :224], 2)
    linear.product_with(linear.Tile(32, 32, 32, 4, 2), x[:, :-1], weight[:, :-1])
    assert used[2:] == [linear._linear_kernel] * 2


def _launches(monkeypatch) -> list:
    used = []

    def launched(kernel, *given, **sizes):
        used.append(kernel)
        launch(kernel, *given, **sizes)

    monkeypatch.setattr(linear, "launch", launched)
    return used


@pytest.mark.parametrize("outer", [48, 100])
def test_what_is_compared_for_a_shape_is_what_computes_it(monkeypatch, outer):
    used = _launches(monkeypatch)
    monkeypatch.setattr(linear, "COMPARED", 64)
    give_copy_engine(monkeypatch)
    tile, base = linear.Tile(32, 32, 32, 4, 2, looped=True), linear.Tile(32, 32, 32, 4, 2, True)
    assert compare(tile, base, torch.float16, torch.device("cpu"), 32, outer)
    whole = _randn(0, 71 * 32 + 1, dtype=torch.float16)
    at_odd_addresses = whole[1:].view(71, 32)
    for x, dtype in ((whole[:-1].view(71, 32), torch.float16), (at_odd_addresses, torch.float32)):
        weight = _randn(1, outer, 32, dtype=torch.float16)
        _close([linear.product_with(tile, x, weight, dtype=dtype)], [x.float() @ weight.float().T], torch.float16)
        assert used[-1] is used[1]
    # Of one row, a stride can be anything.
    linear.product_with(tile, torch.zeros(2, 33, dtype=torch.float16)[:1, :32], weight)
    assert used[-1] is used[1]


def test_ranks_that_hold_some_chunks_each_meet_in_the_same_bits(kernels):
    x, weight = _randn(0, 3, 640), _randn(1, 40, 640)
    for chunks, ranks in ((4, 2), (8, 4)):
        whole = _product(x, weight, chunks)
        assert not torch.equal(whole, _product(x, weight, 2))
        cut = zip(x.chunk(ranks, 1), weight.chunk(ranks, 1))
        parts = [linear.product(*part, chunks // ranks, torch.float32) for part in cut]
        assert torch.equal(tree_sum(parts), whole), ranks
    with pytest.raises(ValueError, match="a product has 16 chunks, but on a GPU it can have 1, 2, 4, 8"):
        _product(x, weight, 16)
    for product in (ops.linear, product_sums):
        with pytest.raises(ValueError, match="its 639 features a multiple of 2"):
            product(x[:, :639], weight[:, :639], 2)
        with pytest.raises(ValueError, match="factors of one width"):
            product(x, weight[:, :639], 2)


def test_a_tile_whose_bits_differ_is_not_used(monkeypatch):
    exact, (small, large) = linear.product_with, linear.FLOAT_TILES
    given = torch.float32, torch.device("cpu"), 40, 24
    assert compare(large, small, *given)
    monkeypatch.setattr(
        linear, "product_with", lambda tile, x, w, pieces: exact(tile, x, w, pieces) + (1e-3 if tile == large else 0)
    )
    assert not compare(large, small, *given)
    assert linear.largest(linear.FLOAT_TILES, lambda tile: False, 4096, 4096, 1) == small


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 50), (torch.float16, 128), (torch.bfloat16, 50)])
def test_rows_agree_with_the_plain_forms_and_so_do_their_gradients(dtype, dim):
    x, up, weight = (_randn(i, *s, dtype=dtype).requires_grad_() for i, s in enumerate([(33, dim), (33, dim), (dim,)]))
    heads, angles = _randn(3, 33, 3, dim, dtype=dtype).requires_grad_(), _randn(4, 33, dim // 2)
    wide = [(part.detach() * 8).requires_grad_() for part in (x, up)]
    cases = [
        (ops.rms_norm, (x, weight, 1e-5), [x, weight]),
        (ops.rms_norm, (x, weight, 1e-5, True), [x, weight]),
        (ops.silu_mul, (x, up), [x, up]),
        (ops.gelu_mul, wide, wide),
        (ops.sigmoid_mul, wide, wide),
        (ops.relu_squared, (x,), [x]),
        (ops.clamped_swiglu, wide, wide),
        (ops.rotary, (heads, angles.cos(), angles.sin()), [heads]),
        (ops.softcap, (wide[0], 5.0), wide[:1]),
        *((ops.rotary, (heads, angles.cos()[:, :7], angles.sin()[:, :7], pairs), [heads]) for pairs in (False, True)),
    ]
    for operator, arguments, leaves in cases:
        theirs = operator(*arguments)
        grad = _randn(5, *theirs.shape, dtype=dtype)
        expected = torch.autograd.grad(theirs, leaves, grad)
        with in_kernels():
            mine = operator(*arguments)
            _close([mine, *torch.autograd.grad(mine, leaves, grad)], [theirs, *expected], dtype)
            for part in (slice(0, 1), slice(7, 29)):
                alone = [a[part] if isinstance(a, torch.Tensor) and a.shape[0] == 33 else a for a in arguments]
                assert torch.equal(operator(*alone), mine[part])


# The interpreter rounds to bfloat16 in its own way.
@pytest.mark.parametrize(
    ("moments", "kind"), [(torch.float32, torch.float16), (torch.float16, torch.float32), (torch.float16, None)]
)
def test_an_update_has_the_bits_of_the_cpus(moments, kind):
    def stepped() -> list[torch.Tensor]:
        master, grad, mean = _randn(0, 3001), _randn(1, 3001).half(), (_randn(2, 3001) * 0.01).to(moments)
        square = (_randn(3, 3001).square() * 1e-3).to(moments)
        weight = None if kind is None else torch.zeros(3001).to(kind)
        for step in range(1, 4):
            factors = ops.adamw_factors(step, 1e-2, 0.1, 0.9, 0.95, 1e-8)
            ops.adamw_step(master, grad, mean, square, factors, 0.3, weight)
        return [master, mean, square, *([] if weight is None else [weight])]

    expected = stepped()
    with in_kernels():
        assert all(map(torch.equal, stepped(), expected))


@settings(max_examples=3)
@given(
    lengths=st.lists(st.integers(1, 80), min_size=1, max_size=2),
    terms=st.sampled_from([ops.Terms(), ops.Terms(window=1), ops.Terms(window=70), ops.Terms(0.3, 20, SINKS)]),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    head_dim=st.sampled_from([32, 40]),
    dtype=st.sampled_from(DTYPES),
    random=st.randoms(use_true_random=False),
)
def test_attention_is_the_same_however_sequences_are_cut_ordered_and_paged(
    lengths, terms, heads, head_dim, dtype, random
):
    q, k, v = (_randn(i, sum(lengths), n, head_dim, dtype=dtype) for i, n in enumerate((*heads, heads[1])))
    terms = terms if terms.sinks is None else terms._replace(sinks=terms.sinks[: heads[0]].to(dtype))
    plain = ops.PackedAttention(lengths)(0, q, k, v, terms)
    with in_kernels():
        expected = ops.PackedAttention(lengths)(0, q, k, v, terms)
        _close([expected], [plain], dtype)
        assert_pieces_agree(expected, q, k, v, lengths, random, pieces=[1, 16, 64, 90], terms=terms)


def test_chunks_have_the_same_bits_in_programs_of_their_own_and_in_turn(kernels, monkeypatch):
    dtype, terms = torch.float16, ops.Terms(window=40, sinks=SINKS[:2])
    lengths, padding, forms = [70, 4], 2, []  # two chunks, and one
    total = sum(lengths) + padding
    q, k, v = (_randn(i, total, heads, 40, dtype=dtype) for i, heads in enumerate((2, 1, 1)))
    # Neighbors have the same key and opposite values: what is left of their sums is how each was rounded.
    k[1::2], v[1::2] = k[::2], -v[::2]
    monkeypatch.setattr(attention, "LONG", 1000)
    monkeypatch.setattr(attention, "launch", lambda *a, **c: (forms.append(c.get("CHUNKS")), launch(*a, **c)))
    outs = []
    for programs in (1, 264):
        monkeypatch.setattr(attention, "PROGRAMS", programs)
        outs.append(ops.PackedAttention(lengths).forward(q, k, v, terms))
    assert [f for f in forms if f] == ["in turn", "apart"]
    for one, other in zip(*outs, strict=True):
        assert torch.equal(one, other)
    assert not outs[1][0][-padding:].any()


@pytest.mark.slow
def test_tiles_of_twice_the_height_are_used_if_they_have_the_same_bits(monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", 32)
    monkeypatch.setattr(attention, "CHUNK", 32)
    given = torch.float16, torch.device("cpu"), 2, 1, 32
    assert agree(*given) and not agree(torch.float32, *given[1:])
    exact, low = attention.attend, attention.ROWS[torch.float16]

    def differs_in_one_bit(q, keys, values, plan, terms):
        out, log_sums = exact(q, keys, values, plan, terms)
        if plan.height > low and terms.window:
            log_sums[-3, 1] = torch.nextafter(log_sums[-3, 1], log_sums.new_tensor(9.0))
        return out, log_sums

    monkeypatch.setattr(attention, "attend", differs_in_one_bit)
    assert not agree(*given)


def test_a_broken_token_breaks_those_that_see_it_and_changes_no_bit_of_others(kernels):
    assert_only_those_who_see_it_break(torch.float16, "key", torch.nan)


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "head_dim", "terms"),
    [
        (torch.float32, 3, 1, 40, ops.Terms(0.3, 20, SINKS)),
        (torch.float16, 2, 2, 32, ops.Terms()),
        (torch.float32, 1, 1, 130, ops.Terms()),
    ],
)
def test_the_gradient_of_attention(kernels, dtype, heads, kv_heads, head_dim, terms):
    lengths, padding = [5, 70, 1], 3
    tokens = sum(lengths) + padding
    q, grad = _randn(0, tokens, heads, head_dim, dtype=dtype), _randn(3, tokens, heads, head_dim, dtype=dtype)
    k, v = (_randn(i, tokens, kv_heads, head_dim, dtype=dtype) for i in (1, 2))
    attention = ops.PackedAttention(lengths)
    terms = terms if terms.sinks is None else terms._replace(sinks=terms.sinks[:heads])
    out, log_sums = attention.forward(q, k, v, terms)
    grad[-padding:] = 0
    ours = attend_backward(grad, q, k, v, out, log_sums, attention.starts, None, k.dtype, terms)
    pieces = attention.starts, attention.contexts, attention.starts[:-1]
    _close(ours, attention_reference.attend_backward_reference(grad, q, k, v, out, log_sums, *pieces, terms), dtype)
    assert not any(g[-padding:].any() for g in ours)


def test_pieces_of_sequences_attend_as_the_whole_and_their_gradients_add_up_to_its(kernels):
    terms = ops.Terms(0.3, 50, SINKS[:2].half())
    assert_pieces_add_up(torch.float16, 2, 2, 32, TOLERANCE[torch.float16], terms=terms, shares=FEW_SHARES)


def _log_probs(masses, join, logits, targets, inverse):
    chosen = logits.gather(1, targets[:, None])[:, 0].float() * inverse
    return join(masses(logits, inverse, piece_bounds(logits.shape[1])), chosen)


@settings(max_examples=15)
@given(
    groups=st.lists(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5)), min_size=1, max_size=5), max_size=3),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_copies_of_a_shared_key_are_found_and_summed_as_on_the_cpu(groups, seed, dtype):
    """Per sequence: tokens that it leaves out, as far as the first of its group has them, and tokens of its own."""
    lengths, left_out = [], []
    for (_, own), *others in groups:
        lengths += [own, *(min(out, own) + more for out, more in others)]
        left_out += [0, *(min(out, own) for out, _ in others)]
    attention = ops.SharedPrefixAttention(lengths, left_out)
    padded = torch.tensor([[*each, 0, 0] for each in (lengths, left_out)], dtype=torch.int32)
    rows, keys = attention.tokens + 3, attention.keys + 2
    fixed = ops.SharedPrefixAttention.of_contexts(*padded, rows, keys, max(lengths, default=0) + 5)
    like = torch.empty(rows, 2, 4, dtype=dtype)
    of_keys = _randn(seed, keys, 2, 4) * 10.0 ** torch.randint(-4, 4, (keys, 1, 1))
    expected = attention.summed(of_keys, like)
    of_rows = _randn(seed + 1, rows, 2, 4)
    expected_rows, _ = attention._of_keys(of_rows, None)
    with in_kernels():
        assert torch.equal(fixed.summed(of_keys, like), expected)
        assert torch.equal(attention._of_keys(of_rows, of_rows)[1], expected_rows)
        assert torch.equal(fixed._of_keys(of_rows, of_rows)[1][: attention.keys], expected_rows)


@pytest.mark.parametrize(("dtype", "vocab"), [(torch.float32, 258), (torch.float16, 5), (torch.bfloat16, 70)])
def test_log_probabilities_their_gradient_and_draws(dtype, vocab):
    count = 5
    logits, targets = _randn(0, count, vocab, dtype=dtype) * 3, torch.arange(count) % vocab
    inverse, grad = torch.linspace(0.5, 2, count), _randn(1, count)
    uniform = torch.rand(count, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    uniform[:3] = torch.tensor([-1.0, 0.0, 1 - 2**-53])
    logits[3, : vocab // 2] = logits[2, -1] = -torch.inf  # tokens that top-k or top-p cut
    targets[3] = targets[2] = vocab // 2
    ours = _log_probs(vocabulary.masses, vocabulary.join_masses, logits, targets, inverse)
    plain = _log_probs(logprobs._plain_masses, logprobs._plain_join, logits, targets, inverse)
    _close(ours, plain, torch.float32)
    mine = vocabulary.logits_gradient(logits.clone(), targets, inverse, ours[2], grad)
    _close([mine], [head_gradients.logits_gradient(logits.clone(), targets, inverse, ours[2], grad)], dtype)
    bounds = piece_bounds(vocab)
    pieces = vocabulary.masses(logits, inverse, bounds)
    tokens = vocabulary.draw(logits, inverse, uniform, pieces, bounds)
    assert torch.equal(tokens, sampling._plain_draw(logits, inverse, uniform, pieces, bounds))
    cut = -(-vocab // 2)
    for first, stop in ((0, cut), (cut, vocab)):  # as two processes hold it
        own = vocabulary.draw(logits[:, first:stop], inverse, uniform, pieces, bounds - first)
        assert torch.equal(own, torch.where((tokens >= first) & (tokens < stop), tokens - first, -1))
    for part in (slice(0, 1), slice(2, 5)):
        alone = _log_probs(vocabulary.masses, vocabulary.join_masses, logits[part], targets[part], inverse[part])
        assert all(torch.equal(a, o[part]) for a, o in zip(alone, ours))
        drawn = vocabulary.draw(logits[part], inverse[part], uniform[part], pieces[part], bounds)
        assert torch.equal(drawn, tokens[part])


def test_engine_and_trainer_agree_bit_for_bit_through_the_kernels(kernels):
    shape = dict(vocab_size=40, dim=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=32)
    model = build_model(ModelConfig(family="qwen3", qk_norm="head", max_positions=128, **shape), "float32", seed=1)
    engine = Engine(model, EngineConfig(max_tokens_per_step=7, max_sequences=3, cache_tokens=256))
    prompts = [[1, 2, 3], [4] * 6]
    groups = engine.generate(prompts, SamplingParams(max_tokens=2, temperature=1.0, seed=0, ignore_eos=True))
    for prompt, (completion,) in zip(prompts, groups):
        trainer = score(model, [prompt + completion.token_ids])[0]
        assert torch.equal(torch.tensor(completion.logprobs), trainer[len(prompt) - 1 :])
