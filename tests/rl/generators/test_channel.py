"""Messages arrive as they were sent, and only between peers that know the key."""

import os
import resource
import socket
import threading

import pytest

from lockstep.errors import UserError
from lockstep.rl.generators.channel import HEADER, Channel, Closed, Listener, call, make_key, read_key

KEY = bytes(range(32))


def both(one, other):
    """What two functions that wait for each other return; a Closed that one raises is its result."""
    results = {}

    def run(name, function):
        try:
            results[name] = function()
        except Closed as error:
            results[name] = error

    thread = threading.Thread(target=run, args=("other", other))
    thread.start()
    run("one", one)
    thread.join()
    return results["one"], results["other"]


def connected(key=KEY, other=KEY):
    """Both ends of a connection, and the socket of the second."""
    here, there = socket.socketpair()
    return *both(lambda: Channel(here, key, called=True), lambda: Channel(there, other, called=False)), there


def test_messages_and_their_attachments_arrive_as_they_were_sent():
    here, there, _ = connected()
    here.send({"a": [1, 0.1, "é"]}, b"12", bytearray(b"345"))
    here.send("next")
    there.send([None])
    assert there.receive() == ({"a": [1, 0.1, "é"]}, bytearray(b"12345"))
    assert there.receive() == ("next", bytearray())
    assert here.receive(1) == ([None], bytearray())
    with pytest.raises(TimeoutError):
        here.receive(0.01)
    there.send("after a wait")
    assert here.receive()[0] == "after a wait"


def test_a_peer_without_the_key_is_refused_on_both_sides():
    here, there, _ = connected(other=KEY[::-1])
    assert isinstance(here, Closed) and isinstance(there, Closed) and "key" in str(here)


def test_a_peer_that_sends_back_what_it_receives_is_refused():
    here, there = socket.socketpair()

    def echo():
        while content := there.recv(4096):
            there.sendall(content)

    threading.Thread(target=echo, daemon=True).start()
    with pytest.raises(Closed, match="key"):
        Channel(here, KEY, called=True)
    there.close()


def test_a_peer_that_ends_stalls_or_sends_no_message_is_noticed():
    here, there, _ = connected()
    threading.Timer(0.05, there.close).start()
    with pytest.raises(Closed):
        here.receive()
    with pytest.raises(Closed):
        here.send("to nobody", bytes(2**22))
    for content, message in ((b"\1", "stopped in the middle"), (HEADER.pack(2, 0) + b"{]", "not JSON")):
        here, there, line = connected()
        line.sendall(content)
        with pytest.raises(Closed, match=message):
            here.receive(0.05)
    here, there, line = connected()
    line.sendall(HEADER.pack(20, 0))
    threading.Timer(0.05, there.close).start()
    patience = iter([True, True])
    with pytest.raises(Closed, match="gone"):  # in the middle, while it is waited for again and again
        here.receive(0.04, lambda: next(patience, False))


def test_a_listener_accepts_connections_on_loopback_until_it_is_closed():
    listener = Listener(KEY)
    host, port = listener.address
    assert host == "127.0.0.1"
    with pytest.raises(UserError, match=f"{port}.*choose another"):
        Listener(KEY, host, port)
    here, there = both(lambda: listener.greet(listener.accept()), lambda: call(host, port, KEY))
    here.send("hello")
    assert there.receive()[0] == "hello"
    listener.close()
    with pytest.raises(Closed):
        listener.accept()
    with pytest.raises(Closed, match="does not answer"):
        call(host, port, KEY)


def test_a_listener_without_file_descriptors_waits_for_some():
    listener = Listener(KEY)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    caller = socket.create_connection(listener.address)
    accepted = []
    thread = threading.Thread(target=lambda: accepted.append(listener.accept()), daemon=True)
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(4)]
    try:
        # None is left: those below the limit are all in use.
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        thread.start()
        thread.join(0.15)
        assert thread.is_alive() and not accepted
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for file in taken:
            os.close(file)
    thread.join(20)
    assert accepted
    caller.close()
    listener.close()


def test_a_key_file_is_readable_by_its_user_only(tmp_path):
    file = tmp_path / "key"
    key = make_key(file)
    assert read_key(file) == key and make_key(file) != key
    assert file.stat().st_mode & 0o777 == 0o600
    for content in ("", "zz", "00"):
        file.write_text(content)
        with pytest.raises(UserError, match="not the key of a run"):
            read_key(file)
    for mode in (0o640, 0o620, 0o604):
        file.chmod(mode)
        with pytest.raises(UserError, match="other users can read"):
            read_key(file)
