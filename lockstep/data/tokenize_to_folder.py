"""`lockstep data tokenize`: tokenizes data into a folder, with a progress bar."""

from __future__ import annotations

from pathlib import Path

from lockstep.data.answer_spans import Turns
from lockstep.data.chat import carry_template, load_chat_template
from lockstep.data.chatml import CHATML, with_chatml
from lockstep.data.conversations import ConversationEncoder, ConversationSource
from lockstep.data.encode import Encoder, TextEncoder
from lockstep.data.text import TextSource
from lockstep.data.token_folder import Source, open_token_folder, tokenize_with_progress
from lockstep.data.tokenizer import named_tokenizer
from lockstep.errors import UserError


def tokenize_to_folder(
    data: str,
    output: str,
    tokenizer: str = "byte",
    template: str = "{text}",
    chat: bool = False,
    skip_bad_lines: bool = False,
    workers: int = 4,
    turns: Turns = "apart",
) -> None:
    """Writes the folder `output` and prints its contents. Raises UserError for bad data or an existing folder."""
    folder = Path(output)
    if folder.exists():
        raise UserError(f"{folder}: already exists; delete it or give another --output")
    source: Source
    encoder: Encoder
    if chat:
        source = ConversationSource(data, skip_bad_lines)
        chat_template = load_chat_template(Path(tokenizer), "" if template == "{text}" else template)
        chat_tokenizer = named_tokenizer(tokenizer, [])
        if template == CHATML:
            chat_tokenizer = with_chatml(chat_tokenizer)
        encoder = ConversationEncoder(chat_tokenizer, chat_template, turns)
        if chat_template is not None and template != "{text}":
            carry_template(encoder.tokenizer, chat_template)
    else:
        source = texts = TextSource(data, template, skip_bad_lines)
        encoder = TextEncoder(named_tokenizer(tokenizer, texts))
    tokenize_with_progress(folder, source, encoder, workers)
    corpus = open_token_folder(folder)
    left_out = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in corpus.counts.items() if count)
    size = sum(path.stat().st_size for path in folder.iterdir()) / 2**20
    print(f"{folder}: {len(corpus.tokens)} tokens in {len(corpus.offsets) - 1} documents, {size:.1f} MiB")
    if left_out:
        print(f"left out: {left_out}")
