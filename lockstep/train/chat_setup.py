"""The tokenizer and the chat template of a run on conversations or preferences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.config import PreferenceConfig, SFTConfig
from lockstep.data import ByteTokenizer, DataSource, HuggingFaceTokenizer, load_tokenizer
from lockstep.data.chat import ChatTemplate, carry_template, load_chat_template
from lockstep.data.chatml import CHATML, with_chatml
from lockstep.data.template_values import OPTION
from lockstep.data.tokenizer import CHAT_TEMPLATE_FILE, Tokenizer
from lockstep.errors import UserError
from lockstep.model import read_config


def chat_tokenizer(config: SFTConfig) -> ByteTokenizer | HuggingFaceTokenizer:
    """The model's tokenizer, or `config.tokenizer`, with the special tokens of ChatML if that is the template.

    Raises UserError if the model lacks these tokens and the run cannot learn their embeddings.
    """
    tokenizer = load_tokenizer(config.tokenizer or config.model)
    if config.template != CHATML:
        return tokenizer
    tokenizer = with_chatml(tokenizer)
    learns_tokens = not config.lora.rank and not isinstance(config, PreferenceConfig)
    if not learns_tokens and tokenizer.vocab_size > read_config(Path(config.model)).vocab_size:
        raise UserError(
            f"{config.model}: lacks the tokens of template {CHATML}, which only full fine-tuning learns; first train "
            f"all weights on conversations: lockstep sft --template {CHATML}"
        )
    return tokenizer


def chat_template(
    config: SFTConfig,
    tokenizer: Tokenizer,
    sources: Sequence[tuple[DataSource, float]],
    held_out: Sequence[tuple[DataSource, float]],
) -> ChatTemplate | None:
    """`config.template`, or the template that the data was tokenized with, either of which is saved with the tokenizer;
    otherwise the one in the tokenizer's folder.

    Raises UserError for training or validation data that was tokenized with another template, and for tokenized data
    with settings that only affect tokenization.
    """
    tokenized = [source for source, _ in [*sources, *held_out] if isinstance(source, Path)]
    if tokenized and (config.chat_template_kwargs or config.turns != "apart"):
        option = OPTION if config.chat_template_kwargs else "--turns"
        raise UserError(f"{tokenized[0]}: is tokenized already, so {option} has no effect on it; leave it out")
    folder, made_with = Path(config.tokenizer or config.model), _template_files(sources)
    template = load_chat_template(folder, config.template)
    carried = bool(config.template)
    if made_with and not carried and (template is None or template.source != made_with[0].read_text()):
        template, carried = load_chat_template(folder, str(made_with[0])), True
    for other in made_with + _template_files(held_out):
        if template is None or other.read_text() != template.source:
            raise UserError(
                f"{other.parent}: was tokenized with another chat template; give --template {other}, or tokenize again"
            )
    if carried and template is not None:
        carry_template(tokenizer, template)
    return template


def _template_files(sources: Sequence[tuple[DataSource, float]]) -> list[Path]:
    files = [source / CHAT_TEMPLATE_FILE for source, _ in sources if isinstance(source, Path)]
    return [file for file in files if file.is_file()]
