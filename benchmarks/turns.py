"""Tokens of conversations with Qwen3's template, each answer as sampled or in one rendering, and the time to get them.

python -m benchmarks.turns          (needs trl, which has the template)
"""

from __future__ import annotations

import json
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from lockstep.data import ConversationEncoder, load_tokenizer
from lockstep.data.answer_spans import Turns
from lockstep.data.chat import load_chat_template
from lockstep.data.conversations import Conversation

ASKED, ANSWERED = 100, 300
"""Tokens of a question and of an answer."""


def make_folder(folder: Path) -> None:
    """A tokenizer of bytes and Qwen3's special tokens, and its template."""
    spec = find_spec("trl")
    assert spec is not None and spec.submodule_search_locations is not None
    template = Path(spec.submodule_search_locations[0]) / "chat_templates" / "qwen3.jinja"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name) for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    backend.add_tokens([AddedToken(name, special=False) for name in ("<think>", "</think>")])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(template.read_text())


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        make_folder(Path(name))
        tokenizer, template = load_tokenizer(name), load_chat_template(Path(name))
        for turns, reasoning in ((2, 0), (5, 0), (5, 400), (10, 0)):
            thought = {"reasoning_content": "r" * reasoning} if reasoning else {}
            turn = [
                {"role": "user", "content": "q" * ASKED},
                {"role": "assistant", "content": "a" * ANSWERED, **thought},
            ]
            line = Conversation("", {"messages": turn * turns})
            print(f"{turns} turns, {reasoning} tokens of reasoning in each answer")
            kinds: tuple[Turns, ...] = ("whole", "apart")
            for kind in kinds:
                encoder = ConversationEncoder(tokenizer, template, kind)
                (encoded,) = encoder.encode([line])
                began = time.perf_counter()
                encoder.encode([line] * 100)
                alone = len(encoded.tokens) + sum(branch.shared for branch in encoded.branches)
                milliseconds = (time.perf_counter() - began) * 10
                print(
                    f"  {kind}: {len(encoded.tokens)} tokens, {alone} if nothing were shared; {milliseconds:.1f} ms "
                    "to render and tokenize"
                )


if __name__ == "__main__":
    main()
