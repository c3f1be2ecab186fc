"""JSON files that are one array of objects are read as JSONL is, in every command that reads data."""

import json
import random

import pytest

from lockstep.cli import main
from lockstep.data import ConversationSource, TextSource
from lockstep.data.json_array import items
from lockstep.data.records import Tally, holds_records, read_records
from lockstep.errors import UserError
from lockstep.rl.environments.loading import load_environment
from lockstep.rl.environments.problems import _on_the_hub as problems_on_the_hub


def _value(draw, depth=0):
    kinds = ["text", "number", "word"] + ["list", "object"] * (depth < 3)
    kind = draw.choice(kinds)
    if kind == "text":
        return "".join(draw.choice('ab "\\,:[]{}\n\té🙂') for _ in range(draw.randrange(8)))
    if kind == "number":
        return draw.choice([0, -1, 1.5, 1e300])
    if kind == "word":
        return draw.choice([True, False, None])
    if kind == "list":
        return [_value(draw, depth + 1) for _ in range(draw.randrange(4))]
    return {_value_name(draw): _value(draw, depth + 1) for _ in range(draw.randrange(4))}


def _value_name(draw):
    return draw.choice(["a", "b", 'c"', "d]", "{"])


def test_the_items_of_an_array_are_those_that_json_reads(tmp_path):
    draw = random.Random(0)
    path = tmp_path / "a.json"
    for _ in range(300):
        objects = [{"k": _value(draw)} for _ in range(draw.randrange(5))]
        text = json.dumps(objects, indent=draw.choice([None, 2]), ensure_ascii=draw.random() < 0.5)
        path.write_text(draw.choice(["", "\n  "]) + text + draw.choice(["", "\n"]))
        assert [values for _, values in read_records(path, False, Tally())] == objects == json.loads(path.read_text())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[{"a": 1}, 5]', "item 2: not a JSON object"),
        ('[{"a": 1}, ]', "item 2: not a JSON object"),
        ('[{"a" 1}]', "item 1: not a JSON object"),
        ('[{"a": 1}', "the array is not closed"),
        ('[{"a": "x}]', "the array is not closed"),
        pytest.param('[{"a": "' + '\\"' * 100_000, "the array is not closed", id="a long string without an end"),
        ('[{"a": 1}] {}', "text follows the array"),
    ],
)
def test_an_array_that_is_not_one_of_objects_is_named(tmp_path, text, problem):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(UserError, match=f"a.json: {problem}"):
        list(read_records(path, False, Tally()))


def test_items_that_are_no_objects_can_be_skipped(tmp_path):
    path, tally = tmp_path / "a.json", Tally()
    path.write_text('[{"a": 1}, 5, {"a": 2}]')
    assert [v for _, v in read_records(path, True, tally)] == [{"a": 1}, {"a": 2}] and tally.skipped_lines == 1
    assert tally.bytes_read == path.stat().st_size


def test_a_larger_array_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "a.json").write_text('[{"a": 1}]')
    with pytest.raises(UserError, match="has 10 bytes; an array can have at most 9; write .* .jsonl"):
        list(items(tmp_path / "a.json", 9))


def test_jsonl_under_the_name_json_is_read_too_and_one_pretty_object_is_no_data(tmp_path):
    (tmp_path / "lines.json").write_text('{"text": "one"}\n{"text": "two"}\n')
    assert list(TextSource(str(tmp_path / "lines.json"))) == ["one", "two"]
    (tmp_path / "pretty.json").write_text('{\n "text": "one"\n}\n')
    assert not holds_records(tmp_path / "pretty.json")
    with pytest.raises(UserError, match="would be one document, brackets and commas included"):
        TextSource(str(tmp_path / "pretty.json"))


def test_texts_and_conversations_are_read_from_arrays(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": "one", "messages": []}, {"text": "two", "messages": []}]))
    assert list(TextSource(str(path))) == ["one", "two"]
    assert [c.where for c in ConversationSource(str(path)).read()] == [f"{path}: item 1", f"{path}: item 2"]


PROBLEMS = [{"question": f"{n} + {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"} for n in range(40)]


@pytest.fixture(params=["jsonl", "json", "parquet", "hf", "hf with a test split", "hf, its train split", "folder"])
def problems(request, tmp_path):
    """The same problems, as `--data` in each form; the last has splits of its own."""
    import pyarrow
    from pyarrow import parquet

    kind = request.param
    if kind == "folder":
        for name, problems in (
            ("train", [p for n, p in enumerate(PROBLEMS) if n % 10 != 9]),
            ("test", PROBLEMS[9::10]),
        ):
            parquet.write_table(pyarrow.Table.from_pylist(problems), tmp_path / f"{name}.parquet")
        return str(tmp_path)
    if kind == "json":
        (tmp_path / "p.json").write_text(json.dumps(PROBLEMS))
    elif kind == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(PROBLEMS), tmp_path / "p.parquet")
    else:
        lines = [json.dumps(problem) + "\n" for problem in PROBLEMS]
        if "test" in kind:
            (tmp_path / "test.jsonl").write_text("".join(lines[9::10]))
            lines = [line for number, line in enumerate(lines, start=1) if number % 10]
        (tmp_path / ("train.jsonl" if kind.startswith("hf") else "p.jsonl")).write_text("".join(lines))
    if "its" in kind:
        return f"hf:{tmp_path}::train"
    return f"hf:{tmp_path}" if kind.startswith("hf") else str(tmp_path / f"p.{kind}")


@pytest.mark.parametrize("name", ["gsm8k", "math"])
def test_an_environment_has_the_same_problems_from_every_form(problems, name):
    environment = load_environment(name, problems)
    answers = {split: [e.answer for e in environment.examples(split)] for split in ("train", "validation")}
    assert answers["validation"] == [str(2 * n) for n in range(9, 40, 10)]
    assert answers["train"] == [str(2 * n) for n in range(40) if n % 10 != 9]


def test_a_line_that_is_skipped_moves_no_other_between_the_splits(tmp_path):
    lines = [json.dumps(problem) + "\n" for problem in PROBLEMS]
    lines[4] = "{\n"
    (tmp_path / "p.jsonl").write_text("".join(lines))
    environment = load_environment("math", str(tmp_path / "p.jsonl"), skip_bad_lines=True)
    assert [e.answer for e in environment.examples("validation")] == [str(2 * n) for n in range(9, 40, 10)]


def test_a_folder_with_validation_and_test_is_not_validated_on_its_test(tmp_path):
    for number, name in enumerate(("train", "validation", "test")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(PROBLEMS[number]) + "\n")
    assert [e.answer for e in load_environment("gsm8k", str(tmp_path)).examples("validation")] == ["2"]


def test_a_data_set_keeps_its_config_and_needs_a_split_to_train_on(monkeypatch):
    monkeypatch.setattr("lockstep.data.records.hub_splits", lambda name: ["train", "test"])
    assert problems_on_the_hub("hf:a/b:socratic", "validation") == ("hf:a/b:socratic:test", False)
    monkeypatch.setattr("lockstep.data.records.hub_splits", lambda name: ["dev"])
    with pytest.raises(UserError, match="hf:a/b: has no split train; name one of dev as hf:NAME:config:split"):
        problems_on_the_hub("hf:a/b", "train")


def test_generate_reads_prompts_from_an_array_and_from_a_data_set(tmp_path, model_folder):
    (tmp_path / "train.json").write_text(json.dumps([{"prompt": "one", "n": 1}, {"prompt": "two", "n": 2}]))
    outputs = []
    for number, prompts in enumerate((str(tmp_path / "train.json"), f"hf:{tmp_path}")):
        output = tmp_path / "out" / f"{number}.jsonl"
        command = ["generate", "--model", str(model_folder), "--prompts", prompts, "--output", str(output)]
        assert main([*command, "--max-tokens", "4", "--seed", "1", "--device", "cpu"]) == 0
        outputs.append(output.read_text())
    assert outputs[0] == outputs[1] and [json.loads(line)["n"] for line in outputs[0].splitlines()] == [1, 2]
