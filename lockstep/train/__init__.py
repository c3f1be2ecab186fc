"""The trainer: packing, scoring, and the optimizer step."""

from lockstep.train.optimizer import MasterOptimizer
from lockstep.train.packing import PackedRow, pack, pack_rows, split_by_tokens, target_log_probs
from lockstep.train.schedule import make_schedule
from lockstep.train.scoring import log_probs, score
from lockstep.train.trainer import Trainer

__all__ = [
    "MasterOptimizer",
    "PackedRow",
    "Trainer",
    "log_probs",
    "make_schedule",
    "pack",
    "pack_rows",
    "score",
    "split_by_tokens",
    "target_log_probs",
]
