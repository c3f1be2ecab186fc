"""What the tests of runs share: files of lines, a small run on a text, and what a run has written."""

import json

from lockstep.config import PretrainConfig

TEXT = "the quick brown fox jumps over the lazy dog. "


def write_lines(path, lines):
    """Writes a JSONL file; returns its name."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def text_run(folder, name="run", repeats=60, **changes):
    """A run of the smallest model on the file `text.txt`, of so many sentences."""
    (folder / "text.txt").write_text(TEXT * repeats)
    defaults = dict(
        output=str(folder / name), model="qwen3:micro", data=str(folder / "text.txt"), device="cpu", dtype="float32",
        tokens_per_step=256, sequence_length=64, steps=4,
    )  # fmt: skip
    return PretrainConfig(**(defaults | changes))


def logged(folder, name="loss"):
    """A metric at every step of a run."""
    return [json.loads(line).get(name) for line in (folder / "metrics.jsonl").read_text().splitlines()]
