"""Tokenizers: text survives the way there and back, also piece by piece."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data import ByteTokenizer, StreamDecoder, load_tokenizer
from lockstep.errors import UserError

TEXT = "naïve 日本語 🙂🙃 def f(x):\n\treturn x + 1\n"


@settings(max_examples=50, deadline=None)
@given(text=st.text())
def test_bytes_survive(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([*tokenizer.encode(text), tokenizer.eos_id]) == text


def test_bpe_survives_and_is_loaded_as_it_was_saved(bpe_tokenizer, tmp_path):
    ids = bpe_tokenizer.encode(TEXT)
    assert bpe_tokenizer.decode([*ids, bpe_tokenizer.eos_id]) == TEXT and len(ids) < len(TEXT.encode())
    bpe_tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path, 512)
    assert loaded.encode(TEXT) == ids and loaded.eos_id == bpe_tokenizer.eos_id
    assert loaded.encode_batch([TEXT, "a"]) == [ids, loaded.encode("a")]
    ByteTokenizer().save(tmp_path / "bytes")
    assert isinstance(load_tokenizer(tmp_path / "bytes"), ByteTokenizer)


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_a_stream_never_shows_half_a_character(kind, bpe_tokenizer):
    tokenizer = ByteTokenizer() if kind == "byte" else bpe_tokenizer
    decoder = StreamDecoder(tokenizer)
    pieces = [decoder.push(t) for t in tokenizer.encode(TEXT)]
    assert "".join(pieces) + decoder.finish() == TEXT
    assert not any("�" in piece for piece in pieces)
    decoder = StreamDecoder(tokenizer)
    cut = tokenizer.encode("🙂")[:-1]
    assert "".join(decoder.push(t) for t in cut) == "" and "�" in decoder.finish()


def test_bad_tokenizers_are_refused(bpe_tokenizer, tmp_path):
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    bpe_tokenizer.save(tmp_path)
    with pytest.raises(UserError, match="the tokenizer has 512 tokens, but the model only 300"):
        load_tokenizer(tmp_path, 300)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be read as a tokenizer"):
        load_tokenizer(tmp_path)
