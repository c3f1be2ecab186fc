"""Tokenizers, sources of text, and the resumable loader of rows."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.data.conversations import ConversationEncoder, ConversationSource
    from lockstep.data.corpus import TokenizedCorpus, tokenize_documents
    from lockstep.data.encode import Encoder, TextEncoder
    from lockstep.data.ends import ends_of_text, name_ends, with_ends
    from lockstep.data.held_out import divide
    from lockstep.data.loader import RowLoader, StepRows, divide_step
    from lockstep.data.mixture import parse_data
    from lockstep.data.open import DataSource, open_rows
    from lockstep.data.records import read_jsonl
    from lockstep.data.rows import Row, Rows
    from lockstep.data.stream_decoder import StreamDecoder, continuation, decoding_context
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

# Imported at first use: what models say is taken apart here too, in reward workers, which need no numpy.
_HOMES = {
    "ByteTokenizer": "lockstep.data.tokenizer",
    "ConversationEncoder": "lockstep.data.conversations",
    "ConversationSource": "lockstep.data.conversations",
    "DataSource": "lockstep.data.open",
    "Encoder": "lockstep.data.encode",
    "HuggingFaceTokenizer": "lockstep.data.tokenizer",
    "Row": "lockstep.data.rows",
    "RowLoader": "lockstep.data.loader",
    "Rows": "lockstep.data.rows",
    "StepRows": "lockstep.data.loader",
    "StreamDecoder": "lockstep.data.stream_decoder",
    "TextEncoder": "lockstep.data.encode",
    "TextSource": "lockstep.data.text",
    "TokenizedCorpus": "lockstep.data.corpus",
    "Tokenizer": "lockstep.data.tokenizer",
    "continuation": "lockstep.data.stream_decoder",
    "decoding_context": "lockstep.data.stream_decoder",
    "divide": "lockstep.data.held_out",
    "divide_step": "lockstep.data.loader",
    "ends_of_text": "lockstep.data.ends",
    "is_token_folder": "lockstep.data.token_folder",
    "load_tokenizer": "lockstep.data.tokenizer",
    "name_ends": "lockstep.data.ends",
    "named_tokenizer": "lockstep.data.tokenizer",
    "open_rows": "lockstep.data.open",
    "open_token_folder": "lockstep.data.token_folder",
    "parse_data": "lockstep.data.mixture",
    "read_jsonl": "lockstep.data.records",
    "tokenize_documents": "lockstep.data.corpus",
    "train_bpe": "lockstep.data.tokenizer",
    "with_ends": "lockstep.data.ends",
    "write_token_folder": "lockstep.data.token_folder",
}

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


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lockstep.data' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
