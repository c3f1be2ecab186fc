"""Folders with a real chat template, and a BPE tokenizer in which its special tokens are special tokens."""

import importlib.util
import json
from pathlib import Path

from lockstep.data import load_tokenizer
from lockstep.data.chat import load_chat_template
from lockstep.rl.conversations.rendering import Rendering

QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN_WORDS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
LLAMA = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
DEEPSEEK = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]

FAMILIES = {
    "qwen3": (QWEN, QWEN_WORDS, "<|im_end|>", None),
    "qwen3_instruct_2507": (QWEN, QWEN_WORDS, "<|im_end|>", None),
    "qwen3_5_think": (QWEN, QWEN_WORDS, "<|im_end|>", None),
    "llama3": (LLAMA, [], "<|eot_id|>", "<|begin_of_text|>"),
    "llama3_1": (LLAMA, [], "<|eot_id|>", "<|begin_of_text|>"),
    "deepseek_r1_distill": (DEEPSEEK, ["<think>", "</think>"], "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"),
}
"""By the template's file: special tokens, other added tokens, the end of a turn, and the beginning of a text."""
GPT_OSS = ["return", "constrain", "channel", "start", "end", "message", "call"]
DEEPSEEK_CALLS = ["tool▁calls▁begin", "tool▁call▁begin", "tool▁sep", "tool▁call▁end", "tool▁calls▁end"]
OTHERS = {
    "qwen2_5": (QWEN, QWEN_WORDS[:2], "<|im_end|>", None),
    "gptoss": ([f"<|{name}|>" for name in GPT_OSS], [], "<|return|>", None),
    "deepseekv3": (
        *(DEEPSEEK, ["<think>", "</think>", *(f"<｜{name}｜>" for name in DEEPSEEK_CALLS)]),
        *("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"),
    ),
}
"""Those that have structure of their own within replies."""


def template_source(name: str) -> str:
    """Of the package that ships the templates; it is not imported."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.submodule_search_locations
    return (Path(spec.submodule_search_locations[0]) / "chat_templates" / f"{name}.jinja").read_text()


def write_family(folder: Path, name: str, bpe_tokenizer) -> None:
    """Writes tokenizer and template; the model, if there is to be one, is the caller's."""
    special, words, end, begin = (FAMILIES | OTHERS)[name]
    folder.mkdir(parents=True, exist_ok=True)
    bpe_tokenizer.save(folder)
    (folder / "chat_template.jinja").write_text(template_source(name))
    known = bpe_tokenizer.vocabulary()
    new = [(token, token in special) for token in [*special, *words] if token not in known]
    added = {
        str(len(known) + index): {"content": token, "special": is_special, "normalized": False}
        for index, (token, is_special) in enumerate(new)
    }
    settings = {"added_tokens_decoder": added, "eos_token": end} | ({"bos_token": begin} if begin else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def rendering_of(folder: Path, **values) -> Rendering:
    tokenizer = load_tokenizer(folder)
    return Rendering(tokenizer, load_chat_template(folder), [tokenizer.eos_id], **values)


def shown(tokenizer, ids) -> str:
    """Text with its special tokens."""
    return tokenizer._backend.decode(list(ids), skip_special_tokens=False)
