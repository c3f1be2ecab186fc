"""Tasks: the built-in ones, the user's own from a file, and what is refused."""

import inspect
import json
import math
import os
from pathlib import Path

import pytest

import lockstep.rl as rl
from lockstep.data import TextSource
from lockstep.errors import UserError
from lockstep.rl.environments.digit_sum import DigitSum, pretraining_text
from lockstep.rl.environments.gsm8k import GSM8K, TEMPLATE
from lockstep.rl.environments.loading import load_environment
from lockstep.rl.grading import grade
from lockstep.rl.rollouts.prompts import PromptLoader, examples_of

REVERSE = """
import lockstep.rl as rl

class ReverseWord(rl.Environment):
    def examples(self, split: str):                  # "train" or "validation"
        for word in ("stone", "river"): yield rl.Example(prompt=f"Reverse: {word}\\n", answer=word[::-1])
    def reward(self, example: rl.Example, completion: str) -> float | dict[str, float]:
        return float(completion.strip() == example.answer)
"""


def test_a_task_of_the_users_own_is_loaded_from_its_file(tmp_path):
    (tmp_path / "my_task.py").write_text(REVERSE)
    environment = load_environment(f"{tmp_path / 'my_task.py'}:ReverseWord")
    examples = examples_of(environment, "train")
    assert [e.answer for e in examples] == ["enots", "revir"]
    grades = grade(environment, examples, [" enots\n", "river"])
    assert [g.total for g in grades] == [1.0, 0.0] and environment.is_correct(grades[0].by_name)


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        (None, "Task", "no such file"),
        ("import nothing_there", "Task", r"task.py:1: does not import \(ModuleNotFoundError"),
        ("x = 1\ndef f(:\n", "Task", r"task.py:2: does not import \(SyntaxError"),
        (REVERSE, "ReverseWrd", 'Did you mean "ReverseWord"'),
        ("class Task: pass", "Task", "Found: none; subclass"),
    ],
)
def test_a_file_that_holds_no_task_is_refused(tmp_path, source, name, message):
    if source is not None:
        (tmp_path / "task.py").write_text(source)
    with pytest.raises(UserError, match=message):
        load_environment(f"{tmp_path / 'task.py'}:{name}")


def test_an_unknown_task_and_an_empty_one_are_refused():
    with pytest.raises(UserError, match='unknown environment "gsm9k". Did you mean "gsm8k"'):
        load_environment("gsm9k")

    class Empty(rl.Environment):
        def examples(self, split):
            return []

    with pytest.raises(UserError, match=r'Empty.examples\("train"\) yields nothing'):
        examples_of(Empty(), "train")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, r"returned nan as 'reward' for example lines.txt:3"),
        ("good", "returned 'good'"),
        (None, "returned None"),
        ({}, "returned no reward for example lines.txt:3"),
        ({"a": 1.0, "b": math.inf}, "returned inf as 'b'"),
    ],
)
def test_a_reward_that_is_no_number_is_refused_with_its_example(value, message):
    class Odd(rl.Environment):
        def reward(self, example, completion):
            return value

    with pytest.raises(UserError, match=message):
        grade(Odd(), [rl.Example("p", id="lines.txt:3")], ["c"])


def test_an_error_in_the_users_reward_is_named_with_its_line():
    class Failing(rl.Environment):
        def reward(self, example, completion):
            return 1 / len(completion)

    with pytest.raises(UserError, match=r"test_environments.py:\d+: Failing.reward failed on example 'p' \(ZeroDiv"):
        grade(Failing(), [rl.Example("p")], [""])


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
    lines = [
        {
            "question": f"A box holds {n} pens. How many do {n} boxes hold?",
            "answer": f"{n} x {n} = {n * n}\n#### {n * n}",
        }
        for n in range(2, 7)
    ]
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
    ("completion", "correct", "format"),
    [
        (" It is 1,234.\n#### 1,234", 1, 1),
        ("#### 1234.0\n", 1, 1),
        ("#### $1234", 1, 1),
        ("#### 12", 0, 1),
        ("#### 1 #### 1234", 1, 0),
        ("1234", 0, 0),
        ("#### 1234 pens", 0, 0),
        ("#### \\frac{", 0, 0),
        ("", 0, 0),
    ],
)
def test_gsm8k_completions_are_graded(completion, correct, format):
    rewards = GSM8K().reward(rl.Example("q", "1,234"), completion)
    assert rewards == {"correct": correct, "format": format}
    assert grade(GSM8K(), [rl.Example("q", "1,234")], [completion])[0].total == correct + 0.3 * format


@pytest.mark.parametrize("number", ["-.5", "-$.5", "$-.5", "-0.5", "-0.50"])
def test_a_decimal_without_its_zero_is_right(number):
    assert GSM8K().reward(rl.Example("q", "-0.5"), f"#### {number}") == {"correct": 1.0, "format": 1.0}
    assert GSM8K().reward(rl.Example("q", "-.5"), f"#### {number}") == {"correct": 1.0, "format": 1.0}
    assert GSM8K().reward(rl.Example("q", "0.5"), f"#### {number}")["correct"] == 0.0
    assert GSM8K().reward(rl.Example("q", "-0.5"), f"<think>#### {number}") == {"correct": 0.0, "format": 0.0}


def test_bad_gsm8k_data_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"contains no train.jsonl; give --data a folder with train.jsonl"):
        examples_of(GSM8K(str(tmp_path)), "train")
    (tmp_path / "train.jsonl").write_text('{"question": "q", "answer": "#### 3"}\n{"question": "q", "answer": "3"}\n')
    with pytest.raises(UserError, match=r"train.jsonl:2: the answer has no"):
        examples_of(GSM8K(str(tmp_path)), "train")
    assert len(examples_of(GSM8K(str(tmp_path), skip_bad_lines=True), "train")) == 1


def test_prompts_come_once_an_epoch_in_an_order_of_the_seed():
    examples = [rl.Example(str(i)) for i in range(7)]
    loader = PromptLoader(examples, seed=3)
    first, second = loader.next(7), loader.next(7)
    assert sorted(e.prompt for e in first) == sorted(e.prompt for e in second) == [str(i) for i in range(7)]
    again = PromptLoader(examples, seed=3)
    again.position = 4
    assert again.next(3) == first[4:] and again.next(7) == second != first
    assert PromptLoader(examples, seed=4).next(7) != first


def test_no_step_holds_a_prompt_twice_and_none_is_forgotten():
    examples = [rl.Example(str(i)) for i in range(7)]
    loader, asked = PromptLoader(examples, seed=1), []
    for step in range(40):
        again = PromptLoader(examples, seed=1)
        again.position = loader.position
        chosen = [e.prompt for e in loader.next(4)]
        assert len(set(chosen)) == 4, f"step {step}: {chosen}"
        assert [e.prompt for e in again.next(4)] == chosen
        asked += chosen
    assert min(asked.count(e.prompt) for e in examples) > 15, "each about 23 times"
    pair = PromptLoader(examples[:2], seed=0)
    assert sorted(e.prompt for e in pair.next(6)) == ["0", "0", "0", "1", "1", "1"]


BROKEN = """
import lockstep.rl as rl

class Broken(rl.Environment):
    def examples(self, split):
        yield 1 / 0

    def reward(self, example, completion):
        return 0.0

class Odd(Broken):
    def examples(self, split):
        yield "text"

class Chat(Broken):
    def examples(self, split):
        example = rl.Example(prompt="")
        # Around the checking of types, which users do not have.
        object.__setattr__(example, "prompt", {"role": "user", "content": "x"})
        yield example
"""


def test_examples_that_fail_or_are_none_point_to_the_users_own_code(tmp_path):
    (tmp_path / "task.py").write_text(BROKEN)
    with pytest.raises(UserError, match=r'task.py:6: Broken.examples\("train"\) failed \(ZeroDivisionError'):
        examples_of(load_environment(f"{tmp_path}/task.py:Broken", "", False), "train")
    with pytest.raises(UserError, match=r"Odd.examples\(\"train\"\) yields 'text'; it must yield rl.Example"):
        examples_of(load_environment(f"{tmp_path}/task.py:Odd", "", False), "train")
    chat = load_environment(f"{tmp_path}/task.py:Chat", "", False)
    with pytest.raises(UserError, match="yields a prompt of type dict; it must be a string, .* or a list of messages"):
        examples_of(chat, "train")
    with pytest.raises(UserError, match="the environment is the class Chat; pass an instance"):
        inspect.unwrap(examples_of)(type(chat), "train")  # around the checking of types, which users do not have


def test_prompts_go_on_with_the_same_examples_alone():
    examples = [rl.Example(prompt=str(n), answer="a") for n in range(5)]
    loader = PromptLoader(examples, seed=0)
    asked = [e.prompt for e in loader.next(3)]
    again = PromptLoader(examples, seed=0)
    again.restore(json.loads(json.dumps(loader.state())))
    assert again.next(2) == loader.next(2) and not {e.prompt for e in again.next(0)} & set(asked)
    for others in (examples[:4], [*examples[:4], rl.Example(prompt="4", answer="b")]):
        with pytest.raises(UserError, match="training examples differ from those when the run was saved"):
            PromptLoader(others, seed=0).restore(loader.state())
