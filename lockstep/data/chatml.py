"""ChatML, for models that have no chat template yet: `--template chatml`.

A turn is `<|im_start|>ROLE`, a line feed, its text and `<|im_end|>`, which the assistant's answers learn to end with.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from lockstep.data.tokenizer import HuggingFaceTokenizer, Tokenizer

CHATML = "chatml"
"""The setting `template` that means this template."""
BEGIN, END = "<|im_start|>", "<|im_end|>"
SOURCE = """\
{%- for message in messages %}
{%- if message.tool_calls or tools %}
{{- raise_exception('ChatML has no tools; give a template that has, with --template FILE') }}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}
{%- else %}
{{- message.content + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def with_chatml(tokenizer: Tokenizer) -> HuggingFaceTokenizer:
    """The tokenizer with ChatML's two tokens as special ones, added if they are missing; `<|im_end|>` ends a text."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        tokenizer.save(place)
        backend = Backend.from_file(str(place / "tokenizer.json"))
        backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (BEGIN, END)])
        backend.save(str(place / "tokenizer.json"))
        file = place / "tokenizer_config.json"
        settings = json.loads(file.read_text()) if file.is_file() else {}
        return HuggingFaceTokenizer(
            place / "tokenizer.json", END, tokenizer.bos_id, settings | {"eos_token": END}, dict(tokenizer.carried)
        )
