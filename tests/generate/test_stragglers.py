"""More prompts are asked than wanted: the groups with the shortest longest sample are kept, the others stopped."""

import random
from dataclasses import dataclass

import pytest

from lockstep.config import EngineConfig
from lockstep.generate import Engine, SamplingParams
from lockstep.generate.stragglers import stragglers
from tests.generate.test_engine import MODELS


@dataclass
class Known:
    sampled: int
    finish_reason: str | None


def test_the_same_groups_are_left_however_fast_each_sample_grows():
    draw = random.Random(4)
    for _ in range(300):
        ends = [[draw.randint(1, 6) for _ in range(2)] for _ in range(draw.randint(1, 7))]
        first = draw.randint(1, len(ends))
        expected = sorted(sorted(range(len(ends)), key=lambda n: (max(ends[n]), n))[:first])
        groups = {number: [Known(0, None) for _ in own] for number, own in enumerate(ends)}
        while any(not sample.finish_reason for group in groups.values() for sample in group):
            number = draw.choice([n for n, group in groups.items() if not all(s.finish_reason for s in group)])
            index = draw.choice([i for i, sample in enumerate(groups[number]) if not sample.finish_reason])
            sample, end = groups[number][index], ends[number][index]
            sample.sampled = min(end, sample.sampled + draw.randint(1, 3))
            sample.finish_reason = "stop" if sample.sampled == end else None
            for late in stragglers(groups, first):
                assert late not in expected
                del groups[late]
        assert sorted(groups) == expected


def _asked():
    """Prompts of two samples each, of which the second one's are very long, and the fourth one's equal the first's."""
    lengths = (5, 400, 9, 5, 7)
    prompts = [[3, 1 + number] for number in range(len(lengths))]
    params = [SamplingParams(max_tokens=n, n=2, seed=n, ignore_eos=True) for n in lengths]
    return prompts, params


@pytest.mark.slow
def test_an_engine_stops_the_stragglers_as_soon_as_they_are_known_and_samples_the_others_as_ever():
    prompts, params = _asked()
    whole = Engine(MODELS["float32"]).generate(prompts, params)
    for places in (2, 4, 64):
        engine = Engine(MODELS["float32"], EngineConfig(max_sequences=places, draft="none"))
        kept = engine.generate(prompts, params, first=3)
        assert kept == [whole[0], [], [], whole[3], whole[4]]
        assert not engine.has_work
        if places > 2:  # where the straggler has all of them, the others wait
            assert engine.statistics.tokens_sampled < 100  # of 852
    assert engine.generate(prompts[:3], params[:3], first=3) == whole[:3]
    assert engine.generate(prompts[:1], params[:1]) == whole[:1]  # nothing of the stragglers is in its cache
