"""Tokenizers, sources of text, and the resumable loader of rows."""

from lockstep.data.conversations import ConversationEncoder, ConversationSource
from lockstep.data.corpus import TokenizedCorpus, tokenize_documents
from lockstep.data.decoding import StreamDecoder, continuation, decoding_context
from lockstep.data.encode import Encoder, TextEncoder
from lockstep.data.end_tokens import ends_of_text, name_ends, with_ends
from lockstep.data.loader import RowLoader, StepRows, divide_step
from lockstep.data.open import DataSource, divide, open_rows, parse_data
from lockstep.data.records import read_jsonl
from lockstep.data.rows import Row, Rows
from lockstep.data.text import TextSource
from lockstep.data.token_folder import is_token_folder, open_token_folder, write_token_folder
from lockstep.data.tokenizer import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    Tokenizer,
    load_tokenizer,
    named_tokenizer,
    train_bpe,
)

__all__ = [
    "ByteTokenizer",
    "ConversationEncoder",
    "ConversationSource",
    "DataSource",
    "Encoder",
    "HuggingFaceTokenizer",
    "Row",
    "RowLoader",
    "Rows",
    "StepRows",
    "StreamDecoder",
    "TextEncoder",
    "TextSource",
    "TokenizedCorpus",
    "Tokenizer",
    "continuation",
    "decoding_context",
    "divide",
    "divide_step",
    "ends_of_text",
    "is_token_folder",
    "load_tokenizer",
    "name_ends",
    "named_tokenizer",
    "open_rows",
    "open_token_folder",
    "parse_data",
    "read_jsonl",
    "tokenize_documents",
    "train_bpe",
    "with_ends",
    "write_token_folder",
]
