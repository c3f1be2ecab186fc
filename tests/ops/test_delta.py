"""Gated delta networks: values and gradients of float64, and a row's bits in any pieces, company and places."""

from __future__ import annotations

from random import Random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep import ops
from lockstep.ops.delta import delta, has_kernels
from lockstep.ops.delta_cache import NO_STATE, DeltaCache, DeltaSizes, DeltaStep, paged_delta
from lockstep.ops.delta_reference import CHUNK, DeltaTerms, differentiable, sequence_reference
from lockstep.ops.step_graph import Arena

FLOAT, HALF = torch.float32, torch.bfloat16
PADDING = 3
# Heads of keys and of values, and their sizes: 1, 2 and 4 heads of values per head of keys, whole vectors and others.
SHAPES = [(2, 4, 16, 32), (1, 4, 16, 16), (2, 2, 24, 20), (1, 2, 33, 80), (1, 1, 5, 3)]
DECAYS = {
    "any": (0.0, 1.0), "nearly all is kept": (-9.0, 0.1), "nearly nothing is kept": (4.0, 1.0),
    "either": (0.0, 30.0),
}  # fmt: skip
"""Of the logarithms of rates and of steps: the mean, and the spread."""


def drawn(
    lengths: list[int],
    shape: tuple[int, int, int, int],
    dtype: torch.dtype = FLOAT,
    decays: str = "any",
    strength: float = 2.0,
    seed: int = 0,
    width: int = 4,
    keys: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, DeltaTerms]:
    """mixed, b, a and terms, with padding at the end. Keys come in pairs of opposite signs, so that what they store
    cancels; a large `strength` makes updates that replace all or nothing. width: of the convolution. keys: a factor of
    what queries and keys are made from: with a small one the epsilon of their length counts."""
    key_heads, value_heads, key_dim, value_dim = shape
    draw, rows = torch.Generator().manual_seed(seed), sum(lengths) + PADDING
    of_keys, channels = key_heads * key_dim, 2 * key_heads * key_dim + value_heads * value_dim
    mixed = torch.randn(rows, channels, generator=draw)
    mixed *= torch.exp2(torch.randint(-3, 4, mixed.shape, generator=draw).float())
    mixed[1::2, of_keys : 2 * of_keys] = (
        1e-2 * mixed[1::2, of_keys : 2 * of_keys] - mixed[: rows - 1 : 2][: len(mixed[1::2]), of_keys : 2 * of_keys]
    )
    mixed[:, : 2 * of_keys] *= keys
    mean, spread = DECAYS[decays]
    conv = torch.randn(channels, width, generator=draw) * 0.5
    rates = mean + torch.randn(value_heads, generator=draw)
    bias = torch.randn(value_heads, generator=draw)
    b, a = (size * torch.randn(rows, value_heads, generator=draw) for size in (strength, spread))
    terms = DeltaTerms(conv.to(dtype), rates.to(dtype), bias.to(dtype), key_heads, key_dim)
    return mixed.to(dtype), b.to(dtype), a.to(dtype), terms


def starts_of(lengths: list[int]) -> Tensor:
    return torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32)


def in_float64(mixed: Tensor, b: Tensor, a: Tensor, terms: DeltaTerms, lengths: list[int]) -> Tensor:
    """Token by token, as the paper has it."""
    mixed, b, a, conv, rates, bias = (x.double() for x in (mixed, b, a, *terms[:3]))
    group, of_keys, outs = terms.value_heads // terms.key_heads, terms.key_heads * terms.key_dim, []
    for mine, strength, step in zip(*(x[: sum(lengths)].split(lengths) for x in (mixed, b.sigmoid(), a))):
        x = F.silu(F.conv1d(F.pad(mine.T, (conv.shape[1] - 1, 0))[None], conv[:, None], groups=len(conv))[0].T)
        q, k, v = x.split((of_keys, of_keys, x.shape[1] - 2 * of_keys), 1)
        q, k = (each.unflatten(1, (terms.key_heads, -1)) for each in (q, k))
        q, k = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + 1e-6) for each in (q, k))
        q, k = (each.repeat_interleave(group, 1) for each in (q * terms.key_dim**-0.5, k))
        v, decay = v.unflatten(1, (terms.value_heads, -1)), (-rates.exp() * F.softplus(step + bias)).exp()
        state = x.new_zeros(terms.value_heads, terms.key_dim, terms.value_dim)
        for t in range(len(mine)):
            state = decay[t, :, None, None] * state
            update = strength[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
            state = state + k[t, :, :, None] * update[:, None]
            outs.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(outs)


def with_leaves(mixed: Tensor, b: Tensor, a: Tensor, terms: DeltaTerms) -> tuple[list[Tensor], DeltaTerms]:
    leaves = [x.detach().clone().requires_grad_() for x in (mixed, b, a, *terms[:3])]
    return leaves, DeltaTerms(leaves[3], leaves[4], leaves[5], *terms[3:])


@pytest.mark.parametrize(
    ("shape", "dtype", "decays", "strength", "width", "keys"),
    [
        (SHAPES[0], FLOAT, "any", 2.0, 4, 1.0), (SHAPES[1], HALF, "any", 2.0, 4, 1.0),
        (SHAPES[2], FLOAT, "nearly all is kept", 20.0, 4, 1.0),
        (SHAPES[3], FLOAT, "nearly nothing is kept", 2.0, 4, 1.0),
        (SHAPES[4], FLOAT, "either", 2.0, 4, 1.0), (SHAPES[0], HALF, "nearly all is kept", 2.0, 4, 1.0),
        ((1, 2, 128, 128), FLOAT, "any", 2.0, 4, 1.0), (SHAPES[0], FLOAT, "any", 2.0, 2, 1.0),
        (SHAPES[0], FLOAT, "any", 2.0, 7, 1.0), (SHAPES[0], FLOAT, "any", 2.0, 4, 1e-3),
    ],
)  # fmt: skip
def test_values_and_gradients_are_those_of_float64(shape, dtype, decays, strength, width, keys):
    lengths = [5, 130, 64, 1]
    leaves, terms = with_leaves(*drawn(lengths, shape, dtype, decays, strength, width=width, keys=keys))
    out = delta(*leaves[:3], terms, starts_of(lengths))
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected = in_float64(*exact[:3], DeltaTerms(exact[3], exact[4], exact[5], *terms[3:]), lengths)
    expected = F.pad(expected, (0, 0, 0, 0, 0, PADDING))
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    ours = [out, *torch.autograd.grad(out, leaves, grad)]
    theirs = [expected, *torch.autograd.grad(expected, exact, grad.double())]
    # One rounding of the result to its dtype, plus sums of up to 130 rows that float32 rounds one by one, each of which
    # an update may repeat: the system that the updates solve amplifies errors several times. A decay's gradient is the
    # difference of parts of order 1, which may be all but equal; a rate's is the sum of 200 of them.
    tolerance = 1e-4 if dtype == FLOAT else 1e-2
    for name, mine, reference in zip(("out", "mixed", "b", "a", "conv", "rates", "bias"), ours, theirs):
        assert mine.dtype == dtype
        scale = max(0.1 if name in ("out", "mixed", "b", "a") else 2.0, float(reference.abs().max()))
        assert (mine.double() - reference).abs().max() <= tolerance * scale, name
        assert not mine[-PADDING:].any() or name not in ("out", "mixed", "b", "a")


@pytest.mark.parametrize("shape", SHAPES)
def test_values_that_are_not_finite_leave_nothing_for_the_next_gradient(shape):
    def results(mixed, b, a, terms):
        leaves, terms = with_leaves(mixed, b, a, terms)
        out = delta(*leaves[:3], terms, starts_of(lengths))
        return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    lengths = [130, 70]
    before = results(*drawn(lengths, shape))
    broken, *others = drawn(lengths, (4, 4, 40, 40))
    results(torch.full_like(broken, torch.nan), *others)
    assert all(map(torch.equal, before, results(*drawn(lengths, shape))))


@pytest.mark.parametrize(("shape", "decays"), [(SHAPES[0], "any"), (SHAPES[3], "either")])
def test_kernels_compute_what_defines_them(form, shape, decays):
    if form == "pytorch":
        pytest.skip("the definition itself")
    lengths = [150, 20]
    (mixed, b, a, terms), starts = drawn(lengths, shape, decays=decays), starts_of(lengths)
    out, parts = delta(mixed, b, a, terms, starts), [x[:170].split(lengths) for x in (mixed, b, a)]
    expected = torch.cat([sequence_reference(*mine, terms) for mine in zip(*parts)])
    # The exponentials differ in the last place.
    assert (out[:170] - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_values_are_those_of_transformers():
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    lengths, shape = [200], (2, 4, 32, 48)
    *rows, terms = drawn(lengths, shape)
    mixed, b, a = (x[:200] for x in rows)
    x = F.silu(F.conv1d(F.pad(mixed.T, (3, 0))[None], terms.conv[:, None], groups=mixed.shape[1])[0].T)
    q, k, v = (each.unflatten(1, (heads, -1))[None] for each, heads in zip(x.split((64, 64, 192), 1), (2, 2, 4)))
    decay = -terms.log_rates.exp() * F.softplus(a + terms.step_bias)
    theirs, _ = modeling.torch_chunk_gated_delta_rule(
        q, k, v, decay[None], b.sigmoid()[None], use_qk_l2norm_in_kernel=True
    )
    out = delta(mixed, b, a, terms, starts_of(lengths))
    # Both are float32, and theirs inverts the system that ours solves.
    assert (out - theirs[0]).abs().max() <= 5e-5 * theirs.abs().max()


class Paged:
    """Sequences in a cache that is filled with NaN: whatever of it were used would show."""

    def __init__(
        self, inputs: tuple[Tensor, Tensor, Tensor, DeltaTerms], lengths: list[int], drafts: int, random: Random
    ):
        self.mixed, self.b, self.a, self.terms = inputs
        self.lengths, self.random, self.drafts = lengths, random, drafts
        self.starts = starts_of(lengths).tolist()
        count, terms = len(lengths), self.terms
        sizes = DeltaSizes(2, terms.key_heads, terms.value_heads, terms.key_dim, terms.value_dim, terms.conv.shape[1])
        self.cache = DeltaCache(sizes, 2 * count, count + 2, self.mixed.dtype, drafts=drafts)
        for tensor in (*self.cache.layer(0), *self.cache.layer(1)):
            tensor.fill_(torch.nan)
        self.free = random.sample(range(2 * count), 2 * count)
        self.slots = random.sample(range(count + 2), count)
        self.reads, self.done = [NO_STATE] * count, [0] * count

    def unfinished(self) -> list[int]:
        return [i for i, done in enumerate(self.done) if done < self.lengths[i]]

    def step(self, counts: dict[int, int], wrong: dict[int, int]) -> tuple[Tensor, Tensor]:
        """Computes the next rows of some sequences, and after them wrong drafts, which are no numbers and are then
        forgotten. Returns the outputs, and which of all rows they are, -1 for the others."""
        rows, contexts, writes, lengths = [], [], [], []
        for i, count in counts.items():
            first = self.starts[i] + self.done[i]
            rows += [*range(first, first + count), *[-1] * wrong.get(i, 0)]
            lengths.append(count + wrong.get(i, 0))
            contexts.append(self.done[i] + lengths[-1])
            writes.append(self.free.pop() if contexts[-1] // CHUNK > self.done[i] // CHUNK else NO_STATE)
        rows += [-1] * self.random.choice([0, PADDING])
        chosen = torch.tensor(rows)
        mixed, b, a = (
            torch.where(chosen[:, None] < 0, torch.nan, x[chosen]).to(x.dtype) for x in (self.mixed, self.b, self.a)
        )
        slots, reads = ([places[i] for i in counts] for places in (self.slots, self.reads))
        integers = (torch.tensor(each, dtype=torch.int32) for each in (slots, reads, writes))
        step, contexts_ = DeltaStep(self.cache, *integers), torch.tensor(contexts, dtype=torch.int32)
        out = paged_delta(mixed, b, a, self.terms, 1, step, starts_of(lengths), contexts_)
        for (i, count), write in zip(counts.items(), writes):
            crossed = (self.done[i] + count) // CHUNK > self.done[i] // CHUNK
            self.done[i] += count
            if write != NO_STATE:
                freed = self.reads[i] if crossed else write
                self.free += [freed] if freed != NO_STATE else []
                self.reads[i] = write if crossed else self.reads[i]
        assert not out[sum(lengths) :].any(), "padding"
        return out[: sum(lengths)], chosen[: sum(lengths)]


def assert_pieces_agree(
    inputs: tuple[Tensor, Tensor, Tensor, DeltaTerms], lengths: list[int], drafts: int, random: Random
) -> None:
    expected = delta(*inputs, starts_of(lengths))
    paged = Paged(inputs, lengths, drafts, random)
    while unfinished := paged.unfinished():
        chosen = random.sample(unfinished, random.randint(1, len(unfinished)))
        pieces = [1, 1, 5, drafts] if drafts else [1, 1, 5, 16, 64, 150]
        counts = {i: min(max(1, random.choice(pieces)), lengths[i] - paged.done[i]) for i in chosen}
        out, rows = paged.step(counts, {i: random.randint(0, drafts) for i in chosen} if drafts else {})
        assert torch.equal(out[rows >= 0], expected[rows[rows >= 0]])
        if random.random() < 0.2:
            moved = random.choice(chosen)
            target = next(slot for slot in range(len(lengths) + 2) if slot not in paged.slots)
            paged.cache.copy_slots([(paged.slots[moved], target)])
            paged.slots[moved] = target


@settings(max_examples=10, phases=[Phase.generate])  # to shrink would take minutes
@given(
    dtype=st.sampled_from([FLOAT, HALF]),
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=3),
    shape=st.sampled_from(SHAPES),
    decays=st.sampled_from([*DECAYS]),
    strength=st.sampled_from([2.0, 30.0]),
    drafts=st.sampled_from([0, 0, 9]),
    random=st.randoms(use_true_random=False),
)
def test_a_row_has_the_same_bits_however_sequences_are_cut_ordered_and_drafted(
    dtype, lengths, shape, decays, strength, drafts, random
):
    assert_pieces_agree(drawn(lengths, shape, dtype, decays, strength), lengths, drafts, random)


@pytest.mark.parametrize("first", [60, 63, 64])
def test_a_step_that_crossed_a_boundary_in_vain_leaves_no_trace(first):
    """Of every number of accepted rows, up to and beyond the boundary."""
    inputs = drawn([140], SHAPES[0])
    expected = delta(*inputs, starts_of([140]))
    for accepted in range(1, 7):
        paged = Paged(inputs, [140], 8, Random(0))
        paged.step({0: first}, {})
        for count, wrong in ((accepted, 8 - accepted), (1, 8), (30, 2), (1, 0)):
            out, rows = paged.step({0: count}, {0: wrong})
            assert torch.equal(out[rows >= 0], expected[rows[rows >= 0]]), (accepted, count)


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_sequences_continue_from_a_shared_state_in_slots_of_their_own(dtype):
    inputs = drawn([150], SHAPES[2], dtype)
    expected = delta(*inputs, starts_of([150]))
    paged = Paged(inputs, [150], 0, Random(0))
    paged.step({0: 128}, {})
    for slot, counts in ((0, (1, 1, 1, 1, 5)), (1, (2, 20)), (2, (22,))):
        paged.slots, paged.done = [slot], [128]
        for count in counts:
            out, rows = paged.step({0: count}, {})
            assert torch.equal(out, expected[rows]), (slot, count)


@pytest.mark.parametrize(("broken", "dtype"), [(torch.nan, FLOAT), (torch.inf, FLOAT), (torch.nan, HALF)])
@pytest.mark.parametrize("part", ["query", "key", "value", "strength", "decay"])
def test_a_broken_row_breaks_those_that_see_it_and_changes_no_bit_of_others(broken, dtype, part):
    lengths, at, shape = [70, 140, 5], 70 + 68, (2, 4, 16, 32)
    inputs = drawn(lengths, shape, dtype)
    expected = delta(*inputs, starts_of(lengths))
    mixed, b, a, _ = inputs
    if part in ("query", "key", "value"):
        mixed[at, {"query": 17, "key": 49, "value": 64 + 2 * 32 + 5}[part]] = broken  # of the second head of keys
    else:
        (b if part == "strength" else a)[at, 2] = broken
    out = delta(*inputs, starts_of(lengths))
    others = torch.ones(len(mixed), 4, dtype=torch.bool)
    others[at:210, 2:] = False
    assert torch.equal(out[others], expected[others])
    # A strength of e^inf is 1, a decay of e^-inf forgets all.
    assert part in ("strength", "decay") or not out[at : at + 3].isfinite().all()


def test_a_sequence_has_the_same_bits_and_gradients_in_any_company_and_number_of_threads(threads):
    lengths, shape = [150, 3, 64, 90], (2, 4, 24, 32)
    leaves, terms = with_leaves(*drawn(lengths, shape, HALF))
    grad = torch.randn(sum(lengths) + PADDING, 4, 32, generator=torch.Generator().manual_seed(3)).to(HALF)
    everything = []
    for count in (1, 3):
        threads(count)
        out = delta(*leaves[:3], terms, starts_of(lengths))
        everything.append([out, *torch.autograd.grad(out, leaves, grad)])
    assert all(map(torch.equal, *everything))
    out, *grads = everything[0]
    sums = [torch.zeros(x.shape) for x in leaves[3:]]
    for start, length in zip(starts_of(lengths).tolist(), lengths):
        rows = slice(start, start + length)
        own = [x.detach()[rows].requires_grad_() for x in leaves[:3]]
        alone = delta(*own, terms, starts_of([length]))
        assert torch.equal(alone, out[rows])
        mine = torch.autograd.grad(alone, [*own, *leaves[3:]], grad[rows])
        assert all(torch.equal(one, all_[rows]) for one, all_ in zip(mine[:3], grads))
        for total, part in zip(sums, mine[3:]):
            total += part
    for total, part in zip(sums, grads[3:]):  # each share is rounded to bfloat16 here
        assert (total - part).abs().max() <= 2e-2 * part.abs().max()


def test_a_recorded_step_has_the_bits_of_a_direct_one_in_other_places(form):
    if form == "pytorch":
        pytest.skip("the plain form reads places on the host")
    inputs = drawn([140, 140, 70], SHAPES[0])
    mixed, b, a, terms = inputs
    assert has_kernels(mixed, b, a, terms)
    expected = delta(*inputs, starts_of([140, 140, 70]))
    paged = Paged(inputs, [140, 140, 70], 0, Random(0))
    paged.step({0: 62, 1: 63, 2: 40}, {})
    rows, contexts = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    slots, reads, writes = (torch.zeros(2, dtype=torch.int32) for _ in range(3))
    step, starts = DeltaStep(paged.cache, slots, reads, writes), starts_of([1, 1])
    before = [x.clone() for x in paged.cache.layer(1)]

    def compute():
        return (paged_delta(mixed[rows], b[rows], a[rows], terms, 1, step, starts, contexts),)

    contexts.fill_(1)
    reads.fill_(NO_STATE)
    slots.copy_(torch.tensor([0, 1]))
    graph = ops.StepGraph(compute, Arena())
    for tensor, value in zip(paged.cache.layer(1), before):
        tensor.copy_(value)
    for pair in ((0, 1), (2, 0), (1, 0), (0, 2)):
        first = [paged.starts[i] + paged.done[i] for i in pair]
        rows.copy_(torch.tensor(first))
        contexts.copy_(torch.tensor([paged.done[i] + 1 for i in pair]))
        slots.copy_(torch.tensor([paged.slots[i] for i in pair]))
        reads.copy_(torch.tensor([paged.reads[i] for i in pair]))
        own = [paged.free.pop() if (paged.done[i] + 1) % CHUNK == 0 else NO_STATE for i in pair]
        writes.copy_(torch.tensor(own))
        assert torch.equal(graph.replay()[0], expected[first])
        for i, write in zip(pair, own):
            paged.done[i] += 1
            paged.reads[i] = paged.reads[i] if write == NO_STATE else write


def test_the_form_for_gradients_is_the_plain_one():
    mixed, b, a, terms = drawn([130], SHAPES[0])
    expected = sequence_reference(mixed, b, a, terms)
    # The system is solved by a library.
    assert (differentiable(mixed, b, a, terms) - expected).abs().max() <= 2e-5 * expected.abs().max()
