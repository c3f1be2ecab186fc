"""The trainer's path: packing, scoring, one optimizer step."""

from lockstep.train.optimizer import MasterAdamW, learning_rate_at
from lockstep.train.packing import PackedRow, pack, pack_rows, split_by_tokens, target_log_probs
from lockstep.train.scoring import score
from lockstep.train.trainer import Trainer

__all__ = [
    "MasterAdamW",
    "PackedRow",
    "Trainer",
    "learning_rate_at",
    "pack",
    "pack_rows",
    "score",
    "split_by_tokens",
    "target_log_probs",
]
