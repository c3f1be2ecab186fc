"""Messages come as they were sent, from those who know the key, and nothing else comes."""

import socket
import threading

import pytest

from lockstep.errors import UserError
from lockstep.rl.generators.channel import HEADER, NONCE, TAG, Channel, Closed, Listener, call, make_key, read_key

KEY = bytes(range(32))


def _pair(key=KEY, other=KEY):
    """Both ends of a connection, greeted; what an end could not be is the error."""
    here, there = socket.socketpair()
    return _both(lambda: Channel(here, key, called=True), lambda: Channel(there, other, called=False))


def _both(one, other):
    found = []

    def run():
        try:
            found.append(other())
        except Closed as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        first = one()
    except Closed as error:
        first = error
    thread.join()
    return first, found[0]


def test_messages_and_what_travels_beside_them_come_as_they_were_sent():
    here, there = _pair()
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


def test_one_without_the_key_is_refused_on_both_sides():
    here, there = _pair(other=KEY[::-1])
    assert isinstance(here, Closed) and isinstance(there, Closed) and "key" in str(here)


def test_one_that_sends_back_what_it_gets_is_refused():
    here, there = socket.socketpair()

    def echo():
        while content := there.recv(4096):
            there.sendall(content)

    threading.Thread(target=echo, daemon=True).start()
    with pytest.raises(Closed, match="key"):
        Channel(here, KEY, called=True)
    there.close()


class _Between:
    """Somebody on the line, who sees all and may change it."""

    def __init__(self):
        self.here, near = socket.socketpair()
        far, self.there = socket.socketpair()
        self.near, self.far = near, far
        self.greetings = 2 * [NONCE + TAG]

    def greet(self):
        def carry(source, target):
            for length in (NONCE, TAG):
                target.sendall(source.recv(length, socket.MSG_WAITALL))

        threads = [threading.Thread(target=carry, args=way) for way in ((self.near, self.far), (self.far, self.near))]
        for thread in threads:
            thread.start()
        ends = _both(lambda: Channel(self.here, KEY, called=True), lambda: Channel(self.there, KEY, called=False))
        for thread in threads:
            thread.join()
        return ends

    def seen(self):
        return self.near.recv(4096)


@pytest.mark.parametrize("place", [HEADER.size, HEADER.size + 7, -TAG - 1, -1])
def test_a_message_that_was_changed_is_refused(place):
    line = _Between()
    here, there = line.greet()
    here.send("weights", b"content")
    changed = bytearray(line.seen())
    changed[place] ^= 1
    line.far.sendall(changed)
    with pytest.raises(Closed, match="altered"):
        there.receive()


def test_a_message_that_is_repeated_left_out_or_sent_back_is_refused():
    for repeated, left_out in ((True, False), (False, True)):
        line = _Between()
        here, there = line.greet()
        here.send("first")
        first = line.seen()
        here.send("second")
        second = line.seen()
        line.far.sendall(second if left_out else first)
        if repeated:
            there.receive()
            line.far.sendall(first)
        with pytest.raises(Closed, match="altered"):
            there.receive()
    line = _Between()
    here, _ = line.greet()
    here.send("first")
    line.near.sendall(line.seen())
    with pytest.raises(Closed, match="altered"):
        here.receive()


def test_one_that_is_gone_is_noticed_while_waiting_and_in_the_middle_of_a_message():
    here, there = _pair()
    waiting = threading.Timer(0.05, there.close)
    waiting.start()
    with pytest.raises(Closed):
        here.receive()
    with pytest.raises(Closed):
        here.send("to nobody", bytes(2**22))
    line = _Between()
    here, there = line.greet()
    here.send("cut off here")
    line.far.sendall(line.seen()[:10])
    line.far.close()
    with pytest.raises(Closed, match="gone"):
        there.receive()


def test_a_listener_hears_callers_on_loopback_only():
    listener = Listener(KEY)
    host, port = listener.address
    assert host == "127.0.0.1"
    with pytest.raises(UserError, match=f"{port}.*choose another"):
        Listener(KEY, host, port)
    here, there = _both(lambda: listener.greet(listener.accept()), lambda: call(host, port, KEY))
    here.send("hello")
    assert there.receive()[0] == "hello"
    listener.close()
    with pytest.raises(Closed):
        listener.accept()
    with pytest.raises(Closed, match="does not answer"):
        call(host, port, KEY)


def test_a_key_is_for_its_user_alone(tmp_path):
    key = make_key(tmp_path / "key")
    assert read_key(tmp_path / "key") == key and make_key(tmp_path / "key") != key
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(UserError, match="other users can read"):
        read_key(tmp_path / "key")
    for content in ("", "zz", "00"):
        (tmp_path / "key").unlink()
        make_key(tmp_path / "key")
        (tmp_path / "key").write_text(content)
        with pytest.raises(UserError, match="not the key of a run"):
            read_key(tmp_path / "key")
