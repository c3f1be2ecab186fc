"""Accepts connections of generators: they are authenticated, receive the run's description, and join its pool."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Mapping
from typing import Any

from lockstep.errors import one_line
from lockstep.observe import announce, log
from lockstep.rl.generators.channel import HANDSHAKE_SECONDS, Channel, Closed, Listener
from lockstep.rl.generators.channel_remote import ChannelRemote, MonitoredChannel
from lockstep.rl.generators.pool import GeneratorPool
from lockstep.version import __version__

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]{0,63}")
"""Of a generator; used in metrics, logs and file names."""


class GeneratorRegistry:
    """Listens, in a thread, for generators that know the run's key. A context manager."""

    def __init__(self, pool: GeneratorPool, listener: Listener, welcome: Mapping[str, Any], capacity: int):
        """welcome: describes the run to a generator. capacity: samples that each decodes at a time."""
        self._pool, self._listener, self._welcome, self._capacity = pool, listener, welcome, capacity
        self._greeting = threading.Lock()
        self._rank_channels: set[Channel] = set()
        """Connections of all ranks but the first of each generator."""
        self._closed = False
        self._thread = threading.Thread(target=self._listen, name="generator registry", daemon=True)

    def __enter__(self) -> GeneratorRegistry:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._thread.join()
        with self._greeting:
            self._closed = True
        for name in self._pool.names:
            if remote := self._pool.leave(name):
                remote.close()
        for channel in list(self._rank_channels):
            channel.close()

    def _listen(self) -> None:
        while True:
            try:
                caller = self._listener.accept()
            except Closed:
                return
            # One thread per connection, so that a silent one does not delay the others.
            threading.Thread(target=self._greet, args=(caller,), name="greeting", daemon=True).start()

    def _greet(self, caller: socket.socket) -> None:
        channel: Channel | None = None
        try:
            channel = self._listener.greet(caller)
            hello, _ = channel.receive(HANDSHAKE_SECONDS)
            if problem := self._problem(hello):
                channel.send({"problem": problem})
                raise Closed(f"a generator on {hello['host']}: {problem}")
            if "generator" in hello:
                self._monitor_rank(channel, hello)
            else:
                self._admit(channel, hello)
        except Exception as error:
            # Always closes the connection, as the caller waits for a response.
            if channel is not None:
                channel.close()
            log.warning("a connection was rejected: %s", one_line(error))

    def _problem(self, hello: Mapping[str, Any]) -> str:
        """Why a generator cannot join; empty if it can."""
        name = hello.get("name", "")
        if hello["lockstep"] != __version__:
            return f"it runs lockstep {__version__}, you {hello['lockstep']}; install the same version on both sides"
        if name and not NAME.fullmatch(name):
            return f"the name {name!r} is used in metrics and files; give one of letters, digits and _ . : @ -"
        if name in self._pool.banned:
            return f"{name} sent invalid data and gets no more requests in this run"
        return ""

    def _admit(self, channel: Channel, hello: Mapping[str, Any]) -> None:
        with self._greeting:
            if self._closed:
                channel.close()
                return
            name = hello["name"] or self._free_name()
            # A generator that connects again under its name has been restarted.
            if previous := self._pool.leave(name):
                previous.close()
            monitored = MonitoredChannel(channel, self._welcome["silence_seconds"], hello)
            remote = ChannelRemote(name, self._capacity, monitored)
            channel.send({**self._welcome, "name": name})
            # Before it starts, so that one that is lost at once is removed.
            self._pool.join(remote)
            remote.start(self._pool)
        ranks = f", {hello['tensor']} ranks" if hello["tensor"] > 1 else ""
        announce(f"rl: {name} joins, process {hello['pid']} on {hello['host']}{ranks}")

    def _monitor_rank(self, channel: Channel, hello: Mapping[str, Any]) -> None:
        """Receives the heartbeats of another rank of a generator, which is lost if they stop."""
        name, why = hello["generator"], ""
        with self._greeting:
            remote = None if self._closed else self._pool.remote(name)
            self._rank_channels.add(channel)
        monitored = MonitoredChannel(channel, self._welcome["silence_seconds"], hello)
        try:
            while remote is not None and self._pool.remote(name) is remote:
                monitored.next()
        except Closed as error:
            why = str(error)
        finally:
            channel.close()
            self._rank_channels.discard(channel)
        if why and remote is not None and self._pool.remote(name) is remote:
            self._pool.lost(remote, f"its rank {hello['rank']}: {why}")
            remote.close()

    def _free_name(self) -> str:
        taken = {*self._pool.names, *self._pool.required, *self._pool.banned}
        return next(name for number in range(len(taken) + 1) if (name := f"generator_{number}") not in taken)
