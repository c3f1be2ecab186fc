"""The settings of a server of the training API."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from lockstep.config.bounds import Above, AtLeast, AtMost
from lockstep.config.engine import EngineConfig
from lockstep.config.train import Arithmetic


@dataclass
class TrainServerConfig:
    """A server of the training API, for the `tinker` client and its cookbook: many clients, each with an adapter."""

    model: str
    """Hugging Face folder, a run's folder (its newest checkpoint), or ORGANISATION/MODEL[@REVISION] of the hub."""
    output: str = "train-server"
    """Folder of the saved states."""
    host: str = "127.0.0.1"
    """Address to listen on; any but a loopback address needs an API key."""
    port: Annotated[int, AtLeast(0), AtMost(65535)] = 8100
    """Port to listen on; 0: any free one."""
    model_name: str = ""
    """Name that clients use for the model; empty: what `model` says."""
    dtype: Annotated[str, "dtype"] = "auto"
    """`bfloat16` or `float32`; auto or empty: as in the files."""
    arithmetic: Arithmetic = "auto"
    """On a CPU: `portable`, `bf16_pairs` or `bf16_tiles`; auto: the one that the model was trained in, if known, else
    the fastest."""
    device: str = ""
    """`cpu`, `cuda` or `cuda:1` …; empty: the machine's accelerator if it has one."""
    api_key: str = ""
    """Key that clients send; empty: the environment variable TINKER_API_KEY; if that is empty too, any."""
    tokens_per_microbatch: Annotated[int, Above(0)] = 8192
    """Tokens per forward and backward pass; between two passes, others sample and train."""
    max_models: Annotated[int, Above(0)] = 64
    """Maximum number of models in training at a time, of all clients."""
    max_waiting: Annotated[int, Above(0)] = 4096
    """Maximum number of samples running or waiting; clients send further ones again."""
    session_seconds: Annotated[float, Above(0)] = 300.0
    """Seconds of silence after which a session ends and its models are freed; clients send a heartbeat every ten."""
    max_state_bytes: Annotated[int, Above(0)] = 100 * 2**30
    """Maximum size of all saved states in bytes."""
    max_body_bytes: Annotated[int, Above(0)] = 64 * 2**20
    """Maximum size of a request's body in bytes, compressed or not."""
    max_connections: Annotated[int, Above(0)] = 2048
    """Maximum number of open connections; further ones are closed at once."""
    client_seconds: Annotated[float, AtLeast(0)] = 60.0
    """Seconds that a client has to send a request, and to read the response; then its connection is closed. 0: no
    limit."""
    shutdown_seconds: Annotated[float, AtLeast(0)] = 5.0
    """Seconds that running requests have after SIGTERM or SIGINT before they are aborted."""
    engine: EngineConfig = field(default_factory=EngineConfig)
