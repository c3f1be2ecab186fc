"""Every script in `examples/` runs as its first lines say, and is short."""

import json
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
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


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(script, tmp_path, model_folder, monkeypatch, capsys):
    assert len(script.read_text().splitlines()) <= 60
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in CONVERSATIONS))
    given = ["--model", str(model_folder)] if '"--model", required=True' in script.read_text() else []
    monkeypatch.setattr(sys, "argv", [str(script), *given, *SHORT.get(script.stem, [])])
    runpy.run_path(str(script), run_name="__main__")
    assert PRINTED[script.stem] in capsys.readouterr().out
