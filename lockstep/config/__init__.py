"""The dataclasses every run is made of, their validation, and TOML in and out.

A run is described by one flat dataclass with nested ones (`train`, `engine`, `compile`, `parallel` …). The docstring
under a field is its help on the command line. `validate` refuses impossible combinations before a run begins.
"""

from lockstep.config.actors import ActorsConfig
from lockstep.config.alarms import ALARMS, AlarmConfig
from lockstep.config.algorithm import ALGORITHMS, Algorithm, algorithm_of, with_algorithm
from lockstep.config.checkpoint import CheckpointConfig
from lockstep.config.data import DataConfig
from lockstep.config.engine import CompileConfig, EngineConfig, RanksConfig
from lockstep.config.evaluation import EvalConfig
from lockstep.config.faults import FaultConfig
from lockstep.config.lora import LoraConfig
from lockstep.config.observe import ObserveConfig
from lockstep.config.parallel import ParallelConfig
from lockstep.config.precision import PrecisionConfig
from lockstep.config.preferences import DPOConfig, PreferenceConfig, RewardModelConfig
from lockstep.config.recompute import RecomputeConfig
from lockstep.config.rewards import RewardConfig
from lockstep.config.runs import PretrainConfig, RLConfig, ServeConfig, SFTConfig
from lockstep.config.toml import CONFIG, from_toml, recorded_run, to_toml
from lockstep.config.train import Arithmetic, Dtype, ModelDtype, TrainConfig
from lockstep.config.train_server import TrainServerConfig
from lockstep.config.validation import validate, validate_run

__all__ = [
    "ALARMS",
    "ALGORITHMS",
    "CONFIG",
    "ActorsConfig",
    "AlarmConfig",
    "Algorithm",
    "Arithmetic",
    "CheckpointConfig",
    "CompileConfig",
    "DPOConfig",
    "DataConfig",
    "Dtype",
    "EngineConfig",
    "EvalConfig",
    "FaultConfig",
    "LoraConfig",
    "ModelDtype",
    "ObserveConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "PreferenceConfig",
    "PretrainConfig",
    "RLConfig",
    "RanksConfig",
    "RecomputeConfig",
    "RewardConfig",
    "RewardModelConfig",
    "SFTConfig",
    "ServeConfig",
    "TrainConfig",
    "TrainServerConfig",
    "algorithm_of",
    "from_toml",
    "recorded_run",
    "to_toml",
    "validate",
    "validate_run",
    "with_algorithm",
]
