"""Lockstep: pretrain, fine-tune, serve and reinforce language models with one model definition.

The trainer and the generator compute the same bits: `Completion.logprobs` equals `score` of the same tokens.
"""

import os
from typing import TYPE_CHECKING, Any

from lockstep.version import __version__ as __version__

if TYPE_CHECKING:
    from lockstep.checkpoint import load_model
    from lockstep.config import EngineConfig, EvalConfig
    from lockstep.errors import StopRun
    from lockstep.generate import Completion, Engine, SamplingParams
    from lockstep.model import Decoder, ModelConfig, build_model, save_model
    from lockstep.rl.evaluate import evaluate
    from lockstep.rl.reinforce import reinforce
    from lockstep.train import score
    from lockstep.train.pretrain import pretrain
    from lockstep.train.sft import finetune

# Allocates large tensors in huge pages: without them a CPU training step spends a fifth of its time on page faults.
# torch reads this at its first allocation.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
# Waiting threads sleep after some 50 microseconds. By default they spin for 5 to 20 milliseconds, which on a busy
# machine takes CPU time from the threads they wait for. libgomp reads this when it is loaded with torch: it has no
# effect if torch was imported first.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# oneDNN compiles a matrix product for every number of rows and caches 1024 of them: 300 MB in a run with varying
# micro-batches. As many as a model's shapes are enough.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")

# Imported at first use, so that `lockstep --help` does not import torch.
_HOMES = {
    "Completion": "lockstep.generate",
    "Decoder": "lockstep.model",
    "Engine": "lockstep.generate",
    "EngineConfig": "lockstep.config",
    "EvalConfig": "lockstep.config",
    "ModelConfig": "lockstep.model",
    "SamplingParams": "lockstep.generate",
    "StopRun": "lockstep.errors",
    "build_model": "lockstep.model",
    "load_model": "lockstep.checkpoint",
    "save_model": "lockstep.model",
    "evaluate": "lockstep.rl.evaluate",
    "finetune": "lockstep.train.sft",
    "pretrain": "lockstep.train.pretrain",
    "reinforce": "lockstep.rl.reinforce",
    "score": "lockstep.train",
}

__all__ = [
    "Completion",
    "Decoder",
    "Engine",
    "EngineConfig",
    "EvalConfig",
    "ModelConfig",
    "SamplingParams",
    "StopRun",
    "build_model",
    "evaluate",
    "finetune",
    "load_model",
    "pretrain",
    "reinforce",
    "save_model",
    "score",
]


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
