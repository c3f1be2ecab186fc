"""Tokens equal those of transformers, for tokenizers of every make."""

import json
import random

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from lockstep.data import ByteTokenizer, load_tokenizer
from lockstep.errors import UserError
from lockstep.model import build_model, preset, save_model

TEXTS = ["def f(x):\n    return x + 1\n", "The naïve café is “open” 24/7.", "日本語のテキスト 🙂 Ελληνικά", "a b  c\td"]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "<|endoftext|>"]


def _byte_level(pre_tokenizer=None, special=(), added=()):
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(TEXTS * 3, trainer)
    backend.add_special_tokens(list(special))
    backend.add_tokens([AddedToken(name) if isinstance(name, str) else name for name in added])
    return backend


def byte_level():
    return _byte_level(), {}


def llama3():
    pieces = [pre_tokenizers.Split(Regex(LLAMA3), "isolated")]
    pieces += [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    backend = _byte_level(pre_tokenizers.Sequence(pieces), ["<|begin_of_text|>", "<|eot_id|>"])
    begin = ("<|begin_of_text|>", backend.token_to_id("<|begin_of_text|>"))
    template = processors.TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=[begin])
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return backend, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}


def qwen():
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend = _byte_level(None, special, [AddedToken("<think>", special=False, normalized=False)])
    backend.normalizer = normalizers.NFC()
    return backend, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def llama2_with_byte_fallback():
    letters = {c for text in TEXTS[:2] for c in text.replace(" ", "▁")}
    tokens, merges = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *sorted(letters)], []
    for word in ("▁The", "▁return", "▁f", "café"):
        for end in range(1, len(word)):
            merges.append((word[:end], word[end]))
            tokens.append(word[: end + 1])
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    backend = Tokenizer(models.BPE(vocab, list(dict.fromkeys(merges)), unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    # Named in the settings only, as older conversions have it.
    return backend, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def word_piece():
    backend, special = Tokenizer(models.WordPiece(unk_token="[UNK]")), ["[UNK]", "[CLS]", "[SEP]"]
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    backend.train_from_iterator(TEXTS * 3, trainer)
    backend.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return backend, {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "eos_token": "[SEP]"}


def unigram():
    backend, special = Tokenizer(models.Unigram()), ["<unk>", "<s>", "</s>"]
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    settings = dict(vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(TEXTS * 3, trainers.UnigramTrainer(**settings))
    return backend, {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}


def truncated_and_padded():
    backend, settings = qwen()
    backend.enable_truncation(max_length=8)
    backend.enable_padding(length=16, pad_token="<|endoftext|>", pad_id=backend.token_to_id("<|endoftext|>"))
    return backend, settings


def tokens_of_the_settings_only():
    backend = _byte_level()
    backend.normalizer = normalizers.Lowercase()
    size = backend.get_vocab_size()
    spaces = {"lstrip": True, "rstrip": True, "normalized": False, "single_word": False, "special": False}
    listed = {
        str(size + 1): {"content": "<|im_end|>", "special": True},
        str(size): {"content": "<|im_start|>", **spaces},
        str(size + 2): {"content": "<think>", "normalized": True, "single_word": True},
    }
    return backend, {"added_tokens_decoder": listed, "eos_token": "<|im_end|>"}


def tokens_that_the_settings_change():
    backend = _byte_level(added=["<think>", AddedToken("<|im_end|>", lstrip=True)])
    changes = {"<think>": {"lstrip": True, "rstrip": True}, "<|im_end|>": {"lstrip": False}}
    listed = {
        str(backend.token_to_id(name)): {"content": name, "special": True, **changed}
        for name, changed in changes.items()
    }
    return backend, {"added_tokens_decoder": listed, "eos_token": "<|im_end|>"}


def special_tokens_that_are_normalized():
    """As Llama 2's first conversions have them: the backend's own name of token 2 is then "▁</s>"."""
    backend, settings = llama2_with_byte_fallback()
    backend.add_special_tokens([AddedToken(name, normalized=True) for name in ("<unk>", "<s>", "</s>")])
    return backend, settings


def special_by_the_settings_alone():
    backend = _byte_level(added=["<|im_start|>", "<|im_end|>", "<think>"])
    return backend, {"eos_token": "<|im_end|>", "bos_token": {"__type": "AddedToken", "content": "<|im_start|>"}}


def special_tokens_with_options():
    backend, settings = llama2_with_byte_fallback()
    strips = {"__type": "AddedToken", "lstrip": True, "rstrip": True, "normalized": False}
    return backend, settings | {"eos_token": strips | {"content": "</s>"}}


def special_by_the_tokenizer_alone():
    backend = _byte_level(special=["<|im_end|>", "<think>"])
    listed = {str(backend.token_to_id("<think>")): {"content": "<think>", "special": False}}
    return backend, {"added_tokens_decoder": listed, "eos_token": "<|im_end|>"}


OLDER = {
    "special_tokens_map": {"eos_token": "</s>", "bos_token": {"content": "<s>", "lstrip": True}},
    "added_tokens": {"<think>": 0, "<|im_end|>": 1},
    "generation_config": {"eos_token_id": 2, "bos_token_id": 1},
    "tokenizer_config": {"split_special_tokens": True, "eos_token": "</s>", "image_token": "<s>"},
}
MAKES = [
    byte_level, llama3, qwen, llama2_with_byte_fallback, word_piece, unigram, truncated_and_padded,
    tokens_of_the_settings_only, tokens_that_the_settings_change, special_tokens_that_are_normalized,
    special_by_the_settings_alone, special_by_the_tokenizer_alone, special_tokens_with_options,
]  # fmt: skip


def _folder(path, backend, settings):
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(settings | {"clean_up_tokenization_spaces": False}))
    return path


def _strings(count):
    draw = random.Random(0)
    pieces = [*" \t\n\r.,'_▁Ġé日語🙂\u0301\u200d\xa0\0", "  ", "The", "return ", "café", "def", "123456", "I'LL"]
    pieces += [*SPECIAL, "[SEP]", "[UNK]", "<0x41>", "<|begin_of_text|>", "<|eot_id|>"]
    for _ in range(count):
        length = draw.randrange(16)
        yield "".join(draw.choice(pieces) if draw.random() < 0.8 else _character(draw) for _ in range(length))


def _character(draw):
    while 0xD800 <= (code := int(0x110000 ** draw.random())) < 0xE000:
        pass
    return chr(code)


@pytest.mark.parametrize("make", [*MAKES, *OLDER], ids=lambda make: make if isinstance(make, str) else make.__name__)
def test_tokens_and_texts_are_those_of_transformers(tmp_path, make):
    from transformers import PreTrainedTokenizerFast

    if make in OLDER:  # as older folders say it, in files of their own
        backend, _ = llama2_with_byte_fallback()
        folder, values = _folder(tmp_path, backend, {}), OLDER[make]
        if make == "added_tokens":
            values = {name: backend.get_vocab_size() + place for name, place in values.items()}
        (folder / f"{make}.json").write_text(json.dumps(values))
    else:
        folder = _folder(tmp_path, *make())
    ours, theirs = load_tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    texts = [*_strings(250), "<s> The </s> return<think> <|im_end|>"]
    expected = theirs(texts, add_special_tokens=False)["input_ids"]
    assert ours.encode_batch(texts) == expected
    assert [ours.encode(text) for text in texts[:50]] == [ours.encode_with_spans(text)[0] for text in texts[:50]]
    assert [ours.encode(text) for text in texts[:50]] == expected[:50]
    if make != "generation_config":  # which transformers' tokenizers do not read
        assert (ours.eos_id, ours.bos_id) == (theirs.eos_token_id, theirs.bos_token_id)
    assert [ours.decode(ids) for ids in expected[:100]] == theirs.batch_decode(expected[:100], skip_special_tokens=True)
    ours.save(tmp_path / "again")
    again = load_tokenizer(tmp_path / "again")
    assert again.encode_batch(texts) == expected
    assert [again.decode(ids) for ids in expected[:100]] == [ours.decode(ids) for ids in expected[:100]]
    assert (again.eos_id, again.bos_id, again.special_tokens()) == (ours.eos_id, ours.bos_id, ours.special_tokens())


def test_a_saved_byte_tokenizer_gives_the_same_tokens_in_transformers(tmp_path):
    from transformers import AutoTokenizer

    save_model(build_model(preset("qwen3:micro", 258, (256,))), tmp_path)
    ours = ByteTokenizer()
    ours.save(tmp_path)
    theirs, texts = AutoTokenizer.from_pretrained(tmp_path), [*_strings(500), "a<|endoftext|>b"]
    expected = theirs(texts)["input_ids"]
    assert ours.encode_batch(texts) == expected and isinstance(load_tokenizer(tmp_path), ByteTokenizer)
    assert theirs.eos_token_id == ours.eos_id and len(theirs) <= ours.vocab_size
    every_byte = [*range(256), 256]
    assert theirs.decode(every_byte, skip_special_tokens=True) == ours.decode(every_byte)


def test_added_tokens_whose_ids_are_not_theirs_are_refused(tmp_path):
    backend, settings = tokens_of_the_settings_only()
    settings["added_tokens_decoder"] = {"9000": {"content": "<far>"}}
    with pytest.raises(UserError, match=r"tokenizer_config\.json: .* lists '<far>' as token 9000, but .* it is token"):
        load_tokenizer(_folder(tmp_path, backend, settings))
    for listed in ([1], {"x": {}}, {"1": "text"}, {"1": {"content": 3}}):
        settings["added_tokens_decoder"] = listed
        with pytest.raises(UserError, match=r"tokenizer_config\.json: added_tokens_decoder is not a table"):
            load_tokenizer(_folder(tmp_path, backend, settings))
