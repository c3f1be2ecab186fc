"""Generators in processes of their own, beside the ranks that train."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal
from urllib.parse import urlsplit

from lockstep.config.bounds import Above, AtLeast, AtMost
from lockstep.config.parallel import MOST_TENSOR

LOCAL = "local"
"""Among `hosts`: the trainer's own."""
ANYWHERE = ("", "0.0.0.0", "::")
"""Addresses that can be listened at and not called."""


@dataclass
class ActorsConfig:
    """Generators that sample for a reinforcement run, how many and where."""

    generators: Annotated[int, AtLeast(0), AtMost(1024)] = 0
    """Generators that the run starts, each a process, or a tensor group of them. 0: the ranks that train sample too,
    unless `port` lets others join."""
    hosts: tuple[str, ...] = ()
    """Where these generators are started, in turn: Monarch workers (tcp://HOST:PORT, tls://HOST:PORT), which start them
    on their hosts, and `local`, the trainer's own host. Empty: all on its own."""
    tensor: Annotated[int, AtLeast(1)] = 1
    """Ranks of each generator that share the model: 1, 2, 4 or 8."""
    threads: Annotated[int, AtLeast(0)] = 0
    """Of each generator's process; 0: an even share of the CPUs."""
    host: str = "127.0.0.1"
    """Address of the trainer's first rank at which generators call; those of other hosts reach no loopback address."""
    port: Annotated[int, AtLeast(0), AtMost(65535)] = 0
    """Port that generators call; those that are started elsewhere (`lockstep generator`) join at it while the run goes
    on. 0: any free one, for those that the run starts itself."""
    urls: tuple[str, ...] = ()
    """Servers that generate: `lockstep serve` with an admin key, or vLLM. They read new weights from the run's folder,
    which they must see under the same path; their keys are LOCKSTEP_API_KEY and LOCKSTEP_ADMIN_KEY."""
    silence_seconds: Annotated[float, AtLeast(0.1)] = 1.5
    """A generator that says nothing for so long is taken for dead; they say something five times as often."""
    start_seconds: Annotated[float, Above(0)] = 120.0
    """Time that the first generator is given to be ready, and a run without any to get another one."""
    max_staleness: Annotated[int, AtLeast(0)] = 0
    """Versions that the weights of a sampled token may be behind those of the step that trains on it: so many steps
    are sampled ahead, while others are trained. 0: sampling and training take turns."""
    on_update: Literal["continue", "finish"] = "continue"
    """What generators do with new weights while they sample: `continue` takes them at once, and rollouts go on with
    them, unless finishing these is less work; `finish` ends what it has begun first, so that the run does not depend on
    who was how fast (conversations aside, whose later turns are asked when they come)."""

    keep_copy: bool = True
    """Whether ranks that train and sample keep the copy of the weights that they sample from while they train. Without,
    its memory is free for training, and is filled again after each step; the bits are the same. Weights that are read
    where the trainer has them are no copy, as in one process or of tensor-parallel ranks in float32."""

    def problems(self, reduction_chunks: int) -> Iterator[str]:
        """What cannot be."""
        if self.tensor not in (1, 2, 4, MOST_TENSOR):
            yield f"actors.tensor is {self.tensor}; give 1, 2, 4 or {MOST_TENSOR}"
        if 0 < reduction_chunks < self.tensor:
            yield (
                f"parallel.reduction_chunks is {reduction_chunks}; it must be no less than actors.tensor "
                f"({self.tensor}): leave it at 0, or give at least as many (and with them other bits)"
            )
        if not self.host:
            yield "actors.host is empty, which would be every address of this host; name one, such as 0.0.0.0 for all"
        if self.tensor > 1 and not self.processes:
            yield "actors.tensor is of generators in processes of their own; give actors.generators or actors.port too"
        if self.max_staleness and not self.separate:
            yield (
                "actors.max_staleness samples while others are trained, which the ranks that train cannot; give "
                "actors.generators too"
            )
        if not self.keep_copy and self.separate:
            yield "actors.keep_copy is of ranks that train and sample, which these leave to others; leave it out"
        yield from self._host_problems()

    def _host_problems(self) -> Iterator[str]:
        if self.hosts and not self.generators:
            yield "actors.hosts says where generators are started, and actors.generators is 0; give how many"
        workers = [host for host in self.hosts if host != LOCAL]
        for worker in workers:
            address = worker_address(worker)
            if not address:
                yield f"actors.hosts: {worker!r} is not tcp://HOST:PORT, tls://HOST:PORT or {LOCAL}; correct it"
            elif self.host in ANYWHERE or (_is_loopback(self.host) and not _is_loopback(address[0])):
                yield (
                    f"actors.host is {self.host}, which generators on the host of {worker} cannot call; give the "
                    "address of the trainer's host that they reach"
                )

    @property
    def workers(self) -> list[str]:
        """The Monarch workers that start generators, each once."""
        return sorted({*self.hosts} - {LOCAL})

    @property
    def separate(self) -> bool:
        """Whether others than the training ranks sample."""
        return self.processes or bool(self.urls)

    @property
    def processes(self) -> bool:
        """Whether processes of lockstep sample, which read the weights from the trainer's memory."""
        return self.generators > 0 or self.port > 0


def worker_address(worker: str) -> tuple[str, int] | None:
    """Host and port of a Monarch worker; None where it is none."""
    try:
        parts = urlsplit(worker)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    whole = parts.scheme in ("tcp", "tls") and parts.netloc == worker.partition("://")[2]
    return (host, port) if whole and host and port and not parts.username else None


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
