"""Every script in `examples/` runs as its first lines say, and is short; its environments reward what they describe."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from lockstep.errors import UserError
from lockstep.rl import load_environment
from lockstep.rl.rollouts.prompts import examples_of
from tests.rl.conversations.scripted import call, converse

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
SCRIPTS = [path for path in EXAMPLES if "argparse" in path.read_text()]
CONVERSATIONS = [{"prompt": f"{i}+{i}=", "completion": str(2 * i)} for i in range(400)]
SHORT = {
    "pretrain": ["--steps", "2"],
    "sft": ["--data", "data.jsonl", "--tokens-per-step", "1024", "--epochs", "2"],
    "rl_own_task": ["--steps", "2"],
}
PRINTED = {
    "evaluate": ": pass@8 ",
    "parity": "576 log-probabilities compared, 0 different",
    "pretrain": "def main():",
    "rl_own_task": "step 2: reward ",
    "serve_and_ask": " log-probabilities, 0 differ from the trainer's",
    "sft": ", epoch 2.",
}


def test_every_example_is_short():
    lengths = {path.stem: len(path.read_text().splitlines()) for path in EXAMPLES}
    assert max(lengths.values()) <= 80, lengths


SLOW = [pytest.param(path, marks=pytest.mark.slow) if path.stem != "evaluate" else path for path in SCRIPTS]


@pytest.mark.parametrize("script", SLOW, ids=lambda path: path.stem)
def test_an_example_runs(script, tmp_path, model_folder, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in CONVERSATIONS))
    given = ["--model", str(model_folder)] if '"--model", required=True' in script.read_text() else []
    monkeypatch.setattr(sys, "argv", [str(script), *given, *SHORT.get(script.stem, [])])
    runpy.run_path(str(script), run_name="__main__")
    assert PRINTED[script.stem] in capsys.readouterr().out


def environment(name, data=""):
    (path,) = [path for path in EXAMPLES if path.stem == name]
    return load_environment(f"{path}:{name.title().replace('_', '')}", data)


def test_the_sorting_example_rewards_each_turns_list():
    task = environment("alphabet_sort")
    train, held_out = (examples_of(task, split) for split in ("train", "validation"))
    assert len({e.prompt for e in train}) > 1900 and not {e.prompt for e in train} & {e.prompt for e in held_out}

    def lists(example):
        names, part = [], example.metadata["by"] == "last"
        for turn in example.metadata["turns"]:
            names += turn
            yield "<sorted>\n" + "\n".join(sorted(names, key=lambda name: name.split()[part])) + "\n</sorted>"

    for example in train[:20]:
        right, turns = list(lists(example)), len(example.metadata["turns"])
        rewards, chat = converse(task, example, *right)
        assert rewards == {"similarity": 1.0, "correct": 1.0} and len(chat.messages) == 2 * turns
        assert converse(task, example, *right[:-1])[0] == task.unfinished
        for wrong in ("", "<sorted>", "</sorted>", f"<think>{right[-1]}</think>", right[-1] + "<sorted>\na\n</sorted>"):
            rewards = converse(task, example, *right[:-1], wrong)[0]
            assert rewards == {"similarity": (turns - 1) / turns, "correct": 0.0}


def test_the_calculator_example_has_a_tool_and_checks_the_last_line():
    task = environment("calculator")
    examples = examples_of(task, "train")
    assert not {e.prompt for e in examples} & {e.prompt for e in examples_of(task, "validation")}
    example = next(e for e in examples if "crates" in e.prompt)
    a, b, c = (int(word) for word in example.prompt.split() if word.isdigit())
    calls = [call("calculate", expression=f"{a}*{b}-{c}"), call("calculat", expression="1")]
    calls += [call("calculate", expression=text) for text in ("1/0", "2**9", "().x", "(", "1" * 300)]
    rewards, chat = converse(task, example, "".join(calls), f"Done.\nAnswer: {a * b - c:,}.")
    first, *others = [m["content"] for m in chat.messages if m["role"] == "tool"]
    assert rewards == {"correct": 1.0} and first == example.answer
    assert len(others) == 6 and all(answer.startswith("Error: ") for answer in others)
    right, wrong = f"Answer: {example.answer}", "Answer: 1"
    for reply in (right, f"**{right}**", f"{wrong}\n{right}"):
        assert task.reward(example, reply) == {"correct": 1.0}, reply
    for reply in (example.answer, wrong, f"{right}\n{wrong}", f"<think>{right}", f"{right} or 2", "Answer: ", ""):
        assert task.reward(example, reply) == {"correct": 0.0}, reply


def test_the_retrieval_example_finds_reads_and_answers(tmp_path):
    folder = tmp_path / "documents"
    folder.mkdir()
    (folder / "ada.txt").write_text("Ada Lovelace wrote the first program.\n" + "x " * 4000)
    (folder / "note.txt").write_text("Charles Babbage designed the Analytical Engine.")
    (tmp_path / "train.jsonl").write_text('{"question": "Who programmed first?", "answer": "Ada Lovelace"}\n')
    task = environment("retrieval", str(tmp_path))
    (example,) = examples_of(task, "train")
    searches = [call("search", query=query) for query in ("engines OR", "first program", '"*():^-{', "")]
    reads = [call("read", id="[ada]"), call("read", id="ada", page=3), call("read", id="../train.jsonl")]
    rewards, chat = converse(task, example, "".join(searches), "".join(reads), "Found.\nAnswer: the Ada Lovelace.")
    told = [m["content"] for m in chat.messages if m["role"] == "tool"]
    assert told[0].startswith("[note] Charles") and told[1].startswith("[ada] Ada")
    assert told[2:4] == ["nothing found"] * 2 and told[5].strip("x ") == ""
    assert told[4].startswith("Ada Lovelace wrote") and told[6].startswith("Error: ")
    assert rewards == {"correct": 1.0} and set(chat.seconds) == {"search", "read"}
    for reply in ("Ada Lovelace", "Answer: Lovelace", "Answer: a", "<think>Answer: Ada Lovelace", ""):
        assert task.reward(example, reply) == {"correct": 0.0}, reply
    with pytest.raises(UserError, match="contains no texts"):
        environment("retrieval", str(tmp_path / "documents"))
