"""What a command's start does not wait for."""

import json
import subprocess
import sys

import pytest

# What shards a model over ranks, and what saves one: most of a second each.
LEFT_OUT = ["torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch._dynamo"]
PROGRAM = """
import json, sys
from lockstep.cli import main
code = main(sys.argv[1:])
print()
print(json.dumps([code, [name for name in sys.modules if name.startswith("torch.")]]))
"""


def test_one_process_that_samples_imports_nothing_that_shards_a_model(model_folder):
    command = ["generate", "--model", str(model_folder), "--prompt", "ab", "--max-tokens", "3"]
    ran = subprocess.run([sys.executable, "-c", PROGRAM, *command], capture_output=True, text=True, check=True)
    code, imported = json.loads(ran.stdout.splitlines()[-1])
    assert code == 0 and "torch.nn" in imported and not set(LEFT_OUT) & set(imported)


@pytest.mark.parametrize("module", ["lockstep.rl.actors.generator_process", "lockstep.generate.server.serve"])
def test_generators_and_servers_import_nothing_of_the_kind_at_their_start(module):
    program = f"import sys, {module}; sys.exit(bool(set({LEFT_OUT}) & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
