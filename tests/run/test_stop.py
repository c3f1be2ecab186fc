"""Signals: what they interrupt, what they wait for, and the deadline."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from lockstep.run.stop import Interrupted, StopSignal


@pytest.mark.parametrize(
    ("saved", "there"),
    [
        ("None", "It has no complete checkpoint; --resume starts it again"),
        ("40", "Its newest complete checkpoint is from step 40; --resume continues from there"),
    ],
)
def test_what_does_not_end_within_its_deadline_is_ended_and_told_what_is_left(saved, there):
    code = f"""
import os, signal, time
from lockstep.run.stop import StopSignal
with StopSignal(0.2, lambda: {saved}):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)
"""
    result = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert result.returncode == 124 and "SIGTERM came 0 s ago" in result.stderr
    assert "SIGTERM: the run saves and ends, within 0 s (faults.stop_seconds); a second signal" in result.stderr
    assert f"{there}; --checkpoint.every N saves every N steps" in result.stderr


def test_a_signal_interrupts_only_what_is_interruptible():
    done = []
    with StopSignal(60) as stop:
        with stop.interruptible():
            done.append("before")
        os.kill(os.getpid(), signal.SIGTERM)
        done.append("after")
        with suppress(Interrupted), stop.interruptible():
            done.append("although a signal has come before")
    with StopSignal(60) as stop, suppress(Interrupted), stop.interruptible():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    assert done == ["before", "after"]


def test_a_signal_waits_for_the_end_of_what_is_deferred():
    done = []
    with StopSignal(60) as stop:
        with suppress(Interrupted), stop.interruptible():
            with stop.deferred():
                os.kill(os.getpid(), signal.SIGINT)
                done.append("deferred")
            done.append("what follows it")
        assert stop.received == signal.SIGINT
        with stop.deferred(), stop.interruptible():
            done.append("interruptible work in it too")
    assert done == ["deferred", "interruptible work in it too"]


def test_shared_work_ends_where_its_ranks_poll_even_for_another_ranks_signal():
    with StopSignal(60) as stop:
        own, others = [], [0.0]
        poll = stop.polling(lambda received: own.append(received) or received + others[0], every=2)
        poll()
        assert not own, "nothing asks outside of shared work"
        with stop.interruptible(shared=True):
            for _ in range(4):
                poll()
            os.kill(os.getpid(), signal.SIGTERM)
            own.append("goes on until it polls")
            with pytest.raises(Interrupted):
                poll(), poll()
        assert own == [0.0, 0.0, "goes on until it polls", 1.0]
    with StopSignal(60) as stop, stop.interruptible(shared=True):
        others = [1.0]
        with pytest.raises(Interrupted):
            stop.polling(lambda received: received + 1.0)()
        with stop.deferred():
            stop.polling(lambda received: received + 1.0)()
