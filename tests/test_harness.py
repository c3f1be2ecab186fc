"""lm-eval's tasks over this model: the figures of its own Hugging Face backend, on tasks made of local files."""

import json
import runpy
import shutil
import sys

import pytest
import torch

import lockstep
from lockstep.data import load_tokenizer
from lockstep.errors import UserError
from lockstep.shared_prefixes import Scored, packed_batches

pytest.importorskip("lm_eval", reason="needs lm-eval (pip install lm-eval)")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from lockstep.harness import LockstepLM, main

TASK = """
task: local_NAME
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
"""
CHOICE = """
output_type: multiple_choice
doc_to_text: "Q: {{question}}\\nA:"
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
KINDS = {
    "choice": CHOICE,
    "few_shot": CHOICE + "num_fewshot: 3\nfewshot_split: test\n",
    "generation": """
output_type: generate_until
doc_to_text: "{{question}} is"
doc_to_target: "{{choices[label]}}"
generation_kwargs: {until: ["\\n", "e"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
    "perplexity": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}]
""",
}
DOCUMENTS = 6


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    words = ["def", "self", "return", "class", "import", "value", "parser", "None", "decode", "string"]
    with (data := folder / "data.jsonl").open("w") as file:
        for i in range(DOCUMENTS):
            first, second, third, fourth = (words[i * n % 10] for n in (1, 3, 7, 9))
            line = {
                "question": f"which of {first} and {second} follows {i}",
                # All different: between equal ones the other backend chooses by its rounding.
                "choices": [first, f"{third} of {i}", "neither of them", f"{fourth} or {i}"],
                "label": i % 4,
                "text": " ".join(words[(i * j) % 10] for j in range(1, 40)),
            }
            print(json.dumps(line), file=file)
    for name, kind in KINDS.items():
        (folder / f"{name}.yaml").write_text((TASK + kind).replace("NAME", name).replace("DATA", str(data)))
    return folder


def results(model, tasks, **arguments):
    names = [f"local_{path.stem}" for path in sorted(tasks.glob("*.yaml"))]
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    return simple_evaluate(model, tasks=names, task_manager=manager, bootstrap_iters=0, log_samples=True, **arguments)


@pytest.fixture(scope="module")
def ours(tasks, model_folder):
    return results("lockstep", tasks, model_args=f"pretrained={model_folder},dtype=float32")


def test_every_result_is_that_of_the_hugging_face_backend(tasks, model_folder, ours):
    """In float32: the two differ by the rounding of their sums, some 1e-6 of each log-probability."""
    theirs = results("hf", tasks, model_args=f"pretrained={model_folder},dtype=float32,device=cpu", batch_size=8)
    assert ours["results"].keys() == theirs["results"].keys() and len(ours["results"]) == 4
    for task, expected in theirs["results"].items():
        for name, value in expected.items():
            if isinstance(value, float):
                assert ours["results"][task][name] == pytest.approx(value, rel=1e-4), f"{task} {name}"
    compared = 0
    for task, samples in theirs["samples"].items():
        for own, other in zip(ours["samples"][task], samples, strict=True):
            assert own["arguments"] == other["arguments"]
            for (answer,), (expected,) in zip(own["resps"], other["resps"], strict=True):
                if isinstance(expected, str):
                    assert answer == expected
                else:
                    log_prob, *greedy = answer if isinstance(answer, (tuple, list)) else [answer]
                    expected, *expected_greedy = expected if isinstance(expected, (tuple, list)) else [expected]
                    assert float(log_prob) == pytest.approx(float(expected), abs=1e-4, rel=1e-5)
                    assert greedy == expected_greedy
                compared += 1
    assert compared == DOCUMENTS * (4 + 4 + 1 + 1)


def test_an_answer_has_no_end_of_text_even_if_the_tokenizer_writes_it(tmp_path, model_folder):
    def generate(folder):
        (text,) = LockstepLM(pretrained=str(folder), dtype="float32").generate_until(
            [Instance("generate_until", {}, ("def main", {"until": [], "max_gen_toks": 8, "temperature": 0.0}), 0)]
        )
        return text

    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    # What the model says comes to end texts, and a normalizer changes its name: the library then decodes it as text.
    tokenizer = load_tokenizer(folder)
    end = tokenizer.encode(generate(folder))[0]
    (name,) = [name for name, token in tokenizer.vocabulary().items() if token == end]
    file = json.loads((folder / "tokenizer.json").read_text())
    usual = {"single_word": False, "lstrip": False, "rstrip": False}
    file["added_tokens"].append({"id": end, "content": name, "special": True, "normalized": True, **usual})
    file["normalizer"] = {"type": "Replace", "pattern": {"String": name}, "content": f"_{name}"}
    (folder / "tokenizer.json").write_text(json.dumps(file))
    for settings, value in (("config.json", {"eos_token_id": end}), ("tokenizer_config.json", {"eos_token": name})):
        (folder / settings).write_text(json.dumps(json.loads((folder / settings).read_text()) | value))
    ending = load_tokenizer(folder)
    assert ending.eos_id == end and ending.decode([end])
    assert generate(folder) == ""


def test_a_continuations_log_probability_has_the_trainers_bits_however_it_was_packed(model_folder):
    lm = LockstepLM(str(model_folder), tokens_per_batch=200)
    contexts = [list(range(3, 3 + n)) for n in (1, 17, 40, 41)] + [[9, 9, 9]]
    requests = [(None, context, [40 + i, 50 + i, i][: 1 + i]) for context in contexts for i in range(3)]
    answers = lm._loglikelihood_tokens(requests)
    for (_, context, continuation), (log_prob, _) in zip(requests, answers):
        scores = lockstep.score(lm.model, [context + continuation])[0][len(context) - 1 :]
        assert log_prob == float(torch.tensor(scores.tolist(), dtype=torch.float64).sum())


def test_what_sequences_begin_with_is_computed_once_and_the_predictor_of_a_scored_token_always():
    contexts = [tuple(range(50)) + tuple(range(100 * c, 100 * c + 30)) for c in range(5)]
    sequences = sorted(Scored((*context, 900 + i, 7), 80) for context in contexts for i in range(4))
    (batch,) = packed_batches(sequences, 10_000)
    assert [sequence for sequence, _ in batch] == sequences
    computed = sum(sequence.computed - shared for sequence, shared in batch)
    # The first whole; of each further context what is its own, up to the predictor of its first scored token; and of
    # each further continuation that predictor and one token.
    assert computed <= 81 + 4 * 31 + 15 * 31
    lead = None
    for sequence, shared in batch:
        assert shared <= sequence.first - 1
        assert not shared or sequence.tokens[:shared] == lead.tokens[:shared]
        lead = sequence if shared == 0 else lead
    for batch in packed_batches(sequences, 100):
        assert batch[0][1] == 0
        assert sum(sequence.computed - shared for sequence, shared in batch) <= 100


def test_arguments_and_requests_that_have_no_effect_are_refused_by_name(model_folder):
    def ask(**arguments):
        lm.generate_until([Instance("generate_until", {}, ("x", {"until": ["a"], **arguments}), 0)])

    lm = LockstepLM(str(model_folder))
    with pytest.raises(UserError, match="the task needs repetition_penalty, which the engine does not support"):
        ask(repetition_penalty=1.1)
    with pytest.raises(UserError, match="lower max_gen_toks"):
        ask(max_gen_toks=10**6)
    with pytest.raises(UserError, match='dytpe is not an argument of lockstep. Did you mean "dtype"'):
        LockstepLM(str(model_folder), dytpe="bfloat16", batch_size=1)


@pytest.fixture
def command_line(monkeypatch, capsys):
    """Runs lm-eval's command line in this process; returns its exit code and what it printed."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["lm-eval", *map(str, arguments)])
        return main(), capsys.readouterr()

    return run


def test_lm_evals_command_line_evaluates_the_model(tmp_path, tasks, model_folder, command_line, ours):
    arguments = f"pretrained={model_folder},dtype=float32"
    options = ["--model_args", arguments, "--batch_size", "4", "--log_samples", "--output_path", tmp_path]
    code, said = command_line("--model", "lockstep", *options, "--tasks", tasks / "generation.yaml")
    assert code == 0 and "local_generation" in said.out and "exact_match" in said.out
    (written,) = tmp_path.glob("**/results_*.json")
    found = json.loads(written.read_text())["results"]["local_generation"]
    expected = ours["results"]["local_generation"]
    values = {name: value for name, value in expected.items() if isinstance(value, float)}
    assert values and values.items() <= found.items()
    assert len(list(tmp_path.glob("**/samples_local_*.jsonl"))) == 1


@pytest.mark.slow
def test_what_the_model_refuses_ends_lm_evals_command_line_with_its_message(tasks, command_line):
    options = ["--model_args", "pretrained=/nowhere", "--tasks", tasks / "choice.yaml"]
    code, said = command_line("run", "--model", "lockstep", *options)
    assert code == 2 and said.err.splitlines()[-1].startswith("lockstep: /nowhere: no such folder")
    code, said = command_line("ls", "subtasks", "--include_path", tasks)
    assert code == 0 and "local_choice" in said.out


def test_without_lm_eval_it_is_said_what_to_install(monkeypatch, capsys):
    said = "lm_eval is not installed; pip install 'lm-eval[hf]>=0.4.13'"
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError) as error:
        runpy.run_module("lockstep.harness", run_name="lockstep.harness")
    assert str(error.value) == said
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module("lockstep.harness", run_name="__main__")
    assert capsys.readouterr().err == f"lockstep: {said}\n"
