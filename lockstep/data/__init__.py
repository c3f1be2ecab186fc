"""Tokenizers, text sources and the resumable loader."""

from lockstep.data.loader import TokenizedCorpus, TokenLoader, tokenize_documents
from lockstep.data.text import TextSource, read_jsonl
from lockstep.data.tokenizer import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    StreamDecoder,
    Tokenizer,
    load_tokenizer,
    train_bpe,
)

__all__ = [
    "ByteTokenizer",
    "HuggingFaceTokenizer",
    "StreamDecoder",
    "TextSource",
    "TokenLoader",
    "TokenizedCorpus",
    "Tokenizer",
    "load_tokenizer",
    "read_jsonl",
    "tokenize_documents",
    "train_bpe",
]
