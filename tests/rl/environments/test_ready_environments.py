"""The ready environments: right answers, wrong ones, cheats, and data that cannot be read."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from lockstep.errors import UserError
from lockstep.rl.environments.loading import load_environment
from lockstep.rl.environments.math_checker import MathChecker
from lockstep.rl.environments.math_jsonl import Math
from lockstep.rl.rollouts.prompts import examples_of
from lockstep.workers.processes import descendants


@pytest.mark.parametrize("name", ["math", "code"])
def test_missing_data_says_what_to_give(name, tmp_path):
    for data in ("", str(tmp_path / "nowhere")):
        with pytest.raises(UserError, match=r"--data|no such folder"):
            examples_of(load_environment(name, data), "train")


def test_lines_without_what_they_need_are_named_or_skipped(tmp_path):
    def examples(*lines, **options):
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return examples_of(load_environment("math", str(tmp_path), **options), "train")

    good = {"problem": "1+1?", "answer": "2"}
    for line in ({"answer": "2"}, {"problem": "q"}, {"problem": "q", "answer": []}, {"problem": 3.5, "answer": None}):
        with pytest.raises(UserError, match=r"train.jsonl:2: (needs the string `|`answer` is (empty|null))"):
            examples(good, line)
        assert len(examples(good, line, skip_bad_lines=True)) == 1
    with pytest.raises(UserError, match='Did you mean "proble"'):
        examples({"proble": "q", "answer": "2"})
    with pytest.raises(UserError, match="yields nothing"):
        examples()


def test_a_single_file_has_every_tenth_line_for_validation(tmp_path):
    path = tmp_path / "all.jsonl"
    path.write_text("".join(json.dumps({"question": str(n), "answer": n}) + "\n" for n in range(1, 31)))
    environment = Math(str(path))
    train, held_out = ([e.answer for e in examples_of(environment, split)] for split in ("train", "validation"))
    assert held_out == ["10", "20", "30"] and sorted(map(int, train + held_out)) == list(range(1, 31))


def test_real_answers_are_right_by_their_own_grader_and_wrong_by_one_more(tmp_path):
    real = Path(os.environ.get("GSM8K_DATA") or Path(__file__).parents[4] / "shared" / "data" / "gsm8k")
    if not (real / "train.jsonl").is_file():
        pytest.skip(f"GSM8K is not there: {real}")
    environment = load_environment("math", str(real))
    for split in ("train", "validation"):
        examples = examples_of(environment, split)
        assert len(examples) == {"train": 7473, "validation": 1319}[split]
        for example in examples[:: len(examples) // 25]:
            assert environment.reward(example, f"so \\boxed{{{example.answer}}}") == {"correct": 1.0}
            number = float(example.answer.replace(",", ""))
            assert environment.reward(example, f"so \\boxed{{{number}}}") == {"correct": 1.0}
            assert environment.reward(example, f"so \\boxed{{{example.answer}1}}") == {"correct": 0.0}


def test_a_comparison_that_hangs_ends_and_the_next_one_works_in_any_thread():
    checker, found = MathChecker(seconds=2.0), []

    def compare():
        began = time.monotonic()
        found.append(checker.equal("5", "9^{9^{9^{9}}}"))
        found.append(checker.equal("5", "5.0"))
        found.append(time.monotonic() - began < 60)

    assert checker.equal("x+1", "1+x")
    thread = threading.Thread(target=compare)
    thread.start()
    thread.join()
    assert found == [False, True, True]


def test_a_comparison_that_waits_for_the_processor_is_not_given_up():
    before, checker, found = set(descendants(os.getpid())), MathChecker(seconds=0.5), []
    assert checker.equal("x+1", "1+x")
    (process,) = set(descendants(os.getpid())) - before
    os.kill(process, signal.SIGSTOP)
    thread = threading.Thread(target=lambda: found.append(checker.equal("x+2", "2+x")))
    thread.start()
    time.sleep(1.5)
    os.kill(process, signal.SIGCONT)
    thread.join()
    assert found == [True]
