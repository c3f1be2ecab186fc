"""What the tests of runs share: files of lines, and what a run has written."""

import json


def write_lines(path, lines):
    """Writes a JSONL file; returns its name."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def logged(folder, name="loss"):
    """A metric at every step of a run."""
    return [json.loads(line).get(name) for line in (folder / "metrics.jsonl").read_text().splitlines()]
