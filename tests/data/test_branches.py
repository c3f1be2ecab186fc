"""Documents of several sequences that begin alike: in rows each is whole, and what they share is there once."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lockstep
from lockstep.data import Row, Rows, open_token_folder, write_token_folder
from lockstep.data.corpus import TokenizedCorpus, collect
from lockstep.data.encode import Branch, Encoded
from lockstep.data.records import Tally
from lockstep.data.tokenizer import ByteTokenizer
from lockstep.errors import UserError
from lockstep.model import preset
from lockstep.train.packing import pack, pack_rows, target_log_prob_sum, target_log_probs

DOCUMENTS = st.lists(
    st.tuples(st.integers(2, 12), st.lists(st.tuples(st.integers(0, 11), st.integers(2, 9)), max_size=4)),
    min_size=1,
    max_size=6,
)
"""Of each document the length of its first sequence, and what further ones share and add."""


def _encoded(documents, vocabulary=2**16):
    """Documents of tokens that are all different unless shared; every token from the second own one on is scored."""
    number = 1
    for lead, others in documents:
        branches, scored = [], [False] + [True] * (lead - 1)
        for shared, added in sorted(((min(shared, lead), added) for shared, added in others), reverse=True):
            branches.append(Branch(len(scored), shared))
            scored += [False] + [True] * (added - 1)
        tokens = (np.arange(number, number + len(scored)) % vocabulary).astype(np.uint16)
        number += len(scored)
        yield Encoded(tokens, np.array(scored), branches=branches)


def _corpus(documents, vocabulary=2**16):
    return collect(_encoded(documents, vocabulary), Tally, np.uint16)


def _complete(tokens, lengths, shared, scored):
    """Each sequence of a row, with what it shares, and which of its tokens are scored."""
    lead, place = (), 0
    for length, left_out in zip(lengths, shared or [0] * len(lengths)):
        own = (*lead[:left_out], *tokens[place : place + length])
        lead = lead if left_out else own
        yield own, (*[False] * left_out, *scored[place : place + length])
        place += length


def _of_document(encoded):
    edges = [0, *(branch.start for branch in encoded.branches), len(encoded.tokens)]
    lengths = np.diff(edges).tolist()
    return _complete(
        encoded.tokens.tolist(), lengths, [0, *(b.shared for b in encoded.branches)], encoded.scored.tolist()
    )


@settings(max_examples=60, deadline=None)
@given(documents=DOCUMENTS, length=st.integers(4, 60), seed=st.integers(0, 3))
def test_every_sequence_that_fits_is_whole_and_every_target_is_there_once(documents, length, seed):
    rows = Rows(_corpus(documents), length, seed, "whole", repeat=False)
    found, targets = {}, []
    while not rows.ended:
        pieces = rows.plan()
        row = rows.read(pieces)
        assert sum(row.lengths) == length and sum(piece.size for piece in pieces) == length - row.padding
        assert rows.targets(pieces) == row.scored.sum()
        for tokens, scored in _complete(row.tokens.tolist(), row.lengths, row.shared, row.scored.tolist()):
            predicted = [(tokens[:place], tokens[place]) for place in np.flatnonzero(scored)]
            targets += [token for _, token in predicted]
            found |= {token: before for before, token in predicted}
    expected = {}
    for encoded in _encoded(documents):
        for tokens, scored in _of_document(encoded):
            if len(tokens) <= length:
                expected |= {tokens[place]: tokens[:place] for place in np.flatnonzero(scored)}
    assert expected.items() <= found.items() and len(targets) == len(set(targets))
    too_long = sum(any(len(tokens) > length for tokens, _ in _of_document(one)) for one in _encoded(documents))
    assert rows.counts["cut_documents"] == too_long


@settings(max_examples=12, deadline=None)
@given(documents=DOCUMENTS, length=st.integers(24, 60))
def test_a_row_has_the_bits_of_its_complete_sequences(model, documents, length):
    rows = Rows(_corpus(documents, vocabulary=250), length, 0, "whole", repeat=False)
    row = rows.read(rows.plan())
    packed = pack_rows([row])
    with torch.no_grad():
        shared, _ = target_log_probs(model, packed)
    expected = []
    for tokens, scored in _complete(row.tokens.tolist(), row.lengths, row.shared, row.scored.tolist()):
        if any(scored):
            alone = pack([tokens])
            with torch.no_grad():
                values, _ = target_log_probs(model, alone)
            expected.append(values[torch.tensor(scored[1:])])
    assert torch.equal(shared, torch.cat(expected))


@pytest.fixture(scope="module")
def model():
    return lockstep.build_model(preset("qwen3:micro"), dtype="float32", seed=0)


def test_the_gradient_is_that_of_complete_sequences(model):
    documents = [(9, [(7, 4), (5, 6), (0, 3)]), (6, [(6, 3)])]
    rows = Rows(_corpus(documents, vocabulary=250), 64, 0, "whole", repeat=False)
    row = rows.read(rows.plan())
    assert row.shared is not None
    target_log_prob_sum(model, pack_rows([row]), 1.0).backward()
    ours = {name: value.grad.clone() for name, value in model.named_parameters()}
    model.zero_grad()
    for tokens, scored in _complete(row.tokens.tolist(), row.lengths, row.shared, row.scored.tolist()):
        if any(scored):
            values, _ = target_log_probs(model, pack([tokens]))
            values[torch.tensor(scored[1:])].sum().backward()
    for name, value in model.named_parameters():
        # Both sum the same terms in float32, in different orders.
        torch.testing.assert_close(ours[name], value.grad, rtol=1e-4, atol=1e-5)
    model.zero_grad()


def test_a_shared_token_counts_for_every_sequence_that_has_it():
    row = Row(np.arange(8), [4, 1, 3], np.array([0, 1, 1, 1, 0, 0, 1, 1], bool), 0, [0, 2, 2])
    packed = pack_rows([row, row])
    assert packed.counts.tolist()[:16] == 2 * [3, 3, 1, 1, 1, 1, 1, 1]
    assert packed.positions.tolist()[:16] == 2 * [0, 1, 2, 3, 2, 2, 3, 4]
    assert packed.lengths == 2 * [4, 3, 5] and packed.left_out == 2 * [0, 2, 2]


def test_a_folder_of_tokens_keeps_the_branches_and_refuses_damaged_ones(tmp_path):
    documents = [(9, [(7, 4), (5, 6)]), (3, []), (6, [(6, 3)])]
    (tmp_path / "lines").write_text("\n" * 3)

    class Source:
        data, skip_bad_lines, tally, files, streamed = "lines", False, Tally(), [tmp_path / "lines"], False

        def read(self, skip=0):
            return iter(documents)

        def describe(self):
            return {}

    class Encoder:
        tokenizer = ByteTokenizer()

        def encode(self, batch):
            return list(_encoded(batch, vocabulary=250))

        def describe(self):
            return {}

        def weight(self, item):
            return 1

    write_token_folder(tmp_path / "tokens", Source(), Encoder())
    opened, expected = open_token_folder(tmp_path / "tokens"), _corpus(documents, 250)
    assert np.array_equal(opened.branches, expected.branches)
    assert opened.apart() == {"answers_apart": 3, "tokens_apart": 13}
    assert opened.fingerprint() == expected.fingerprint()
    other = TokenizedCorpus(expected.tokens, expected.offsets, expected.scored, expected.branches - [0, 1])
    assert other.fingerprint() != expected.fingerprint(), "a resumed run would not notice"
    for place, value in ((0, 40), (1, 10), (2, 0), (4, 10)):
        damaged = expected.branches.copy()
        damaged.reshape(-1)[place] = value
        damaged.tofile(tmp_path / "tokens" / "branches.bin")
        with pytest.raises(UserError, match=r"branches\.bin: these are not branches"):
            open_token_folder(tmp_path / "tokens")


@pytest.mark.parametrize("settings", [{"packing": "cut"}, {"packing": "whole", "separate": False}])
def test_rows_that_would_tear_sequences_apart_are_refused(settings):
    with pytest.raises(UserError, match="--turns whole"):
        Rows(_corpus([(9, [(7, 4)])]), 32, 0, **settings)
