"""Sums of digits, GSM8K, rewards that are no numbers, and the order in which prompts are drawn."""

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lockstep.rl as rl
from lockstep.data import TextSource
from lockstep.errors import UserError
from lockstep.rl.environments.digit_sum import DigitSum, pretraining_text
from lockstep.rl.environments.gsm8k import GSM8K, TEMPLATE
from lockstep.rl.environments.loading import load_environment
from lockstep.rl.grading import grade
from lockstep.rl.rollouts.prompts import PromptLoader, examples_of


def test_a_reward_that_is_no_number_is_refused_with_its_example():
    class Odd(rl.Environment):
        def reward(self, example, completion):
            return example.metadata["value"]

    said = {
        "returned 'good'": "good",
        "returned None": None,
        "returned no reward": {},
        "returned inf as 'b'": {"b": 1e999},
    }
    for message, value in said.items():
        with pytest.raises(UserError, match=f"{message}.* for example lines.txt:3"):
            grade(Odd(), [rl.Example("p", id="lines.txt:3", metadata={"value": value})], ["c"])


def test_digit_sums_are_right_and_the_held_out_ones_apart():
    environment = DigitSum()
    train, held_out = examples_of(environment, "train"), examples_of(environment, "validation")
    assert len(train) + len(held_out) == 100 + 1000 and len(held_out) > 150
    assert not {e.prompt for e in train} & {e.prompt for e in held_out}
    assert all(str(sum(map(int, e.prompt[:-1].split("+")))) == e.answer for e in train[:200])
    example = rl.Example("3+5=", "8")
    correct = [environment.reward(example, c)["correct"] for c in ("8\n", "8", "9\n", "88\n")]
    assert correct == [1.0, 0.0, 0.0, 0.0]
    lines = list(pretraining_text(1000, 0.4))
    wrong = [str(sum(map(int, q.split("+")))) != a.strip() for q, a in (line.split("=") for line in lines)]
    assert 0.3 < sum(wrong) / 1000 < 0.45
    assert not {line.split("=")[0] + "=" for line in lines} & {e.prompt for e in held_out}


def gsm8k_folder(tmp_path: Path) -> Path:
    """The real data set where it lies beside the repository; else five lines of our own, and a word about it."""
    real = Path(os.environ.get("GSM8K_DATA") or Path(__file__).parents[4] / "shared" / "data" / "gsm8k")
    if (real / "train.jsonl").is_file():
        return real
    print(f"{real} is not there: five lines of our own stand for GSM8K")
    question = "A box holds {0} pens. How many do {0} boxes hold?"
    lines = [{"question": question.format(n), "answer": f"{n} x {n} = {n * n}\n#### {n * n}"} for n in range(2, 7)]
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_gsm8k_answers_are_right_and_well_formed_by_their_own_graders(tmp_path):
    folder = gsm8k_folder(tmp_path)
    environment = load_environment("gsm8k", str(folder))
    for split, file in (("train", "train.jsonl"), ("validation", "test.jsonl")):
        examples = examples_of(environment, split)
        lines = [json.loads(line) for line in (folder / file).read_text().splitlines()]
        assert len(examples) == len(lines)
        documents = list(TextSource(str(folder / file), TEMPLATE))
        solutions = [document.removeprefix(e.prompt) for document, e in zip(documents, examples)]
        assert all(len(s) < len(d) for s, d in zip(solutions, documents)), "a document begins with its prompt"
        for example, solution in list(zip(examples, solutions))[:40]:
            assert environment.reward(example, solution) == {"correct": 1.0, "format": 1.0}


@pytest.mark.parametrize(
    ("answer", "completion", "correct", "format"),
    [
        ("1,234", " It is 1,234.\n#### 1,234", 1, 1),
        ("1234", "#### 1234.0\n", 1, 1),
        ("1,234", "#### $1234", 1, 1),
        ("1234567.5", "#### 1,234,567.50 \n", 1, 1),
        ("-5", "#### $-5", 1, 1),
        ("18", "So 18.\n#### \\$18", 1, 1),
        ("18", "#### 18.0.", 1, 1),
        *(("-0.5", f"#### {number}", 1, 1) for number in ("-.5", "-$.5", "$-.5", "-0.5", "-0.50")),
        ("0.5", "#### -.5", 0, 1),
        ("1,234", "#### 12", 0, 1),
        ("1,234", "#### 1 #### 1234", 1, 0),
        ("5", "##### 5", 0, 0),  # five signs
        ("5", "#### 5,,5", 0, 0),
        ("1234", "#### 12,34", 0, 0),
        ("5", "#### ٥", 0, 0),  # a digit to Unicode, not to a reader of the data
        ("5", "#### 5 ####", 0, 0),
        ("-0.5", "<think>#### -0.5", 0, 0),
        *(("1,234", text, 0, 0) for text in ("1234", "#### 1234 pens", "#### \\frac{", "")),
    ],
)
def test_gsm8k_completions_are_graded(answer, completion, correct, format):
    rewards = GSM8K().reward(rl.Example("q", answer), completion)
    assert rewards == {"correct": correct, "format": format}
    assert grade(GSM8K(), [rl.Example("q", answer)], [completion])[0].total == correct + 0.3 * format


@settings(max_examples=60, deadline=None)
@given(st.text("#### 0123456789,.$-\n٥\\", max_size=40))
def test_no_completion_raises_in_gsm8k(completion):
    rewards = GSM8K().reward(rl.Example("q", "5"), f"#### {completion}")
    assert set(rewards) == {"correct", "format"} and set(rewards.values()) <= {0.0, 1.0}


def test_a_long_run_of_digits_is_read_in_linear_time():
    began = time.perf_counter()
    assert GSM8K().reward(rl.Example("q", "1"), "#### " + "1" * 200_000 + "x")["format"] == 0.0
    # Milliseconds where the time is linear; a quadratic pattern needs a quarter of an hour.
    assert time.perf_counter() - began < 10


def test_bad_gsm8k_data_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"contains no train.jsonl; give --data a folder with train.jsonl"):
        examples_of(GSM8K(str(tmp_path)), "train")
    (tmp_path / "train.jsonl").write_text('{"question": "q", "answer": "#### 3"}\n{"question": "q", "answer": "3"}\n')
    with pytest.raises(UserError, match=r"train.jsonl:2: the answer has no"):
        examples_of(GSM8K(str(tmp_path)), "train")
    assert len(examples_of(GSM8K(str(tmp_path), skip_bad_lines=True), "train")) == 1


def test_prompts_come_once_an_epoch_in_an_order_of_the_seed_and_never_twice_in_a_step():
    examples = [rl.Example(str(i)) for i in range(7)]
    loader = PromptLoader(examples, seed=3)
    first, second = loader.next(7), loader.next(7)
    assert sorted(e.prompt for e in first) == sorted(e.prompt for e in second) == [str(i) for i in range(7)]
    again = PromptLoader(examples, seed=3)
    again.position = 4
    assert again.next(3) == first[4:] and again.next(7) == second != first
    assert PromptLoader(examples, seed=4).next(7) != first

    asked = []
    for step in range(40):
        again.restore(json.loads(json.dumps(loader.state())))
        chosen = [e.prompt for e in loader.next(4)]
        assert len(set(chosen)) == 4, f"step {step}: {chosen}"
        assert [e.prompt for e in again.next(4)] == chosen
        asked += chosen
    assert min(asked.count(e.prompt) for e in examples) > 15, "each about 23 times"
    pair = PromptLoader(examples[:2], seed=0)
    assert sorted(e.prompt for e in pair.next(6)) == ["0", "0", "0", "1", "1", "1"]
    for others in (examples[:6], [*examples[:6], rl.Example(prompt="6", answer="b")]):
        with pytest.raises(UserError, match="training examples differ from those when the run was saved"):
            PromptLoader(others, seed=3).restore(loader.state())
