"""Tokenizers: text survives the way there and back, also piece by piece."""

import json
from functools import partial
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    StreamDecoder,
    TextEncoder,
    Tokenizer,
    continuation,
    decoding_context,
    load_tokenizer,
)
from lockstep.data.chat import load_chat_template
from lockstep.data.decoding import token_bytes, token_text
from lockstep.data.text import TextPart
from lockstep.errors import UserError

TEXT = "naïve 日本語 🙂🙃 def f(x):\n\treturn x + 1\n"


def test_the_end_of_text_in_a_text_is_its_token_for_bytes_too():
    tokenizer, text = ByteTokenizer(), "é<|endoftext|><|endoftext|>b<|endoftext|"
    ids, spans = tokenizer.encode_with_spans(text)
    assert ids == tokenizer.encode(text) == [*"é".encode(), 256, 256, *b"b<|endoftext|"]
    (encoded,) = TextEncoder(tokenizer).encode([TextPart(text, True)])
    assert encoded.tokens.tolist() == [*ids, 256] and len(spans) == len(ids)
    assert spans[:5] == [(0, 1), (0, 1), (1, 14), (14, 27), (27, 28)] and spans[-1][1] == len(text)


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


def stream(tokenizer, ids, prompt=()):
    decoder = StreamDecoder(tokenizer, decoding_context(tokenizer, prompt))
    return "".join([decoder.push(i) for i in ids]) + decoder.finish()


@settings(max_examples=50)
@given(ids=st.lists(st.integers(0, 511), max_size=60))
def test_a_stream_of_any_tokens_is_their_text(bpe_tokenizer, ids):
    assert stream(bpe_tokenizer, ids) == bpe_tokenizer.decode(ids)


def test_tokens_that_never_become_a_character_are_neither_held_back_nor_lost(bpe_tokenizer):
    first_byte = bpe_tokenizer.encode("é")[0]
    decoder = StreamDecoder(bpe_tokenizer)
    early = "".join([decoder.push(first_byte) for _ in range(200)])
    assert len(early) > 150 and early + decoder.finish() == bpe_tokenizer.decode([first_byte] * 200)


@pytest.fixture(scope="module")
def byte_fallback_folder(tmp_path_factory):
    """A tokenizer in SentencePiece's way: "▁" for spaces, the text's first one stripped, bytes as tokens <0x..>."""
    from tokenizers import AddedToken, decoders, models
    from tokenizers import Tokenizer as Backend

    vocab = {"<unk>": 0, "▁": 1, "▁world": 2, "▁hello": 3, **{f"<0x{i:02X}>": 4 + i for i in range(256)}}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    folder = tmp_path_factory.mktemp("byte_fallback")
    backend.save(str(folder / "tokenizer.json"))
    return folder


@settings(max_examples=80)
@given(
    words=st.lists(st.sampled_from(["<s>", "▁", "▁world", "▁hello", *"éx日🙂"]), min_size=1, max_size=12),
    begun=st.integers(1, 12),
)
def test_what_continues_a_text_is_all_that_the_whole_has_more(byte_fallback_folder, words, begun):
    tokenizer = HuggingFaceTokenizer(byte_fallback_folder / "tokenizer.json")
    names = tokenizer.vocabulary()
    pieces = [[names[word]] if word in names else [4 + byte for byte in word.encode()] for word in words]
    prompt, tokens = list(chain(*pieces[:begun])), list(chain(*pieces[begun:]))
    added = continuation(tokenizer, prompt, tokens)
    assert tokenizer.decode(prompt) + added == tokenizer.decode(prompt + tokens)
    assert stream(tokenizer, tokens, prompt) == added


@pytest.mark.parametrize("special", [8, 33])
def test_special_tokens_do_not_come_between_a_text_and_what_continues_it(byte_fallback_folder, special):
    tokenizer = HuggingFaceTokenizer(byte_fallback_folder / "tokenizer.json")
    hello, world, begins = (tokenizer.vocabulary()[name] for name in ("▁hello", "▁world", "<s>"))
    between = [begins] * special
    assert continuation(tokenizer, [hello, *between], [world]) == " world"
    assert stream(tokenizer, [*between, world], [hello]) == " world"
    assert stream(tokenizer, [hello, *between, world]) == tokenizer.decode([hello, *between, world]) == "hello world"
    assert stream(tokenizer, [4 + 0xC3, *between, 4 + 0xA9], [hello]) == "é"


def test_a_token_is_named_and_its_bytes_told_as_within_a_text(bpe_tokenizer, byte_fallback_folder):
    tokenizer = HuggingFaceTokenizer(byte_fallback_folder / "tokenizer.json")
    names = tokenizer.vocabulary()
    assert [token_text(tokenizer, names[name]) for name in ("▁world", "▁", "<0xC3>", "<s>")] == [" world", " ", "", ""]
    assert [token_bytes(tokenizer, names[name]) for name in ("▁", "<0xC3>", "<s>")] == [b" ", b"\xc3", None]
    ids = bpe_tokenizer.encode(TEXT)
    assert b"".join(map(partial(token_bytes, bpe_tokenizer), ids)) == TEXT.encode()
    assert token_bytes(bpe_tokenizer, bpe_tokenizer.eos_id) is token_bytes(ByteTokenizer(), 257) is None
    assert token_bytes(ByteTokenizer(), 0xC3) == b"\xc3"


@pytest.mark.parametrize(
    ("files", "eos", "bos"),
    [
        ({}, None, None),
        ({"config": {"eos_token_id": 261, "bos_token_id": 260}}, 261, 260),
        ({"generation_config": {"eos_token_id": [261, 5]}, "config": {"eos_token_id": 7}}, 261, None),
        ({"special_tokens_map": {"eos_token": {"content": "</s>"}}, "config": {"eos_token_id": 7}}, 261, None),
        ({"tokenizer_config": {"eos_token": "</s>", "bos_token": "<s>"}}, 261, 260),
        ({"tokenizer_config": {"eos_token": None, "bos_token": None}, "config": {"eos_token_id": 7}}, 7, None),
        ({"config": {"eos_token_id": 99999}}, None, None),
    ],
)
def test_the_ends_of_a_text_come_from_the_folders_settings(byte_fallback_folder, tmp_path, files, eos, bos):
    (tmp_path / "tokenizer.json").write_text((byte_fallback_folder / "tokenizer.json").read_text())
    for name, values in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, Tokenizer)
    assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.vocab_size) == (eos, bos, 262)
    tokenizer.save(tmp_path / "again")
    again = load_tokenizer(tmp_path / "again")
    assert (again.eos_id, again.bos_id) == (eos, bos)


def test_the_vocabulary_reaches_to_the_largest_id(bpe_tokenizer, tmp_path):
    bpe_tokenizer.save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["vocab"][max(content["model"]["vocab"], key=content["model"]["vocab"].get)] = 900
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(tmp_path).vocab_size == 901
    with pytest.raises(UserError, match="the tokenizer has 901 tokens, but the model only 512"):
        load_tokenizer(tmp_path, 512)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", '{"eos_token": "<gone>"}', "eos_token '<gone>' is not in tokenizer"),
        ("tokenizer_config.json", "{oops", "not (valid JSON|a JSON object)"),
        ("tokenizer_config.json", "[1]", "(is a list, )?not a JSON object"),
        ("tokenizer_config.json", '{"a":' + "[" * 100_000 + "]" * 100_000 + "}", "not (valid JSON|a JSON object)"),
        ("tokenizer_config.json", 2**30, "has 1073741824 bytes, more than 67108864; fix it"),
        ("chat_template.jinja", 2**30, "has 1073741824 bytes, more than 67108864; fix it"),
        ("chat_template.jinja", b"{}\xff", "is not UTF-8"),
        ("special_tokens_map.json", b"{}\xff", "(is not UTF-8|not valid JSON)"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_files_beside_the_tokenizer_that_cannot_be_read_are_named(bpe_tokenizer, tmp_path, name, content, message):
    of_bytes = name == "tokenizer_config.json"  # which the byte tokenizer does not read
    for number, tokenizer in enumerate([bpe_tokenizer] if of_bytes else [ByteTokenizer(), bpe_tokenizer]):
        tokenizer.save(folder := tmp_path / str(number))
        with (folder / name).open("wb") as file:
            if isinstance(content, int):
                file.truncate(content)
            else:
                file.write(content if isinstance(content, bytes) else content.encode())
        for load in [load_tokenizer] if "gone" in message else [load_tokenizer, load_chat_template]:
            with pytest.raises(UserError, match=rf"{name}: {message}"):
                load(folder)


def _changed(bpe_tokenizer, folder, **values):
    bpe_tokenizer.save(folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


MERGES = {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}


def test_a_folder_without_a_tokenizer_or_with_one_on_which_the_library_fails_is_refused(bpe_tokenizer, tmp_path):
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    for values in (
        {"model": {"type": "BPE", "continuing_subword_prefix": "####", **MERGES}},  # it panics when it is read
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},  # or at the first text
        {"model": None},
    ):
        with pytest.raises(UserError, match=r"tokenizer\.json: cannot be read as a tokenizer .*save it again"):
            load_tokenizer(_changed(bpe_tokenizer, tmp_path, **values))


def test_a_text_on_which_the_library_fails_is_a_users_error(bpe_tokenizer, tmp_path):
    slow = {"type": "Replace", "pattern": {"Regex": "(a|aa)+$"}, "content": "x"}
    tokenizer = load_tokenizer(_changed(bpe_tokenizer, tmp_path, normalizer=slow))
    assert tokenizer.encode("words") == bpe_tokenizer.encode("words")
    text = "a" * 40 + "b"
    for encode in (tokenizer.encode, tokenizer.encode_with_spans, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(UserError, match="the tokenizer fails on this text"):
            encode(text)


def test_a_chat_template_of_a_wrong_shape_is_refused(tmp_path):
    for value in (5, True, {"a": 1}, [5], [{"name": "default"}], [{"name": "default", "template": 7}]):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
        with pytest.raises(UserError, match="chat_template is a .*next to it"):
            load_chat_template(tmp_path)


def test_a_tokenizer_that_was_trained_here_is_the_same_to_transformers_beside_any_familys_model(model_folder):
    """Qwen's own class, which transformers takes where none is named, would cut numbers into digits."""
    from transformers import AutoTokenizer

    text = "follows 16 of 2024"
    assert AutoTokenizer.from_pretrained(model_folder).encode(text) == load_tokenizer(model_folder).encode(text)
