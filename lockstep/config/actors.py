"""Generators in separate processes, next to the training ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal
from urllib.parse import urlsplit

from lockstep.config.bounds import Above, AtLeast, AtMost
from lockstep.config.parallel import MAX_TENSOR

LOCAL = "local"
"""In `hosts`: the trainer's own host."""
ANYWHERE = ("", "0.0.0.0", "::")
"""Addresses to listen on that cannot be connected to."""


@dataclass
class ActorsConfig:
    """Generators that sample for a reinforcement run: how many, and where."""

    generators: Annotated[int, AtLeast(0), AtMost(1024)] = 0
    """Generators that the run starts, each a process or a tensor-parallel group of processes. 0: the training ranks
    also sample, unless `port` lets other generators join."""
    hosts: tuple[str, ...] = ()
    """Where to start these generators, in turn: Monarch workers (tcp://HOST:PORT, tls://HOST:PORT), which start them
    on their own hosts, and `local`, the trainer's host. Empty: all on the trainer's host."""
    tensor: Annotated[int, AtLeast(1)] = 1
    """Tensor-parallel ranks per generator: 1, 2, 4 or 8."""
    threads: Annotated[int, AtLeast(0)] = 0
    """CPU threads per generator process; 0: an even share of the CPUs."""
    host: str = "127.0.0.1"
    """Address on which the trainer's first rank accepts generators; other hosts cannot reach a loopback address."""
    port: Annotated[int, AtLeast(0), AtMost(65535)] = 0
    """Port on which the trainer accepts generators; those started elsewhere (`lockstep generator`) can join at any time
    during the run. 0: any free port, for generators that the run starts itself."""
    urls: tuple[str, ...] = ()
    """Servers that generate: `lockstep serve` with an admin key, or vLLM. They read new weights from the run's folder,
    which must have the same path on their hosts; their keys are LOCKSTEP_API_KEY and LOCKSTEP_ADMIN_KEY."""
    silence_seconds: Annotated[float, AtLeast(0.1)] = 1.5
    """Seconds of silence after which a generator counts as dead; generators send heartbeats five times as often."""
    start_seconds: Annotated[float, Above(0)] = 120.0
    """Seconds to wait for the first generator, and for a replacement once none is left."""
    max_staleness: Annotated[int, AtLeast(0)] = 0
    """Maximum number of versions by which a token's sampling weights are behind the step that trains on it: that many
    steps are sampled ahead, while others are trained. 0: sampling and training alternate."""
    on_update: Literal["continue", "finish"] = "continue"
    """What generators do when new weights arrive while they sample: `continue` loads them at once and continues
    rollouts with them, unless finishing these is less work; `finish` finishes started rollouts first, so that the run
    does not depend on timing (except for conversations, whose later turns are requested when they come)."""
    keep_copy: bool = True
    """Whether ranks that both train and sample keep the copy of the weights that they sample from while they train. If
    not, its memory is free for training, and the copy is made again after each step; the bits are the same. There is no
    copy if the generator reads the trainer's weights, as in one process or on tensor-parallel ranks in float32."""

    def problems(self, reduction_chunks: int) -> Iterator[str]:
        """A message for each combination that cannot work."""
        if self.tensor not in (1, 2, 4, MAX_TENSOR):
            yield f"actors.tensor is {self.tensor}; give 1, 2, 4 or {MAX_TENSOR}"
        if 0 < reduction_chunks < self.tensor:
            yield (
                f"parallel.reduction_chunks is {reduction_chunks}; it must be at least actors.tensor "
                f"({self.tensor}): leave it at 0, or give at least that many (which changes the bits)"
            )
        if not self.host:
            yield "actors.host is empty, which would mean every address of this host; give one, such as 0.0.0.0 for all"
        if self.tensor > 1 and not self.processes:
            yield "actors.tensor applies only to separate generators; give actors.generators or actors.port too"
        if self.max_staleness and not self.separate:
            yield (
                "actors.max_staleness needs sampling to run during training, which the training ranks cannot do; give "
                "actors.generators too"
            )
        if not self.keep_copy and self.separate:
            yield "actors.keep_copy applies to ranks that both train and sample; with separate generators, remove it"
        yield from self._host_problems()

    def _host_problems(self) -> Iterator[str]:
        if self.hosts and not self.generators:
            yield "actors.hosts is set, but actors.generators is 0; give the number of generators to start"
        workers = [host for host in self.hosts if host != LOCAL]
        for worker in workers:
            address = worker_address(worker)
            if not address:
                yield f"actors.hosts: {worker!r} is not tcp://HOST:PORT, tls://HOST:PORT or {LOCAL}; correct it"
            elif self.host in ANYWHERE or (_is_loopback(self.host) and not _is_loopback(address[0])):
                yield (
                    f"actors.host is {self.host}, which generators on the host of {worker} cannot reach; give an "
                    "address of the trainer's host that they can reach"
                )

    @property
    def workers(self) -> list[str]:
        """The Monarch workers that start generators, without duplicates."""
        return sorted({*self.hosts} - {LOCAL})

    @property
    def separate(self) -> bool:
        """Whether generators other than the training ranks sample."""
        return self.processes or bool(self.urls)

    @property
    def processes(self) -> bool:
        """Whether Lockstep's generator processes sample, which read the weights from the trainer's memory."""
        return self.generators > 0 or self.port > 0


def worker_address(worker: str) -> tuple[str, int] | None:
    """Host and port of a Monarch worker; None if it is not one."""
    try:
        parts = urlsplit(worker)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    whole = parts.scheme in ("tcp", "tls") and parts.netloc == worker.partition("://")[2]
    return (host, port) if whole and host and port and not parts.username else None


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
