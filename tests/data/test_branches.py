"""Documents of several sequences that begin alike: in rows each is whole, and what they share is there once."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lockstep
from lockstep.data import ConversationEncoder, ConversationSource, Rows, open_token_folder, write_token_folder
from lockstep.data.chat import ChatTemplate
from lockstep.data.corpus import TokenizedCorpus, collect
from lockstep.data.encode import Branch, Encoded
from lockstep.data.records import Tally
from lockstep.data.tokenizer import ByteTokenizer
from lockstep.errors import UserError
from lockstep.model import preset
from lockstep.train.packing import pack, pack_rows, target_log_probs

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


@settings(max_examples=40)
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


@settings(max_examples=12)
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


def test_a_folder_of_tokens_keeps_the_branches_and_refuses_damaged_ones(tmp_path):
    turn = "<{{ m.role }}>{% if loop.last %}{{ m.thinking }}{% endif %}{{ m.content }}"
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "thinking": "hm"}] * 3
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    source = ConversationSource(str(tmp_path / "talk.jsonl"))
    encoder = ConversationEncoder(ByteTokenizer(), ChatTemplate(f"{{% for m in messages %}}{turn}{{% endfor %}}", {}))
    write_token_folder(tmp_path / "tokens", source, encoder)
    opened = open_token_folder(tmp_path / "tokens")
    expected = collect(encoder.encode(list(source.read())), Tally, np.uint16)
    assert len(opened.branches) == 2 and np.array_equal(opened.branches, expected.branches)
    assert opened.apart()["answers_apart"] == 2 and opened.fingerprint() == expected.fingerprint()
    other = TokenizedCorpus(expected.tokens, expected.offsets, expected.scored, expected.branches - [0, 1])
    assert other.fingerprint() != expected.fingerprint(), "a resumed run would not notice"
    for place, value in ((0, 10_000), (1, 10_000), (2, 0)):
        damaged = expected.branches.copy()
        damaged.reshape(-1)[place] = value
        damaged.tofile(tmp_path / "tokens" / "branches.bin")
        with pytest.raises(UserError, match=r"branches\.bin: these are not branches"):
            open_token_folder(tmp_path / "tokens")


@pytest.mark.parametrize("settings", [{"packing": "cut"}, {"packing": "whole", "separate": False}])
def test_rows_that_would_tear_sequences_apart_are_refused(settings):
    with pytest.raises(UserError, match="--turns whole"):
        Rows(_corpus([(9, [(7, 4)])]), 32, 0, **settings)
