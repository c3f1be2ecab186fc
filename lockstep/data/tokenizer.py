"""Text to tokens and back: bytes, or a `tokenizer.json` as Hugging Face writes it."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from lockstep.errors import UserError

BYTE_FILE = "byte_tokenizer.json"
END_OF_TEXT = "<|endoftext|>"


@runtime_checkable
class Tokenizer(Protocol):
    """What the loops need of a tokenizer."""

    vocab_size: int
    eos_id: int | None

    def encode(self, text: str) -> list[int]: ...
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def save(self, folder: str | Path) -> None: ...


class ByteTokenizer:
    """UTF-8 bytes as tokens 0–255; 256 ends a text, 257 is unused (an even vocabulary)."""

    vocab_size = 258
    eos_id: int | None = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens are left out; bytes that are no UTF-8 become replacement characters."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def save(self, folder: str | Path) -> None:
        _write(Path(folder) / BYTE_FILE, json.dumps({"vocab_size": self.vocab_size, "eos_id": self.eos_id}))


class HuggingFaceTokenizer:
    """A `tokenizer.json`, read by the `tokenizers` library."""

    def __init__(self, path: str | Path, eos_token: str | None = END_OF_TEXT):
        from tokenizers import Tokenizer as Backend

        try:
            self._backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for whatever is wrong with the file
            raise UserError(
                f"{path}: cannot be read as a tokenizer ({error}); save it again with tokenizers"
            ) from error
        self.vocab_size = self._backend.get_vocab_size()
        self.eos_id = self._backend.token_to_id(eos_token) if eos_token else None
        self._eos_token = eos_token

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens are left out."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=True)
        return text

    def save(self, folder: str | Path) -> None:
        folder = Path(folder)
        _write(folder / "tokenizer.json", self._backend.to_str(pretty=False))
        _write(folder / "tokenizer_config.json", json.dumps({"eos_token": self._eos_token}))


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


def load_tokenizer(folder: str | Path, model_vocab_size: int | None = None) -> ByteTokenizer | HuggingFaceTokenizer:
    """The tokenizer of a model folder.

    Raises UserError if there is none, or if its vocabulary is larger than the model's.
    """
    folder = Path(folder)
    tokenizer: ByteTokenizer | HuggingFaceTokenizer
    if (folder / "tokenizer.json").is_file():
        tokenizer = HuggingFaceTokenizer(folder / "tokenizer.json", _eos_token(folder))
    elif (folder / BYTE_FILE).is_file():
        tokenizer = ByteTokenizer()
    else:
        raise UserError(f"{folder}: no tokenizer.json; put the model's tokenizer beside its weights")
    if model_vocab_size is not None and tokenizer.vocab_size > model_vocab_size:
        raise UserError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, but the model only {model_vocab_size}; "
            "they do not belong together"
        )
    return tokenizer


def _eos_token(folder: Path) -> str | None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            token = json.loads(path.read_text()).get("eos_token")
        except (ValueError, AttributeError) as error:
            raise UserError(f"{path}: not a JSON object ({error})") from error
        if isinstance(token, dict):
            token = token.get("content")
        if token:
            return str(token)
    return END_OF_TEXT


class StreamDecoder:
    """Text of a growing list of tokens, piece by piece, never half a character."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._bytes = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held: list[int] = []
        self._before = ""

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is still open."""
        if isinstance(self._tokenizer, ByteTokenizer):
            return self._bytes.decode(bytes([token]) if token < 256 else b"")
        self._held.append(token)
        text = self._tokenizer.decode(self._held)
        if text.endswith("�"):
            return ""
        new = text[len(self._before) :]
        # The last tokens stay as context: some decoders treat the first token of a text in their own way.
        self._held = self._held[-4:]
        self._before = self._tokenizer.decode(self._held)
        return new

    def finish(self) -> str:
        """What is left, with replacement characters for a character that never ended."""
        if isinstance(self._tokenizer, ByteTokenizer):
            return self._bytes.decode(b"", final=True)
        return self._tokenizer.decode(self._held)[len(self._before) :]


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)
