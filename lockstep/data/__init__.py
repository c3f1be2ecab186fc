"""Tokenizers, text sources and the resumable loader."""

from lockstep.data.corpus import TokenizedCorpus, tokenize_documents
from lockstep.data.loader import RowLoader, StepRows
from lockstep.data.rows import Row, Rows
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
    "Row",
    "RowLoader",
    "Rows",
    "StepRows",
    "StreamDecoder",
    "TextSource",
    "TokenizedCorpus",
    "Tokenizer",
    "load_tokenizer",
    "read_jsonl",
    "tokenize_documents",
    "train_bpe",
]
