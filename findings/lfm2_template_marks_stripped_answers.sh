#!/usr/bin/env bash
# LFM2.5's chat template marks answers with {% generation %}, and drops the reasoning of all but the last turn.
#
# Expected: what the mask marks is what the model said, since the marks are there for training on answers.
# Seen, the template as TRL 1.16.0 ships it, with transformers 5.24.0: in a conversation of two turns with reasoning the
# mask covers `2<|im_end|>` of the first answer, not `<think>one and one</think>2<|im_end|>`, which it covers if that
# answer is the last. Trained so, a model learns to answer earlier turns without reasoning, in a form it never samples.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv env
env/bin/pip install --quiet "torch>=2.11,<2.14" "trl==1.16.0" "transformers==5.24.0" 2>/dev/null
env/bin/pip freeze 2>/dev/null | grep -E "^(trl|transformers)=="
cat > probe.py <<'PROBE'
from pathlib import Path

import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

template = (Path(trl.__file__).parent / "chat_templates" / "lfm2_2_5_v2.jinja").read_text()
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
backend = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
backend.decoder = decoders.ByteLevel()
backend.add_special_tokens([AddedToken(name) for name in ("<|im_start|>", "<|im_end|>", "<|startoftext|>")])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|startoftext|>", eos_token="<|im_end|>")


def turn(asked, said, thought):
    return [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": said, "reasoning_content": thought},
    ]


def marked(messages):
    found = tokenizer.apply_chat_template(
        messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    kept = [token for token, mask in zip(found["input_ids"], found["assistant_masks"]) if mask]
    return tokenizer.decode(kept)


first = turn("1+1?", "2", "one and one")
alone, followed = marked(first), marked(first + turn("2+2?", "4", "two and two"))
print("one turn: ", repr(alone))
print("two turns:", repr(followed))
assert alone == "<think>one and one</think>2<|im_end|>\n"
assert followed == "2<|im_end|>\n<think>two and two</think>4<|im_end|>\n"
PROBE
env/bin/python probe.py
