"""Steps that are sampled ahead, from generators that are slow, late with weights, lost, and come back."""

import contextlib
import json
import random
import threading
import time
from collections import deque
from types import SimpleNamespace

import pytest

from lockstep.errors import RunStopped, UserError
from lockstep.generate import SamplingParams
from lockstep.rl.environments.protocol import Example
from lockstep.rl.generators.pool import GeneratorPool
from lockstep.rl.generators.pool_sampler import PoolSampler
from lockstep.rl.generators.remote import RemoteSample
from lockstep.rl.rollouts.ledger import Ledger, LedgerError
from lockstep.rl.rollouts.prefetcher import RolloutPrefetcher
from lockstep.rl.rollouts.prompts import PromptLoader
from lockstep.rl.rollouts.records import Rollout, of_versions

EXAMPLES = [Example(f"prompt {number}") for number in range(17)]
PROMPTS, SAMPLES = 4, 2


class Scripted:
    """A generator that does one thing at a time: takes weights, takes a request, or samples a token."""

    def __init__(self, name, pool, finish=False, room=3):
        self.name, self.capacity, self.pool, self.finish = name, room, pool, finish
        self.orders, self.held, self.version, self.statistics = deque(), {}, -1, {}

    def submit(self, request):
        self.orders.append(("ask", request.id, request.params, [list(s.token_ids) for s in request.samples]))

    def abort(self, request_id):
        self.orders.append(("abort", request_id))

    def load_weights(self, manifest):
        self.orders.append(("weights", manifest["version"]))

    def close(self):
        pass

    def work(self, draw):
        if self.orders and not (self.finish and self.orders[0][0] == "weights" and self.held):
            kind, about, *more = self.orders.popleft()
            if kind == "weights":
                self.version = about
                self.pool.has_weights(self, about)
            elif kind == "ask":
                params, tokens = more
                ends = [random.Random(f"{params.seed} {n}").randint(1, params.max_tokens) for n in range(params.n)]
                self.held[about] = params.seed, tokens, ends
                if all(len(own) >= end for own, end in zip(tokens, ends)):
                    del self.held[about]
            else:
                self.held.pop(about, None)
        elif self.held:
            about = draw.choice(list(self.held))
            seed, tokens, ends = self.held[about]
            index = draw.choice([n for n, own in enumerate(tokens) if len(own) < ends[n]])
            token = random.Random(f"{seed} {index} {len(tokens[index])} {self.version}").randrange(1000)
            tokens[index].append(token)
            reason = "stop" if len(tokens[index]) == ends[index] else None
            if all(len(own) == end for own, end in zip(tokens, ends)):
                del self.held[about]
            self.pool.sampled(
                self, [(about, index, RemoteSample([token], [-token / 1000], [], [self.version], reason))]
            )


class Run:
    """A trainer that only counts, over a fleet of scripted generators that a thread drives."""

    is_recorded, requests_at_once = False, True

    def __init__(
        self, depth, finish=False, generators=2, losses=0.0, seed=0, room=3, state=None, step=0, oversampling=1.0
    ):
        self.pool = GeneratorPool(1000, 1000, 10.0, finish)
        self.prompts = PromptLoader(EXAMPLES, seed=1)
        sampler = PoolSampler(self.pool)
        self.prefetcher = RolloutPrefetcher(
            self, self.prompts, sampler, PROMPTS, depth, lambda k: PoolSampler(self.pool, k), oversampling
        )
        self.step, self.trained, self.places, self.ledgers = step, {}, {}, {}
        self.remotes = [Scripted(f"generator_{n}", self.pool, finish, room) for n in range(generators)]
        self.losses, self.rng, self.ended = losses, random.Random(seed), threading.Event()
        if state:
            state = json.loads(json.dumps(state))
            self.prompts.restore(state["prompts"])
            self.prefetcher.restore(state["ahead"])
        self.prefetcher.complete(step)
        self.pool.load_weights({"version": step})
        for remote in self.remotes:
            self.pool.join(remote)
        self.driver = threading.Thread(target=self._drive)
        self.driver.start()
        self.pool.wait_for_weights()

    def draw(self, asked, step, extra_round, sampler, wanted):
        params = [
            SamplingParams(max_tokens=6, n=SAMPLES, seed=1000 * step + 100 * extra_round + n) for n in range(len(asked))
        ]
        first = wanted if wanted < len(asked) else None
        groups = sampler.generate([[len(example.prompt)] for example in asked], params, first)
        return [
            Rollout(
                example, group, [1], c.token_ids, c.logprobs, c.finish_reason, "",
                **of_versions(c.versions, sampler.weights_version),
            )
            for group, (example, completions) in enumerate(zip(asked, groups))
            for c in completions
        ]  # fmt: skip

    def _drive(self):
        lost = 0
        while not self.ended.is_set():
            place = self.rng.randrange(len(self.remotes))
            if not any(remote.orders or remote.held for remote in self.remotes):
                time.sleep(0.0002)
            elif self.rng.random() < self.losses:
                lost += 1
                self.pool.lost(self.remotes[place], "it is gone")
                gone = self.remotes[place]
                self.remotes[place] = Scripted(
                    f"{gone.name.split('.')[0]}.{lost}", self.pool, gone.finish, gone.capacity
                )
                self.pool.join(self.remotes[place])
            self.remotes[place].work(self.rng)

    def train(self, until, last=1000, extra_rounds=()):
        for step in range(self.step + 1, until + 1):
            self.prefetcher.begin(step, last)
            drawn, ledger, self.places[step] = [], Ledger(PROMPTS), []
            for extra_round in range(1 + (step in extra_rounds)):
                of_round = self.prefetcher.take_round(step, extra_round, 1 if extra_round else PROMPTS)()
                drawn += of_round.rollouts
                ledger.wanted = PROMPTS + extra_round
                self.places[step] += [of_round.places[rollout.group] for rollout in of_round.rollouts]
                ledger.add(of_round.rollouts, of_round.places)
            self.trained[step], self.ledgers[step] = drawn, ledger.places()
            self.step = step
            self.pool.load_weights({"version": step})
            self.prefetcher.complete(step)

    def state(self):
        return {"prompts": self.prompts.state(), "ahead": self.prefetcher.state()}

    def close(self):
        self.prefetcher.close()
        self.ended.set()
        self.driver.join()


def source(draw):
    return SimpleNamespace(draw=draw, is_recorded=False, requests_at_once=True)


@contextlib.contextmanager
def running(*arguments, **settings):
    run = Run(*arguments, **settings)
    try:
        yield run
    finally:
        run.close()


def ages(run):
    return {
        step: sorted({age for r in rollouts for age in r.staleness(step - 1)}) for step, rollouts in run.trained.items()
    }


def places(*runs):
    return [list(dict.fromkeys(of_step)) for run in runs for of_step in run.places.values()]


def plain(run, first=1):
    return {
        s: [(place, r.token_ids, r.logprobs, r.staleness(s - 1)) for place, r in zip(run.places[s], own)]
        for s, own in run.trained.items()
        if s >= first
    }


@pytest.mark.parametrize("finish", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_no_token_is_older_than_promised_whoever_is_slow_or_lost(finish, depth):
    with running(depth, finish, generators=3, losses=0.01) as run:
        run.train(10, last=10, extra_rounds=(3, 4))
    assert all(own[0] >= 0 and own[-1] <= depth for own in ages(run).values())
    assert max(own[-1] for own in ages(run).values()) == depth, "it is made use of"
    held = sorted(place for own in places(run) for place in own)
    assert len(set(held)) == len(held) == run.prompts.position - run.prompts.left_out
    for step, rollouts in run.trained.items():
        assert all(r.example is run.prompts.at(place) for place, r in zip(run.places[step], rollouts))
        assert all(len(r.logprobs) == len(r.token_ids) for r in rollouts)


@pytest.mark.parametrize(("before", "after"), [(3, 1), (1, 3), (3, 0), (0, 2)])
def test_a_resumed_run_loses_no_prompt_and_repeats_none_and_keeps_the_promise(before, after):
    with running(before, generators=2, losses=0.01) as first:
        first.train(3, last=10, extra_rounds=(2,))
        state = first.state()
    with running(after, generators=1, losses=0.01, seed=7, state=state, step=3) as second:
        second.train(10, last=10)
    held = [p for own in places(first, second) for p in own]
    assert len(set(held)) == len(held) == second.prompts.position - second.prompts.left_out
    assert all(own[-1] <= after and own[0] >= 0 for own in ages(second).values())


def test_samples_in_flight_resume_where_they_were():
    with running(2, seed=3) as first:
        first.train(3)
        first.prefetcher.wait()
        state = first.state()
        first.train(5, last=5)
    with running(2, seed=4, state=state, step=3) as second:
        assert second.state() == state  # a run that is saved again before it requests anything
        second.train(4, last=5)
    # All of it had been sampled, with versions that a run which begins at 3 cannot sample from.
    assert plain(second)[4] == plain(first)[4]
    for samples in state["ahead"]["samples"].values():
        for sample in samples:
            sample["finish_reason"] = "abort"
            for name in ("token_ids", "logprobs", "versions"):
                del sample[name][1:]
    with running(2, seed=4, state=state, step=3) as third:
        third.train(4, last=5)
    for (_, before, _, ages_before), (_, now, _, staleness) in zip(plain(first)[4], plain(third)[4]):
        assert now[0] == before[0] and len(now) == len(before)
        assert staleness[0] == ages_before[0] and set(staleness[1:]) <= {0}


@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("depth", [0, 2])
def test_with_finish_a_resumed_run_is_the_run_that_was_never_interrupted(depth, interrupted):
    with running(depth, True, seed=1) as whole:
        whole.train(9, last=9, extra_rounds=(4, 7))
    for stop in (3, 6):
        with running(depth, True, generators=1, seed=stop) as first:
            first.train(stop, last=9, extra_rounds=(4,))
            if interrupted:  # a step that was drawn is drawn again
                first.prefetcher.begin(stop + 1, 9)
                first.prefetcher.take_round(stop + 1, 0, PROMPTS)()
                first.prefetcher.take_round(stop + 1, 1, 1)()
            first.prefetcher.wait()  # what this step's weights sample may continue later
            state = first.state()
        with running(depth, True, generators=3, seed=2, state=state, step=stop) as second:
            second.train(9, last=9, extra_rounds=(4, 7))
        assert plain(second) == plain(whole, stop + 1)


@pytest.mark.parametrize("finish", [False, True])
def test_of_more_prompts_than_are_trained_on_the_stragglers_are_dropped_and_none_is_lost_or_repeated(finish):
    for stop in (2, 5):
        with running(2, finish, generators=2, losses=0.01 * (not finish), seed=stop, oversampling=1.5) as first:
            first.train(stop, last=9, extra_rounds=(2,))
            if finish:
                first.prefetcher.wait()
            state = first.state()
        with running(2, finish, generators=3, seed=1, state=state, step=stop, oversampling=1.5) as second:
            second.train(9, last=9)
        ledgers = first.ledgers | second.ledgers
        held = [place for own in ledgers.values() for place in own["trained"] + own["dropped"]["stragglers"]]
        assert sorted(held) == sorted(set(held)) and len(held) == second.prompts.position - second.prompts.left_out
        assert [len(own["dropped"]["stragglers"]) for own in ledgers.values()] == [2, 3] + [2] * 7
        assert {own[-1] for own in ages(second).values()} <= {0, 1, 2}
        with running(2, finish, generators=1, seed=2, oversampling=1.5) as whole:
            whole.train(9, last=9, extra_rounds=(2,))
        if finish:
            assert whole.ledgers == ledgers and plain(whole, stop + 1) == plain(second)
        assert not whole.pool._requests and not second.pool._requests


def test_the_buffer_is_counted_in_steps_and_samples_that_are_ready_or_in_flight():
    with running(2, generators=1) as run:
        of_a_step = PROMPTS * SAMPLES
        # While nobody drives the generator nothing is sampled.
        run.ended.set()
        run.driver.join()
        run.prefetcher.begin(1, last=2)
        names = "buffer/steps_ready", "buffer/steps_in_flight", "buffer/samples_ready", "buffer/samples_in_flight"
        assert run.prefetcher.metrics() == dict(zip(names, (0, 2, 0, 2 * of_a_step)))
        run.ended.clear()
        run.driver = threading.Thread(target=run._drive)
        run.driver.start()
        run.prefetcher.wait()
        assert list(run.prefetcher.metrics().values()) == [2, 0, 2 * of_a_step, 0]
        run.prefetcher.take_round(1, 0, PROMPTS)()
        assert list(run.prefetcher.metrics().values()) == [1, 0, of_a_step, 0]
    with running(0) as run:
        assert run.prefetcher.metrics() == {}


def test_what_is_older_than_promised_stops_the_run():
    loader = PromptLoader(EXAMPLES, seed=1)
    with running(0) as run:
        old = [Rollout(EXAMPLES[0], 0, [1], [5, 6], [-1.0, -1.0], "stop", "", 1, versions=[1, 4])]
        prefetcher = RolloutPrefetcher(source(lambda *_: old), loader, PoolSampler(run.pool), 1)
        assert prefetcher.take_round(2, 0, 1)()[1] == old
        with pytest.raises(LedgerError, match="version 1, older than actors.max_staleness 0"):
            prefetcher.take_round(3, 0, 1)()


def test_an_error_of_a_step_that_is_sampled_ahead_is_raised_at_that_step_and_nothing_is_left_running():
    with running(2) as run:
        draw = run.draw

        def failing(asked, step, extra_round, sampler, wanted):
            if step == 4:
                raise UserError("step 4 cannot be")
            return draw(asked, step, extra_round, sampler, wanted)

        run.draw = failing
        with pytest.raises(UserError, match="step 4 cannot be"):
            run.train(9)
        assert sorted(run.trained) == [1, 2, 3]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetcher")]


def test_a_run_that_ends_does_not_wait_for_samples_of_later_steps():
    pool = GeneratorPool(1000, 1000, 1000.0)  # without a generator nothing comes, for as long as a run may have none
    ended = []

    def draw(asked, step, extra_round, sampler, wanted):
        try:
            return sampler.generate([[1]], SamplingParams(max_tokens=3, seed=1))
        except RunStopped:
            ended.append(step)
            raise

    prefetcher = RolloutPrefetcher(
        source(draw), PromptLoader(EXAMPLES, seed=1), PoolSampler(pool), 1, 1, lambda kept: PoolSampler(pool, kept)
    )
    prefetcher.begin(1, 5)
    closing = threading.Thread(target=prefetcher.close, daemon=True)
    closing.start()
    closing.join(20)
    assert sorted(ended) == [1, 2]


def test_nothing_grows_over_a_long_run():
    def sizes(run):
        owners = (run.pool, run.pool._work, run.prefetcher)
        return {
            f"{type(owner).__name__}.{name}": len(value)
            for owner in owners
            for name, value in vars(owner).items()
            if hasattr(value, "__len__") and getattr(value, "maxlen", None) is None
        }

    found = []
    with running(2, generators=2, room=100) as run:
        for step in (5, 10, 15):
            run.train(step)
            run.prefetcher.wait()
            run.pool.metrics()
            found.append(sizes(run))
            assert len(run.state()["ahead"]["prompts"]) == 2 * PROMPTS  # the buffer is bounded
            assert len(run.state()["ahead"]["samples"]) == 2 * PROMPTS
    assert found[0] == found[1] == found[2]
