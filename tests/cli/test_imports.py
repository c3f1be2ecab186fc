"""What a command's start does not wait for."""

import json
import subprocess
import sys

from lockstep.cli import COMMANDS

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


def test_generators_and_servers_import_nothing_of_the_kind_at_their_start():
    modules = "lockstep.rl.actors.generator_process, lockstep.generate.server.serve"
    program = f"import sys, {modules}; sys.exit(' '.join(set({LEFT_OUT}) & set(sys.modules)) or 0)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_help_and_wrong_options_need_no_pytorch():
    commands = set(COMMANDS) - {"data", "demo", "doctor", "why"}  # the first has none, the others import it
    program = """
import contextlib, io, sys
from lockstep.cli import main
for command in sys.argv[1:]:
    for option in ("--help", "--no-such-option"):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                code = main([command, option])
            except SystemExit as error:
                code = error.code
        assert code == (2 if option == "--no-such-option" else 0), (command, option, code)
        assert "torch" not in sys.modules, (command, option)
"""
    ran = subprocess.run([sys.executable, "-c", program, *sorted(commands)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
