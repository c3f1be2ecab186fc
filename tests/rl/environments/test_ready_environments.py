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
from lockstep.rl.environments.math_checker import MathChecker, compare
from lockstep.rl.environments.math_jsonl import Math, boxed_answer, final_answer, is_right, last_boxed
from lockstep.rl.environments.protocol import Example
from lockstep.rl.rollouts.prompts import examples_of
from tests.rl.conversations.scripted import converse

RULES = {"math": {"problem": "1+1?", "answer": "2"}}


def folder_of(tmp_path, name, *lines):
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return load_environment(name, str(tmp_path))


# Data that cannot be read, of all environments that read some.


@pytest.mark.parametrize("name", ["math", "code"])
def test_missing_data_says_what_to_give(name, tmp_path):
    for data in ("", str(tmp_path / "nowhere")):
        with pytest.raises(UserError, match=r"--data|no such folder"):
            examples_of(load_environment(name, data), "train")


@pytest.mark.parametrize("name", RULES)
def test_lines_without_what_they_need_are_named_or_skipped(name, tmp_path):
    question = next(iter(RULES[name]))
    bad = [{"answer": "2"}, {question: "q"}, {question: "q", "answer": []}, {question: 3.5, "answer": None}]
    for line in bad:
        folder_of(tmp_path, name, RULES[name], line)
        with pytest.raises(UserError, match=r"train.jsonl:2: (needs the string `|`answer` is (empty|null))"):
            examples_of(load_environment(name, str(tmp_path)), "train")
        assert len(examples_of(load_environment(name, str(tmp_path), skip_bad_lines=True), "train")) == 1
    folder_of(tmp_path, name, {question[:-1]: "q", "answer": "2"})
    with pytest.raises(UserError, match=f'Did you mean "{question[:-1]}"'):
        examples_of(load_environment(name, str(tmp_path)), "train")
    folder_of(tmp_path, name)
    with pytest.raises(UserError, match="yields nothing"):
        examples_of(load_environment(name, str(tmp_path)), "train")


def test_a_single_file_has_every_tenth_line_for_validation(tmp_path):
    path = tmp_path / "all.jsonl"
    path.write_text("".join(json.dumps({"question": str(n), "answer": n}) + "\n" for n in range(1, 31)))
    environment = Math(str(path))
    train, held_out = ([e.answer for e in examples_of(environment, split)] for split in ("train", "validation"))
    assert held_out == ["10", "20", "30"] and sorted(map(int, train + held_out)) == list(range(1, 31))


# Mathematics.


@pytest.mark.parametrize(
    ("answer", "given", "right"),
    [
        ("2", "2", True),
        ("2", "x = 2", True),
        ("\\frac{1}{2}", "0.5", True),
        ("0.5", "\\frac{1}{2}", True),
        ("1,000", "1000", True),
        ("-5", "-5.0", True),
        ("5 \\text{ cm}", "5", True),
        ("x^2+2x+1", "(x+1)^2", True),
        ("\\{1,2\\}", "\\{2,1\\}", True),
        ("Monday", "\\text{Monday}", True),
        ("B", "\\text{B}", True),
        ("2", "3", False),
        ("2", "1, 2, 3", False),
        ("2", "1 \\text{ or } 2", False),
        ("2", "", False),
        ("saw", "was", False),  # the same letters: to math-verify, the same product
        ("no", "on", False),
        ("1591", "37*43", False),  # the problem, said again
        ("1591", "37 \\times 43", False),
        ("1024", "2^{10}", False),
        ("5", "\\frac{", False),
        ("5", "\ud800", False),
        ("5", "x" * 250, False),
    ],
)
def test_answers_are_compared_by_what_they_mean(answer, given, right):
    assert is_right(answer, given) == right


@pytest.mark.parametrize(
    ("reply", "correct"),
    [
        ("So it is \\boxed{2}.", 1.0),
        ("\\boxed{\\frac{4}{2}}", 1.0),
        ("<think>\\boxed{2}</think> I do not know.", 0.0),
        ("<think>Try \\boxed{2}? Let me", 0.0),
        ("\\boxed{1} \\boxed{2} \\boxed{3}", 0.0),
        ("\\boxed{3} no: \\boxed{2}", 1.0),
        ("2", 0.0),
        ("\\boxed{2", 0.0),
        ("\\boxed{" * 1000, 0.0),
        ("", 0.0),
    ],
)
def test_only_the_last_box_of_a_reply_counts(reply, correct):
    assert converse(Math(), Example("1+1?", "2"), reply)[0] == {"correct": correct}


def test_the_answer_of_a_solution_is_found():
    assert final_answer("2+2 = 4\n#### 1,004") == "1,004"
    assert final_answer("Hence $\\boxed{\\frac{1}{2}}$.") == "\\frac{1}{2}"
    assert final_answer("$7$") == "7"
    assert boxed_answer("\\boxed{\\{1, 2\\}}") == "\\{1, 2\\}"


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
    checker, found = MathChecker(seconds=0.5), []
    assert checker.equal("x+1", "1+x")
    os.kill(checker.process.pid, signal.SIGSTOP)
    thread = threading.Thread(target=lambda: found.append(checker.equal("x+2", "2+x")))
    thread.start()
    time.sleep(1.5)
    os.kill(checker.process.pid, signal.SIGCONT)
    thread.join()
    assert found == [True]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("so it is $\\boxed 2$.", "2"),
        ("Our answer is $\\boxed 12$, as above", "12"),
        ("is \\boxed 7.\nThat is all.", "7"),
        ("\\boxed {2}", "2"),
        ("\\boxed\n{3}", "3"),
        ("\\boxed2", "2"),
        ("\\boxed{\\{1\\}}", "\\{1\\}"),
        ("\\boxed", None),
        ("\\boxed{", None),
        ("\\boxedx", None),
    ],
)
def test_a_box_is_read_in_the_forms_that_maths_solutions_have(text, content):
    assert boxed_answer(text) == last_boxed(text) == content


UNITS = ("^\\circ", "^{\\circ}", "\\text{ cm}", "\\text{ m}^2", "\\text{ cm}^{3}", "\\mbox{ inches}", "\\%", ".0")


@pytest.mark.parametrize("form", ["{}{}", "\\${}", "x={}", "{{,}}"], ids=str)
def test_a_number_in_a_form_that_math_verify_takes_is_right(form):
    """Units, degrees, money and thousands; math-verify is the judge, in this process."""
    for number in (2, 45, 90, 1234):
        thousands = [f"{number:,}", f"{number:,}".replace(",", "{,}")]
        forms = thousands if form == "{{,}}" else [form.format(number, unit) for unit in UNITS]
        for said in forms:
            assert is_right(str(number), said) or not compare(str(number), said), said
            assert not is_right(str(number + 1), said), said
    assert not is_right("8", "2^3") and not is_right("8", "2^{3}\\text{ m}"), "an expression is no answer"
