"""ChatML, for models without a chat template: `--template chatml`.

A turn is `<|im_start|>ROLE`, a line feed, its text and `<|im_end|>`, with which the model learns to end its answers.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from lockstep.data.tokenizer import HuggingFaceTokenizer, Tokenizer

CHATML = "chatml"
"""The value of the setting `template` that selects this template."""
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
    """The tokenizer with ChatML's two special tokens, added if missing, and `<|im_end|>` as its end-of-text token."""
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
