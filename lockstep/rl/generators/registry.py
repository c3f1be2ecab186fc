"""Accepts connections of generators: they are authenticated, receive the run's description, and join its pool."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from typing import Any

from lockstep.errors import one_line
from lockstep.observe import announce, log
from lockstep.rl.generators.channel import HANDSHAKE_SECONDS, Channel, Closed, Listener
from lockstep.rl.generators.channel_remote import ChannelRemote, MonitoredChannel
from lockstep.rl.generators.pool import GeneratorPool
from lockstep.rl.generators.response_checks import InvalidResponse, checked_hello
from lockstep.version import __version__


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
            self._refuse_other_version(channel, hello)
            self._refuse_invalid(channel, hello)
            if "generator" in hello:
                self._monitor_rank(channel, hello)
            else:
                self._admit(channel, hello)
        except Exception as error:
            # Always closes the connection, as the caller waits for a response.
            if channel is not None:
                channel.close()
            log.warning("a connection was rejected: %s", one_line(error))

    def _refuse_other_version(self, channel: Channel, hello: Any) -> None:
        version = one_line(hello.get("lockstep"), 40) if isinstance(hello, dict) else ""
        if version and version != __version__:
            channel.send(
                {"problem": f"it runs lockstep {__version__}, you {version}; install the same version on both sides"}
            )
            raise Closed(f"lockstep {version} on {one_line(hello.get('host'), 100)}, but this is {__version__}")

    def _refuse_invalid(self, channel: Channel, hello: Any) -> None:
        try:
            name = checked_hello(hello).get("name")
            if name in self._pool.banned:
                raise InvalidResponse(f"{name}, which sent invalid data and gets no more requests in this run")
        except InvalidResponse as error:
            channel.send({"problem": str(error)})
            raise

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
            remote = ChannelRemote(name, channel, self._capacity, monitored)
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
        except TimeoutError:
            why = f"it has sent nothing for {self._welcome['silence_seconds']:g} s (actors.silence_seconds)"
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
