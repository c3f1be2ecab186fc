"""The loader: every token once an epoch, one global stream for any number of ranks, resumed to the token."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lockstep.data import ByteTokenizer, RowLoader, Rows, TokenizedCorpus, tokenize_documents
from lockstep.errors import UserError

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12)
PACKING = st.sampled_from(["cut", "whole"])
searched = settings(max_examples=40)


def _corpus(lengths, scored=None):
    """Documents of these lengths whose tokens are all different; scored: the places of those that are."""
    size = sum(lengths)
    mask = None if scored is None else np.isin(np.arange(size), scored)
    return TokenizedCorpus(np.arange(1, size + 1), np.array([0, *lengths]).cumsum(), mask)


def _rows(corpus, length, **changes):
    return Rows(corpus, length, **({"seed": 0} | changes))


@searched
@given(lengths=LENGTHS, length=st.integers(2, 20), packing=PACKING, seed=st.integers(0, 5))
def test_an_epoch_gives_every_token_once(lengths, length, packing, seed):
    assume(max(lengths) >= 2)
    rows = _rows(_corpus(lengths), length, packing=packing, seed=seed, repeat=False)
    seen, ends = [], np.array(lengths).cumsum()
    while not rows.ended:
        pieces = rows.plan()
        row = rows.read(pieces)
        assert len(row.tokens) == length == sum(row.lengths)
        seen += row.tokens[row.tokens > 0].tolist()
        for piece in pieces if packing == "whole" else ():
            size = lengths[int(np.searchsorted(ends, piece.start, side="right"))]
            assert piece.stop - piece.start == size or size > length, "only a document longer than a row is cut"
    assert sorted(seen) == list(range(1, sum(lengths) + 1))
    if packing == "cut":  # concatenated: every row but the last is full
        documents = itertools.groupby(seen, key=lambda t: int(np.searchsorted(ends, t)))
        assert len(list(documents)) == len(lengths)
    else:
        assert rows.counts["cut_documents"] == sum(n > length for n in lengths)


@searched
@given(lengths=LENGTHS, length=st.integers(2, 20), every=st.sampled_from([3, 40]), packing=PACKING)
def test_of_conversations_kept_whole_what_has_no_target_is_left_out_and_nothing_else(lengths, length, every, packing):
    corpus = _corpus(lengths, range(every - 1, sum(lengths), every))
    assume(max(lengths) >= 2 and corpus.scored.any())
    expected, optional = [], set()
    for start, stop in itertools.pairwise(corpus.offsets.tolist()):
        for begin in range(start, stop, length):
            piece = range(begin, min(stop, begin + length))
            if packing == "cut" or corpus.scored[piece[1:]].any():
                expected += piece
            elif stop - start <= length:
                optional |= {*piece}  # harmless within a row that has a target
    if not expected:
        said = "none has a target" if max(lengths) > length else "no conversation has a target"
        with pytest.raises(UserError, match=said):
            _rows(corpus, length, packing=packing, repeat=False)
        return
    rows = _rows(corpus, length, packing=packing, repeat=False)
    taken = []
    while not rows.ended:
        pieces = rows.plan()
        assert pieces and (packing == "cut" or rows.targets(pieces)), "a row without a piece or a target"
        taken += [token for piece in pieces for token in range(piece.start, piece.stop)]
    assert sorted(set(taken) - optional) == expected and len({*taken}) == len(taken)


def test_conversations_without_any_target_do_not_end_in_an_endless_search():
    for length, message in (
        (8, "longer than a row of 8 tokens, .* none has a target; give a larger"),
        (40, "no conversation has a target"),
    ):
        with pytest.raises(UserError, match=message):
            _rows(_corpus([30, 40], []), length, packing="whole", repeat=True)


@searched
@given(lengths=LENGTHS, length=st.integers(2, 20), packing=PACKING, scored=st.booleans(), separate=st.booleans())
def test_targets_are_the_scored_tokens_after_the_first_of_a_sequence(lengths, length, packing, scored, separate):
    assume(max(lengths) >= 2)
    corpus = _corpus(lengths, range(2, sum(lengths), 3) if scored else None)
    try:
        rows = _rows(corpus, length, packing=packing, separate=separate)
    except UserError:
        assume(False)
    for _ in range(10):
        plan = rows.plan()
        row = rows.read(plan)
        expected = (row.tokens > 0) & ((row.tokens % 3 == 0) | (not scored))
        expected[np.cumsum([0, *row.lengths[:-1]])] = False
        assert np.array_equal(row.scored, expected) and rows.targets(plan) == expected.sum()
        assert len(row.lengths) == 1 or separate


@searched
@given(
    lengths=LENGTHS, length=st.integers(2, 12), packing=PACKING, repeat=st.booleans(), taken=st.integers(0, 8),
    ranks=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])),
)  # fmt: skip
def test_the_stream_is_the_same_for_any_ranks_and_resumes_at_any_step_with_others(
    lengths, length, packing, repeat, taken, ranks
):
    assume(max(lengths) >= 2)

    def loaders(count):
        streams = [_rows(_corpus(lengths), length, packing=packing, repeat=repeat) for _ in range(count)]
        return [RowLoader(rows, 4 * length, length, rank, count) for rank, rows in enumerate(streams)]

    (alone,) = loaders(1)
    steps = [alone.next() for _ in range(12) if not alone.ended]
    before, after = (loaders(count) for count in ranks)
    parts = [[loader.next() for loader in before] for _ in steps[:taken]]
    states = [json.dumps(loader.state()) for loader in before]
    assert len(set(states)) == 1, "every rank knows the whole position"
    for loader in after:
        loader.restore(json.loads(states[0]))
    parts += [[loader.next() for loader in after] for _ in steps[taken:]]
    for whole, shares in zip(steps, parts, strict=True):
        # Micro-batches in turn: the first of every rank, the second of every rank.
        in_turn = [rows for of_ranks in zip(*(s.microbatches for s in shares), strict=True) for rows in of_ranks]
        expected = [row.tokens.tolist() for rows in whole.microbatches for row in rows]
        assert [row.tokens.tolist() for rows in in_turn for row in rows] == expected
        assert {(s.tokens, s.targets) for s in shares} == {(whole.tokens, whole.targets)}
        assert sum(int(r.scored.sum()) for s in shares for rows in s.microbatches for r in rows) == whole.targets


def test_data_that_is_not_repeated_ends_with_a_step_filled_with_padding():
    loader = RowLoader(_rows(_corpus([7]), 4, repeat=False), 16, 16)
    step = loader.next()
    assert step.tokens == 7 and step.targets == 5 and step.capacity == 16 and loader.ended
    assert [row.lengths for row in step.microbatches[0]] == [[4], [3, 1], [4], [4]]
    with pytest.raises(StopIteration, match="has ended"):
        loader.next()


@pytest.mark.parametrize(
    ("per_step", "per_microbatch", "ranks", "message"),
    [
        (100, 64, 1, "tokens_per_step 100 .* sequence_length 8 for 1 .* 8 tokens in total; .* 96 or 104"),
        (24, 64, 2, "tokens_per_step 24 .* for 2 data-parallel ranks, 16 tokens in total; .* 16 or 32"),
        (4, 64, 1, "give tokens_per_step 8"),
        (48, 32, 1, "6 rows .* micro-batches of 4 rows .*; give train.tokens_per_microbatch 24"),
    ],
)
def test_a_step_that_does_not_divide_is_refused_with_the_numbers(per_step, per_microbatch, ranks, message):
    with pytest.raises(UserError, match=message):
        RowLoader(_rows(_corpus([9]), 8), per_step, per_microbatch, 0, ranks)


def test_the_state_of_other_data_or_of_a_place_that_there_is_not_is_refused():
    def rows(texts=("abcdefgh",) * 6, length=8, **changes):
        return _rows(tokenize_documents(texts, ByteTokenizer()), length, **changes)

    state = rows().state()
    for changes, message in (
        (dict(texts=["abcdefgh"] * 4), "documents: 6 when the run was saved, 4 now"),
        (dict(texts=["abcdefgh"] * 5 + ["abcdefgx"]), "contents: .* resume with the same data"),
        (dict(seed=1), "seed: 0 when the run was saved, 1 now"),
        (dict(length=4), "sequence_length: 8 when the run was saved, 4 now"),
        (dict(packing="whole"), "packing: cut when the run was saved, whole now"),
    ):
        with pytest.raises(UserError, match=message):
            rows(**changes).restore(state)
    for place in ({"index": 6}, {"index": -1}, {"offset": 10}, {"offset": -1}):
        with pytest.raises(
            UserError, match=r"token -?\d+ of document -?\d+ of window 0, where the run was saved, does"
        ):
            rows().restore(state | place)
    with pytest.raises(UserError, match="sequence_length is 1"):
        rows(length=1)
    with pytest.raises(UserError, match="no sequence of two tokens"):
        _rows(_corpus([1, 1]), 4)


@pytest.mark.parametrize("packing", ["cut", "whole"])
@pytest.mark.parametrize("epochs", [0.5, 1, 3])
def test_the_steps_of_some_epochs_are_counted_without_taking_any(packing, epochs):
    texts = ["ab" * (3 + i % 7) for i in range(50)]
    loader = RowLoader(Rows(tokenize_documents(texts, ByteTokenizer()), 32, seed=1, packing=packing), 64, 64)
    before = loader.state()
    steps = loader.steps_of(epochs)
    assert loader.state() == before
    seen = []
    while not seen or seen[-1] < epochs:
        loader.next()
        seen.append(loader.epoch)
    assert len(seen) == steps
    with pytest.raises(UserError, match="epochs is -1"):
        loader.steps_of(-1)
