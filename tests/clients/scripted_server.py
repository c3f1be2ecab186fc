"""`lockstep serve`, whose model says what a file tells it: `python -m tests.clients.scripted_server serve …`.

SCRIPT is a folder. Its `replies.jsonl` has a reply per line, as a JSON string; each sample takes the first one that is
left, and ends its turn after it. `prompts.jsonl` gets the prompts that were answered. Only drawn tokens are replaced:
the engine computes, stops and reports as ever, and a reply that the request's grammar does not allow is an error.
"""

import json
import os
import sys
from pathlib import Path

from lockstep.cli import main
from lockstep.generate.engine import Engine

FOLDER = Path(os.environ["SCRIPT"])
append_drawn = Engine._append_draw
left: dict[tuple[int, int], list[int]] = {}


def begin_reply(engine, sequence):
    """The tokens of the next reply; its text leaves the file."""
    path = FOLDER / "replies.jsonl"
    first, _, rest = path.read_text().partition("\n")
    path.write_text(rest)
    with (FOLDER / "prompts.jsonl").open("a") as file:
        file.write(json.dumps(engine.tokenizer.decode(sequence.tokens[: sequence.prompt_length])) + "\n")
    reply = json.loads(first) if first else "(nothing is left of the script)"
    return [*engine.tokenizer.encode(reply), engine.tokenizer.eos_id]


def append_scripted(engine, sequence, draw):
    key = sequence.request_id, sequence.index
    if sequence.sampled == 0:
        left[key] = begin_reply(engine, sequence)
    return append_drawn(engine, sequence, draw._replace(token=left[key].pop(0)))


if __name__ == "__main__":
    Engine._append_draw = append_scripted
    sys.exit(main(sys.argv[1:]))
