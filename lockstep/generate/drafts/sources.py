"""The draft that a configuration names."""

from __future__ import annotations

from lockstep.config import EngineConfig
from lockstep.errors import UserError
from lockstep.generate.drafts.draft import Draft, FirstOf
from lockstep.generate.drafts.history import HistoryDraft
from lockstep.generate.drafts.model import ModelDraft
from lockstep.generate.drafts.ngram import NGramDraft
from lockstep.model import Decoder, load_model


def make_draft(config: EngineConfig, model: Decoder, history: HistoryDraft | None = None) -> Draft | None:
    """The draft that `config.draft` names. Raises UserError, naming the setting, for one that does not fit the model.

    history: earlier completions of the same prompts, which `auto` looks up first.
    """
    if config.draft == "model":
        draft = _draft_model(config, model)
        return ModelDraft(draft, config, cost=_size(draft) / _size(model))
    if config.draft == "none":
        return None
    return FirstOf(history, NGramDraft()) if history and config.draft == "auto" else NGramDraft()


def _draft_model(config: EngineConfig, model: Decoder) -> Decoder:
    if not config.draft_model:
        raise UserError('engine.draft is "model", but engine.draft_model is empty; set it, or use draft "ngram"')
    draft = load_model(config.draft_model, model.dtype, model.device)
    if draft.config.vocab_size != model.config.vocab_size:
        raise UserError(
            f"engine.draft_model {config.draft_model} has a vocabulary of {draft.config.vocab_size} tokens, but the "
            f"model has {model.config.vocab_size}; a draft model needs the same tokenizer"
        )
    return draft


def _size(model: Decoder) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
