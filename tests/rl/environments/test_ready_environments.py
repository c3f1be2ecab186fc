"""The ready environments: right answers, wrong ones, cheats, and data that cannot be read."""

import json
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import UserError
from lockstep.rl.environments.alphabet_sort import AlphabetSort, listed, similarity
from lockstep.rl.environments.calculator import Calculator, evaluate
from lockstep.rl.environments.loading import load_environment
from lockstep.rl.environments.math_checker import MathChecker, compare
from lockstep.rl.environments.math_jsonl import Math, boxed_answer, final_answer, is_right, last_boxed
from lockstep.rl.environments.protocol import Example
from lockstep.rl.environments.retrieval import Index, Retrieval, f1, normalized
from lockstep.rl.rollouts.prompts import examples_of
from lockstep.workers.processes import descendants
from tests.rl.conversations.scripted import call, converse

RULES = {"math": {"problem": "1+1?", "answer": "2"}, "retrieval": {"question": "Who?", "answer": "Ada"}}


def folder_of(tmp_path, name, *lines):
    (tmp_path / "documents").mkdir(exist_ok=True)
    (tmp_path / "documents" / "a.txt").write_text("Ada wrote the first program.")
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return load_environment(name, str(tmp_path))


# Data that cannot be read, of all environments that read some.


@pytest.mark.parametrize("name", ["math", "retrieval", "code"])
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


# Sorting.


def test_sorting_is_the_same_at_every_call_and_its_splits_are_apart():
    train, held_out = (examples_of(AlphabetSort(), split) for split in ("train", "validation"))
    assert train == examples_of(AlphabetSort(), "train") and len({e.prompt for e in train}) > 1900
    assert not {e.prompt for e in train} & {e.prompt for e in held_out}
    assert {len(e.metadata["turns"]) for e in train} == {1, 2, 3}
    assert json.loads(json.dumps(dict(train[0].metadata))) == train[0].metadata


def sorted_lists(example):
    known, part = [], 0 if example.metadata["by"] == "first" else 1
    for turn in example.metadata["turns"]:
        known += turn
        yield "<sorted>\n" + "\n".join(sorted(known, key=lambda name: name.split()[part])) + "\n</sorted>"


def test_sorted_lists_are_right_turn_by_turn():
    for example in examples_of(AlphabetSort(), "train")[:20]:
        rewards, chat = converse(AlphabetSort(), example, *sorted_lists(example))
        assert rewards == {"similarity": 1.0, "correct": 1.0}
        assert [m["role"] for m in chat.messages] == ["user", "assistant"] * len(example.metadata["turns"])


@pytest.mark.parametrize("turns", [2, 3])
def test_a_wrong_turn_costs_its_share_and_a_conversation_cut_short_has_nothing(turns):
    example = next(e for e in examples_of(AlphabetSort(), "train") if len(e.metadata["turns"]) == turns)
    right = list(sorted_lists(example))
    rewards, _ = converse(AlphabetSort(), example, *right[:-1], "I do not know")
    assert rewards == {"similarity": (turns - 1) / turns, "correct": 0.0}
    assert converse(AlphabetSort(), example, *right[:-1])[0] == AlphabetSort.unfinished
    backwards = "<sorted>\n" + "\n".join(reversed(listed(right[-1]))) + "\n</sorted>"
    rewards, _ = converse(AlphabetSort(), example, *right[:-1], backwards)
    assert (turns - 1) / turns <= rewards["similarity"] < 1.0 and rewards["correct"] == 0.0


def test_many_lists_and_long_lists_gain_nothing():
    example = next(e for e in examples_of(AlphabetSort(), "train") if len(e.metadata["turns"]) == 1)
    (right,) = sorted_lists(example)
    wrong = "<sorted>\nNobody\n</sorted>"
    assert converse(AlphabetSort(), example, right + wrong)[0]["similarity"] == 0.0
    assert converse(AlphabetSort(), example, f"<think>{right}</think>{wrong}")[0]["similarity"] == 0.0
    names = listed(right)
    assert similarity(names, [name for name in names for _ in range(40)]) == 0.0
    assert similarity(names, [*names, *names]) < 0.7


def test_the_last_list_is_found_whatever_stands_around_it():
    assert listed("<sorted>\na\n</sorted><sorted>\nb  c\n</sorted> </sorted> <sorted>d") == ["b c"]
    assert listed("<sorted>a") == listed("</sorted>") == listed("</sorted><sorted>") == listed("") == []
    # Looked for from each beginning anew, the end of this would not be found while anyone waits.
    assert listed("<sorted>" * 300_000) == []
    assert listed("<sorted>" * 300_000 + "a</sorted>") == ["a"]


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=8), st.lists(st.sampled_from("abcd"), max_size=8))
def test_similarity_is_one_for_the_same_list_alone(wanted, got):
    assert 0.0 <= similarity(wanted, got) <= 1.0 and (similarity(wanted, got) == 1.0) == (wanted == got)


# Sums with a tool.

NUMBERS = st.integers(-1000, 1000).map(str) | st.floats(0.001, 1000).map(lambda x: f"{x:.3f}")
SIGNS = st.sampled_from(["+", "-", "*", "/", "//", "%"])
SUMS = st.recursive(NUMBERS, lambda inner: st.tuples(inner, SIGNS, inner).map("(%s %s %s)".__mod__))


@settings(max_examples=200, deadline=None)
@given(SUMS.filter(lambda text: len(text) <= 200))
def test_sums_are_worked_out_as_python_does(text):
    try:
        wanted = eval(text)
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            evaluate(text)
        return
    assert repr(evaluate(text)) == repr(wanted) or wanted != wanted


@settings(max_examples=300, deadline=None)
@given(st.text("0123456789+-*/%(). e_xj,'\"[]", max_size=60) | st.text(max_size=30))
def test_no_expression_breaks_the_calculator(text):
    with suppress(ValueError, ZeroDivisionError, OverflowError):
        assert type(evaluate(text)) in (int, float)


@pytest.mark.parametrize(
    "text",
    [
        *("__import__('os').system('true')", "().__class__", "a", "1 if 1 else 2", "[1]", "'a' * 9", "True + 1", "1j"),
        *(
            "9**9**9",
            "10**5000",
            "2**2**20",
            "(-1)**0.5",
            "1e308 * 10 - 1e308 * 10",
            "1e308 * 10",
            "1 / 1e400",
            "1,000 + 1",
            "2 ^ 3",
            "7 << 3",
        ),
        *("(" * 150 + "1" + ")" * 40, "-" * 150 + "1", "1" * 300, "", "0.0 ** -1", "lambda: 1"),
    ],
)
def test_what_is_no_sum_or_too_large_is_refused_at_once(text):
    with pytest.raises((ValueError, ZeroDivisionError, OverflowError)):
        evaluate(text)


def test_the_calculator_is_called_and_its_answers_are_checked():
    examples = examples_of(Calculator(), "train")
    assert not {e.prompt for e in examples} & {e.prompt for e in examples_of(Calculator(), "validation")}
    example = next(e for e in examples if "crates" in e.prompt)
    a, b, c = (int(word) for word in example.prompt.split() if word.isdigit())
    rewards, chat = converse(
        Calculator(), example, "I see." + call("calculate", expression=f"{a}*{b}-{c}"), f"Done.\nAnswer: {a * b - c:,}."
    )
    assert rewards == {"correct": 1.0} and chat.messages[2]["content"] == example.answer
    rewards, chat = converse(
        Calculator(), example, call("calculat", expression="1"), call("calculate", expresion="1"),
        call("calculate", expression="1/0"), "<tool_call>{</tool_call>", "Answer: 1",
    )  # fmt: skip
    errors = [m["content"] for m in chat.messages if m["role"] == "tool"]
    assert rewards == {"correct": 0.0} and len(errors) == 4 and all(e.startswith("Error: ") for e in errors)
    assert 'Did you mean "calculate"' in errors[0] and "expresion" in errors[1] and "ZeroDivision" in errors[2]


@pytest.mark.parametrize(
    ("reply", "correct"),
    [
        ("Answer: 12", 1.0),
        ("**Answer:** 12", 1.0),
        ("x\nAnswer: 12.00 ", 1.0),
        ("12", 0.0),
        ("Answer: 12 or 13", 0.0),
        ("Answer: 11\nAnswer: 12", 1.0),
        ("Answer: 12\nAnswer: 11", 0.0),
        ("<think>Answer: 12", 0.0),
        ("Answer: 12</think>", 0.0),
        ("Answer: 120", 0.0),
        ("Answer: -12", 0.0),
        ("Answer: ", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_line_has_the_answer(reply, correct):
    assert Calculator().reward(Example("p", "12"), reply) == {"correct": correct}


@pytest.mark.parametrize("mark", ["\n", "*\n", "*", " "])
def test_a_reply_of_nothing_but_marks_is_read_in_linear_time(mark):
    """A pattern that begins anew at each line, and reads all others, would not come back from these."""
    example, marks = Example("p", "12"), mark * 300_000
    assert Calculator().reward(example, marks + "x") == {"correct": 0.0}
    assert Calculator().reward(example, marks + "\n**Answer: 12") == {"correct": 1.0}
    assert Retrieval().reward(example, marks + "x")["correct"] == 0.0
    assert Retrieval().reward(example, marks + "\n**Answer: 12")["correct"] == 1.0


# Looking things up.


def library(tmp_path):
    folder = tmp_path / "documents"
    (folder / "more").mkdir(parents=True)
    (folder / "ada.txt").write_text("Ada Lovelace wrote the first program, for the Analytical Engine.\n" + "x " * 4000)
    (folder / "more" / "note.md").write_text("# Babbage\n\nCharles Babbage designed the Analytical Engine.")
    lines = [
        {"id": "t1", "title": "Turing", "text": "Alan Turing was born in London in 1912."},
        {"contents": "Zebras."},
    ]
    (folder / "rest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    question = {"question": "Who wrote the first program?", "answers": ["Ada Lovelace", "Lovelace"]}
    (tmp_path / "train.jsonl").write_text(json.dumps(question) + "\n")
    return load_environment("retrieval", str(tmp_path))


def test_a_question_is_answered_by_searching_and_reading(tmp_path):
    environment = library(tmp_path)
    (example,) = examples_of(environment, "train")
    rewards, chat = converse(
        environment, example, call("search", query="first program"), call("read", id="[ada.txt]"),
        call("read", id="ada.txt", page=2), "Found.\nAnswer: the Lovelace.",
    )  # fmt: skip
    found, text, second = (m["content"] for m in chat.messages if m["role"] == "tool")
    assert found.startswith("[ada.txt] Ada Lovelace wrote") and text.endswith("(page 1 of 3)") and "page 2" in second
    assert rewards == {"correct": 1.0, "f1": 1.0}
    assert set(chat.seconds) == {"search", "read"}


def test_texts_are_found_by_words_and_by_nothing_else(tmp_path):
    index = library(tmp_path).index
    assert [name for name, _ in index.search("analytical engine")] == ["more/note.md", "ada.txt"]
    assert [name for name, _ in index.search("Where was Turing born?")] == ["t1"]
    assert [name for name, _ in index.search("zebra")] == ["rest.jsonl:2"], "words are stemmed"
    assert index.read("t1") == "Turing\nAlan Turing was born in London in 1912."
    with pytest.raises(ValueError, match="there is no text '../train.jsonl'"):
        index.read("../train.jsonl")


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=40) | st.text('"*():^-{} ANDORNOTNEARtext', max_size=40))
def test_no_query_breaks_the_search(query):
    assert len(INDEX.search(query)) <= 5


@pytest.fixture(autouse=True, scope="module")
def _one_index(tmp_path_factory):
    global INDEX
    folder = tmp_path_factory.mktemp("texts")
    (folder / "a.txt").write_text("near and or not text")
    INDEX = Index(folder)


@pytest.mark.parametrize(
    ("reply", "correct", "overlap"),
    [
        ("Answer: The Ada Lovelace!", 1.0, 1.0),
        ("Answer: Lovelace", 1.0, 1.0),
        ("Answer: Lady Lovelace", 0.0, 2 / 3),
        ("Ada Lovelace", 0.0, 0.0),
        ("Answer: " + "Ada Lovelace wrote " * 50, 0.0, 0.0),
        ("Answer: the a an", 0.0, 0.0),
        ("Answer: Ada Lovelace\nAnswer: Babbage", 0.0, 0.0),
        ("Answer: Ada Lovelace</think>", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_answers_are_compared_as_squad_does(reply, correct, overlap):
    example = Example("q", "Ada Lovelace", metadata={"answers": ["Ada Lovelace", "Lovelace"]})
    assert Retrieval().reward(example, reply) == {"correct": correct, "f1": overlap}


@given(st.text(max_size=30), st.text(max_size=30))
def test_f1_is_symmetric_and_one_for_the_same_words(left, right):
    assert f1(left, right) == f1(right, left) and 0.0 <= f1(left, right) <= 1.0
    assert f1(left, left) == float(normalized(left) != "")


def test_texts_that_cannot_be_read_are_named(tmp_path):
    library(tmp_path)
    (tmp_path / "documents" / "bad.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"bad.txt: cannot be read as UTF-8"):
        load_environment("retrieval", str(tmp_path))
    (tmp_path / "documents" / "bad.txt").unlink()
    (tmp_path / "documents" / "two.jsonl").write_text('{"id": "t1", "text": "again"}\n')
    with pytest.raises(UserError, match=r"two.jsonl:1: there is already a text with the id 't1'"):
        load_environment("retrieval", str(tmp_path))


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


def test_documents_are_read_from_every_form_of_records(tmp_path):
    import pyarrow
    from pyarrow import parquet

    texts = [{"id": str(n), "text": f"text number {n}"} for n in range(3)]
    found = []
    for name in ("a.jsonl", "a.json", "a.parquet"):
        folder = tmp_path / name[2:]
        folder.mkdir()
        if name.endswith("parquet"):
            parquet.write_table(pyarrow.Table.from_pylist(texts), folder / name)
        elif name.endswith("json"):
            (folder / name).write_text(json.dumps(texts))
        else:
            (folder / name).write_text("".join(json.dumps(text) + "\n" for text in texts))
        found.append([Index(folder).read(text["id"]) for text in texts])
    assert found == [[text["text"] for text in texts]] * 3
