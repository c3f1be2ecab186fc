"""Speculative decoding: sources of draft tokens, and the choice of how many to check. The bits never change."""

from lockstep.generate.drafts.draft import Draft, FirstOf
from lockstep.generate.drafts.history import HistoryDraft
from lockstep.generate.drafts.lengths import DraftLengths, free_rows, margin
from lockstep.generate.drafts.model import ModelDraft
from lockstep.generate.drafts.ngram import NGramDraft
from lockstep.generate.drafts.sources import make_draft
from lockstep.generate.drafts.speculation import Speculation

__all__ = [
    "Draft",
    "DraftLengths",
    "FirstOf",
    "HistoryDraft",
    "ModelDraft",
    "NGramDraft",
    "Speculation",
    "free_rows",
    "make_draft",
    "margin",
]
