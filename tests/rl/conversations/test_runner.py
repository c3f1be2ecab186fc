"""The environment's side of conversations, without a model: limits of time hold whatever an environment does."""

import asyncio
import contextlib
import math
import time

import pytest

import lockstep.rl as rl
from lockstep.config import RewardConfig
from lockstep.rl.conversations.runner import ConversationEnded, ConversationRunner
from lockstep.rl.grading.calling import INVALID, TIMEOUT

GIVEN_UP_AFTER = 20.0
"""Seconds: without its limit of time a conversation here would never end."""


def ended(environment, *names, answers=True, **rewards):
    """How each conversation ends, by its example's prompt, where the model says nothing more, or does not answer."""
    examples, ends = [rl.Example(name) for name in names], {}
    begun = time.monotonic()
    with ConversationRunner(environment, examples, RewardConfig(**({"seconds": 0.2} | rewards))) as runner:
        while len(ends) < len(names):
            assert time.monotonic() - begun < GIVEN_UP_AFTER, f"only {list(ends)} have ended"
            if isinstance(said := runner.next(wait=False), ConversationEnded):
                ends[names[said.number]] = said
            elif said is not None and answers:
                runner.answer(said.number, said.request, None)
            else:
                time.sleep(0.001)
    return ends


def test_a_conversation_that_is_over_and_asks_on_and_on_has_its_limit_of_time():
    class Deaf(rl.ConversationEnvironment):
        async def converse(self, example, chat):
            chat.add(example.prompt)
            while example.prompt == "deaf":
                try:
                    await chat.reply()
                except Exception:
                    await asyncio.sleep(0.001 * self.waits)
            return 1.0

        waits = False

    class Patient(Deaf):
        waits = True

    for environment in (Deaf(), Patient()):
        ends = ended(environment, "deaf", "other", concurrent=1)
        assert ends["deaf"].outcome.cause == TIMEOUT and ends["other"].outcome.cause == ""


def test_a_conversation_that_gives_up_a_reply_twice_without_a_place_has_its_limit_of_time():
    class Hasty(rl.ConversationEnvironment):
        def __init__(self):
            super().__init__()
            self.busy, self.given_up = asyncio.Event(), asyncio.Event()

        async def converse(self, example, chat):
            chat.add(example.prompt)
            if example.prompt == "busy":  # has the only place, until the other has given up
                self.busy.set()
                await self.given_up.wait()
                return 1.0
            reply = asyncio.ensure_future(chat.reply())
            await self.busy.wait()
            for _ in range(2):
                reply.cancel()
                await asyncio.sleep(0)
            self.given_up.set()
            await asyncio.sleep(3600)

    ends = ended(Hasty(), "hasty", "busy", answers=False, concurrent=1, seconds=0.5)
    assert ends["hasty"].outcome.cause == TIMEOUT and ends["busy"].outcome.cause == ""


def test_what_a_conversation_has_left_behind_takes_nobodys_place():
    class Leaving(rl.ConversationEnvironment):
        async def converse(self, example, chat):
            chat.add(example.prompt)
            if example.prompt == "leaves":
                left = asyncio.ensure_future(chat.reply())
                await asyncio.sleep(0.01)
                left.cancel()
            else:
                await asyncio.sleep(0.02)
            return 1.0

    ends = ended(Leaving(), "leaves", "one", "two", concurrent=1, seconds=5.0)
    assert [e.outcome.cause for e in ends.values()] == [""] * 3


def test_an_answer_to_a_request_that_was_given_up_is_not_the_next_ones():
    received = []

    class Impatient(rl.ConversationEnvironment):
        async def converse(self, example, chat):
            chat.add(example.prompt)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(chat.reply(), 0.02)
            received.append((await chat.reply()).text)
            return 1.0

    with ConversationRunner(Impatient(), [rl.Example("p")], RewardConfig(seconds=5)) as runner:
        requests = [runner.next(wait=True) for _ in range(2)]
        for request, text in zip(requests, ("old", "new")):
            runner.answer(request.number, request.request, rl.Reply(text))
        assert isinstance(runner.next(wait=True), ConversationEnded) and received == ["new"]


@pytest.mark.parametrize("seconds", [None, 5, {"x": "a"}, {"x": math.nan}, {"x": -1.0}, {1: 1.0}, {"x": 10**400}])
def test_times_that_are_none_cost_their_own_conversation(seconds):
    class Odd(rl.ConversationEnvironment):
        async def converse(self, example, chat):
            if example.prompt == "odd":
                chat.seconds = seconds
            else:
                chat.seconds["x"] = 2
            return 1.0

    ends = ended(Odd(), "odd", "even")
    assert ends["odd"].outcome.cause == INVALID and "chat.seconds" in ends["odd"].outcome.message
    assert ends["odd"].seconds == {} and ends["even"].seconds == {"x": 2.0} and not ends["even"].outcome.cause
