"""The trainer: packing, scoring, and the optimizer step."""

from lockstep.train.optimizer import MasterOptimizer
from lockstep.train.packing import PackedRow, log_probs, pack, pack_rows, score, split_by_tokens, target_log_probs
from lockstep.train.schedule import make_schedule
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
