"""Tokenizers: bytes, or a Hugging Face `tokenizer.json`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.hub import local_folder

BYTE_FILE = "byte_tokenizer.json"
END_OF_TEXT = "<|endoftext|>"

CHAT_TEMPLATE_FILE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
"""The folder of named templates, such as `tool_use.jinja`."""
CARRIED_FILES = (CHAT_TEMPLATE_FILE, f"{MORE_TEMPLATES}/*.jinja", "special_tokens_map.json")
"""Files that belong to the tokenizer and are saved with it, so that other programs can chat with a checkpoint."""
TOKEN_OPTIONS = ("lstrip", "rstrip", "normalized", "single_word")

TRAINING_CHARACTERS = 2**30
"""Maximum characters that a vocabulary is trained on."""

PROBE = "A few words, a num8er,\n  and ä\U0001f600."
"""Text that every tokenizer encodes when it is loaded, to detect broken ones."""

LARGEST_TEXT = 2**26
"""Maximum bytes of a file that is read whole: settings, templates, a token folder's description."""

LONG = 4096
"""Tokens. More are decoded as a batch of one, during which other threads run: the library holds the GIL otherwise."""
FAILS = ("the tokenizer fails on this text or these tokens", "leave them out")


class ByteTokenizer:
    """UTF-8 bytes as tokens 0–255; 256 ends a text, 257 is unused (an even vocabulary).

    As for other tokenizers, `<|endoftext|>` in a text is the token. `carried` has the contents of further files by
    name, which `save` writes. It also writes a `tokenizer.json`, with which transformers produces the same tokens.
    """

    vocab_size = 258
    eos_id: int | None = 256
    bos_id: int | None = None
    longest_token = 1
    """Maximum number of characters of a token."""

    def __init__(self, carried: dict[str, str] | None = None):
        self.carried = carried or {}

    def vocabulary(self) -> dict[str, int]:
        """Every token's id by its name."""
        return {f"<0x{byte:02X}>": byte for byte in range(256)} | {END_OF_TEXT: 256}

    def special_tokens(self) -> dict[str, int]:
        """The ids, by name, of tokens that never stand for ordinary text; `decode` usually leaves them out."""
        return {END_OF_TEXT: 256}

    def added_tokens(self) -> dict[str, int]:
        """The special tokens, and others outside the trained vocabulary, which may be ordinary text."""
        return self.special_tokens()

    def encode(self, text: str) -> list[int]:
        first, *others = text.split(END_OF_TEXT)
        ids = list(first.encode())
        for part in others:
            ids.append(256)
            ids += part.encode()
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def encode_with_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokens, and the span of characters of `text` that each covers."""
        spans: list[tuple[int, int]] = []
        start = 0
        for part in text.split(END_OF_TEXT):
            if start:
                spans.append((start - len(END_OF_TEXT), start))
            spans += [(i, i + 1) for i, character in enumerate(part, start) for _ in character.encode()]
            start += len(part) + len(END_OF_TEXT)
        return self.encode(text), spans

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Special tokens are left out, unless `special`; bytes that are not UTF-8 become replacement characters."""
        ends = END_OF_TEXT.encode() if special else b""
        return b"".join(bytes([i]) if i < 256 else ends if i == 256 else b"" for i in ids).decode(errors="replace")

    def added_before(self) -> list[int]:
        """What transformers' tokenizer of the same folder adds before a text."""
        return []

    def token_names(self, ids: Sequence[int]) -> list[str]:
        """Each token's name in the vocabulary; empty for an id without a token."""
        names = {number: name for name, number in self.vocabulary().items()}
        return [names.get(i, "") for i in ids]

    def save(self, folder: str | Path) -> None:
        folder = Path(folder)
        _write(folder / BYTE_FILE, json.dumps({"vocab_size": self.vocab_size, "eos_id": self.eos_id}))
        _write(folder / "tokenizer.json", json.dumps(_bytes_for_transformers()))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}
        _write(folder / "tokenizer_config.json", json.dumps(settings | {"clean_up_tokenization_spaces": False}))
        _write_all(folder, self.carried)


@lru_cache(maxsize=4)
def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that `decode` leaves out: not special ones that a normalizer changes, as in old Llama files."""
    return frozenset(token for token in tokenizer.special_tokens().values() if not tokenizer.decode([token]))


def byte_characters() -> dict[int, str]:
    """Byte-level BPE's character for each byte: the byte itself if printable, else the next character from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def _bytes_for_transformers() -> dict[str, Any]:
    """The byte tokenizer as the content of a `tokenizer.json`: byte-level BPE without merges."""
    names = byte_characters()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    end = {"id": 256, "content": END_OF_TEXT, "special": True, "normalized": False}
    return {
        "version": "1.0",
        "added_tokens": [end | {"single_word": False, "lstrip": False, "rstrip": False}],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {names[byte]: byte for byte in range(256)}, "merges": []},
    }


class HuggingFaceTokenizer:
    """A `tokenizer.json`, read by the `tokenizers` library.

    `eos_token` and `bos_token` are names or ids; one that is not in the vocabulary is ignored. `settings` is the
    content of `tokenizer_config.json`: its added and special tokens are added as transformers does, and `save` writes
    it, with the files in `carried`. Truncation and padding in the file are turned off.

    Raises UserError for a file that is not a tokenizer, and for added tokens that do not get their listed ids.
    """

    def __init__(
        self,
        path: str | Path,
        eos_token: str | int | None = END_OF_TEXT,
        bos_token: str | int | None = None,
        settings: dict[str, Any] | None = None,
        carried: dict[str, str] | None = None,
    ):
        from tokenizers import Tokenizer as Backend

        with _library(f"{path}: cannot be read as a tokenizer", "save it again with tokenizers"):
            self._backend = Backend.from_file(str(path))
            # Some files contain the truncation and padding of their author's last call.
            self._backend.no_truncation()
            self._backend.no_padding()
            before = repr(self._backend.get_added_tokens_decoder())
            self._add_tokens(settings or {}, Path(path).parent / "tokenizer_config.json")
            if repr(self._backend.get_added_tokens_decoder()) != before:
                # A token that is added again keeps some of its old options until the tokenizer is reloaded.
                self._backend = Backend.from_str(self._backend.to_str())
            self._backend.encode_special_tokens = bool((settings or {}).get("split_special_tokens"))
            # Some files load, but panic at the first text. Exceptions are fine: a vocabulary may lack these words.
            with suppress(Exception):
                self._backend.decode(self._backend.encode(PROBE, add_special_tokens=False).ids)
        # Not the number of tokens: ids may have gaps, and the largest one needs a row in the embedding.
        vocabulary = self._backend.get_vocab()
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.longest_token = max(map(len, vocabulary), default=1)
        self.eos_id = self._token_id(eos_token)
        self.bos_id = self._token_id(bos_token)
        self._settings = settings or {}
        self.carried = carried or {}

    def encode(self, text: str) -> list[int]:
        with _library(*FAILS):
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        with _library(*FAILS):
            return [e.ids for e in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_with_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        with _library(*FAILS):
            encoded = self._backend.encode(text, add_special_tokens=False)
        spans, covered = [], 0
        for start, stop in encoded.offsets:
            # A post-processor that trims offsets leaves a token of spaces an empty span.
            spans.append((min(start, covered) if start == stop else start, stop))
            covered = max(covered, stop)
        return encoded.ids, spans

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Special tokens are left out, unless `special`."""
        with _library(*FAILS):
            if len(ids) < LONG:
                text: str = self._backend.decode(list(ids), skip_special_tokens=not special)
            else:
                (text,) = self._backend.decode_batch([list(ids)], skip_special_tokens=not special)
        return text

    def added_before(self) -> list[int]:
        """The beginning-of-text token, if transformers' tokenizer of the same folder adds it before a text, as that of
        Llama 3 does."""
        with _library(*FAILS):
            added = self._backend.encode("", add_special_tokens=True).ids
        return [self.bos_id] if self.bos_id is not None and self.bos_id in added else []

    def token_names(self, ids: Sequence[int]) -> list[str]:
        """Each token's name in the vocabulary; empty for an id without a token."""
        added = {number: token.content for number, token in self._backend.get_added_tokens_decoder().items()}
        return [added.get(i) or self._backend.id_to_token(i) or "" for i in ids]

    def save(self, folder: str | Path) -> None:
        folder = Path(folder)
        (folder / BYTE_FILE).unlink(missing_ok=True)
        _write(folder / "tokenizer.json", self._backend.to_str(pretty=False))
        names = {"eos_token": self._setting(self.eos_id), "bos_token": self._setting(self.bos_id)}
        # Without a class, transformers uses that of the model's family, which may split texts differently.
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **self._settings, **names}
        _write(folder / "tokenizer_config.json", json.dumps(settings))
        _write_all(folder, self.carried)

    def definition(self) -> str:
        """The tokenizer as the content of a `tokenizer.json`."""
        definition: str = self._backend.to_str()
        return definition

    def _add_tokens(self, settings: dict[str, Any], file: Path) -> None:
        """Adds `added_tokens_decoder` in order of ids, and the named special tokens that are in the vocabulary.

        A token is special if either file says so. A special token outside the vocabulary would get an id without a row
        in the embedding.
        """
        tokens: list[Any] = [value for key, value in settings.items() if key.endswith("_token")]
        for key in ("additional_special_tokens", "extra_special_tokens"):
            more = settings.get(key) or []
            tokens += more.values() if isinstance(more, dict) else more if isinstance(more, list) else []
        named = [token if isinstance(token, dict) else {"content": token} for token in tokens]
        named = [token for token in named if token.get("special") is not False]
        special = [token.get("content") for token in named] + list(self.special_tokens())
        try:
            listed = sorted((int(number), token) for number, token in settings.get("added_tokens_decoder", {}).items())
            for number, token in listed:
                added = _added(token, special=bool(token.get("special")) or token["content"] in special)
                self._backend.add_tokens([added])
                if (actual := self._backend.token_to_id(token["content"])) != number:
                    raise UserError(
                        f"{file}: added_tokens_decoder lists {token['content']!r} as token {number}, but with "
                        f"tokenizer.json it is token {actual}; save both files again with transformers"
                    )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{file}: added_tokens_decoder is not a table of tokens by id ({error!r}); save it again"
            ) from error
        known = {token.content: token for token in self._backend.get_added_tokens_decoder().values()}
        for token in named:
            name = token.get("content")
            if isinstance(name, str) and self._backend.token_to_id(name) is not None:
                self._backend.add_special_tokens([known.get(name) or _added(token, special=True)])

    def _setting(self, token_id: int | None) -> str | dict[str, Any] | None:
        """A token as written in the settings; a token written as a plain name would become special."""
        name = self._token(token_id)
        if name is None or name in self.special_tokens():
            return name
        return {"__type": "AddedToken", "content": name, "special": False}

    def vocabulary(self) -> dict[str, int]:
        """Every token's id by its name, including added tokens."""
        vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return vocabulary

    def special_tokens(self) -> dict[str, int]:
        """The ids of the special tokens by name."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    def added_tokens(self) -> dict[str, int]:
        """The ids of all added tokens by name."""
        return {token.content: number for number, token in self._backend.get_added_tokens_decoder().items()}

    def _token_id(self, token: str | int | None) -> int | None:
        token_id: int | None
        if isinstance(token, int):
            token_id = token if 0 <= token < self.vocab_size and self._token(token) is not None else None
        else:
            token_id = None if token is None else self._backend.token_to_id(token)
        return token_id

    def _token(self, token_id: int | None) -> str | None:
        """A token's name in the settings: the library's `id_to_token` returns an added token in normalized form."""
        if token_id is None:
            return None
        added = self._backend.get_added_tokens_decoder().get(token_id)
        name: str | None = self._backend.id_to_token(token_id) if added is None else added.content
        return name


Tokenizer = ByteTokenizer | HuggingFaceTokenizer


def _added(token: dict[str, Any], special: bool) -> Any:
    from tokenizers import AddedToken

    options = {key: bool(token[key]) for key in TOKEN_OPTIONS if key in token}
    return AddedToken(token["content"], special=special, **options)


@contextmanager
def _library(problem: str, advice: str) -> Iterator[None]:
    """Turns errors of the `tokenizers` library into a UserError, including panics, which are not Exceptions.

    Errors for half a surrogate pair are not converted: callers report them with their position.
    """
    try:
        yield
    except (UserError, UnicodeEncodeError, TypeError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise UserError(f"{problem} ({str(error) or type(error).__name__:.300}); {advice}") from error


def train_bpe(texts: Iterable[str], vocab_size: int) -> HuggingFaceTokenizer:
    """A byte-level BPE tokenizer of `vocab_size` tokens, `<|endoftext|>` among them. Raises UserError below 257."""
    import tempfile

    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab_size < 257:
        raise UserError(f"a byte-level BPE vocabulary has at least 257 tokens, not {vocab_size}; or use `byte`")
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        backend.save(str(path))
        return HuggingFaceTokenizer(path)


def named_tokenizer(name: str, texts: Iterable[str]) -> Tokenizer:
    """`byte`, `bpe:VOCABULARY` trained on the first gigabyte of the texts, or a folder's tokenizer.

    Raises UserError if there is none.
    """
    if name == "byte":
        return ByteTokenizer()
    kind, _, size = name.partition(":")
    if kind == "bpe":
        if not size.isdigit():
            raise UserError(f'tokenizer "{name}": give the size of the vocabulary, as in bpe:2048')
        return train_bpe(_beginning(texts, TRAINING_CHARACTERS), int(size))
    return load_tokenizer(name)


def _beginning(texts: Iterable[str], characters: int) -> Iterator[str]:
    """The first texts: a stream may never end, and more text does not improve the vocabulary."""
    for text in texts:
        yield text
        characters -= len(text)
        if characters <= 0:
            return


def load_tokenizer(folder: str | Path, model_vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer of a folder or of a model on the hub, with the end-of-text and beginning-of-text tokens of its
    settings.

    Raises UserError if there is none, if it cannot be read, if it lacks one of these tokens, or if its vocabulary is
    larger than the model's.
    """
    folder = tokenizer_folder(local_folder(folder))
    tokenizer: Tokenizer
    if (folder / BYTE_FILE).is_file():  # its tokenizer.json is for other programs
        tokenizer = ByteTokenizer(_carried(folder))
    elif (folder / "tokenizer.json").is_file():
        tokenizer = _hugging_face(folder)
    else:
        raise UserError(f"{folder}: no tokenizer.json; put the model's tokenizer next to its weights")
    if model_vocab_size is not None and tokenizer.vocab_size > model_vocab_size:
        raise UserError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, but the model only {model_vocab_size}; "
            "they do not belong together"
        )
    return tokenizer


def tokenizer_folder(folder: Path) -> Path:
    """The folder of the tokenizer and chat template: `folder`, or that of a GGUF file; an adapter's base if the adapter
    has no tokenizer; a temporary one for the tokenizer in a GGUF file.

    Raises UserError if there is no base, and if the tokenizer in a GGUF file cannot be read.
    """
    from lockstep.model.adapter_folder import base_folder
    from lockstep.model.folder import files_folder
    from lockstep.model.gguf import gguf_file

    place = files_folder(folder)
    if (place / BYTE_FILE).is_file() or (place / "tokenizer.json").is_file():
        return place
    if (file := gguf_file(folder)) is not None:
        from lockstep.data.gguf_tokenizer import tokenizer_in

        return tokenizer_in(file)
    base = base_folder(folder)  # peft saves adapters without a tokenizer
    return folder if base == folder else tokenizer_folder(base)


def _hugging_face(folder: Path) -> HuggingFaceTokenizer:
    settings = _with_older_files(_json(folder / "tokenizer_config.json"), folder)
    # The tokenizer's files have the token's name; the model's files its id, or several, of which the first is used.
    named = [("tokenizer_config.json", settings)]
    named += [(n, _json(folder / n)) for n in ("special_tokens_map.json", "generation_config.json", "config.json")]
    chosen: dict[str, str | int | None] = {"eos": END_OF_TEXT, "bos": None}
    origin = {}
    for role in chosen:
        for name, values in named:
            token = values.get(f"{role}_token", values.get(f"{role}_token_id"))
            token = token.get("content") if isinstance(token, dict) else token
            token = next(iter(token), None) if isinstance(token, list) else token
            if token is not None:
                if not isinstance(token, (str, int)):
                    raise UserError(f"{folder / name}: {role}_token is {token!r:.100}; it must be a token or its id")
                chosen[role], origin[role] = token, name
                break
    tokenizer = HuggingFaceTokenizer(
        folder / "tokenizer.json", chosen["eos"], chosen["bos"], settings, _carried(folder)
    )
    for role, token_id in (("eos", tokenizer.eos_id), ("bos", tokenizer.bos_id)):
        if token_id is None and role in origin and isinstance(chosen[role], str):
            raise UserError(
                f"{folder / origin[role]}: {role}_token {chosen[role]!r} is not in tokenizer.json; name one that is"
            )
    return tokenizer


def _are_lists(*values: Any) -> bool:
    return all(isinstance(value, list) for value in values)


def _with_older_files(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The settings, merged with the separate token files of older folders; as in transformers, these files are ignored
    if the settings have `added_tokens_decoder`."""
    if "added_tokens_decoder" in settings:
        return settings
    special = _json(folder / "special_tokens_map.json")
    lists = {key: [*settings[key], *value] for key, value in special.items() if _are_lists(settings.get(key), value)}
    settings = {key: value for key, value in (settings | special | lists).items() if value is not None}
    names = [value.get("content") if isinstance(value, dict) else value for value in special.values()]
    table = {
        str(number): {"content": name, "special": name in names, "normalized": name not in names}
        for name, number in _json(folder / "added_tokens.json").items()
    }
    return settings | ({"added_tokens_decoder": table} if table else {})


def _carried(folder: Path) -> dict[str, str]:
    paths = (path for pattern in CARRIED_FILES for path in sorted(folder.glob(pattern)) if path.is_file())
    return {str(path.relative_to(folder)): read_text(path) for path in paths}


def read_text(path: Path) -> str:
    """A file's text. Raises UserError if it is not UTF-8, or larger than 64 MiB."""
    if (size := path.stat().st_size) > LARGEST_TEXT:
        raise UserError(f"{path}: has {size} bytes, more than {LARGEST_TEXT}; fix it or remove it")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 at byte {error.start}; fix it or remove it") from error


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); fix it or remove it") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: is a {type(values).__name__}, not a JSON object; fix it or remove it")
    return values


def _write_all(folder: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        _write(folder / name, text)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)
