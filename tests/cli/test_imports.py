"""What a command's start does not wait for."""

import subprocess
import sys

from lockstep.cli import COMMANDS

# What shards a model over ranks, and what saves one: most of a second each.
LEFT_OUT = ["torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch._dynamo"]
PROGRAM = """
import sys
from lockstep.cli import main
for command in sys.stdin.read().splitlines():
    assert main(command.split()) == 0, command
    assert "torch.nn" in sys.modules
    for name in sys.argv[1:]:
        assert name not in sys.modules, (command, name)
import lockstep.rl.generators.process, lockstep.generate.server.serve
assert not {*sys.argv[1:]} & sys.modules.keys(), "at the start of a generator or a server"
"""


def test_one_process_that_trains_and_samples_imports_nothing_that_shards_a_model(tmp_path):
    run, policy = tmp_path / "run", tmp_path / "policy"
    commands = [
        f"pretrain --model qwen3:micro --steps 1 --tokens-per-step 256 --sequence-length 64 --output {run}",
        f"rl --model {run} --environment digit_sum --steps 1 --prompts-per-step 1 --samples-per-prompt 2 "
        f"--max-new-tokens 3 --validation-examples 1 --train.optimizer muon --output {policy}",
        f"generate --model {policy} --prompt ab --max-tokens 3",
    ]
    program = [sys.executable, "-c", PROGRAM, *LEFT_OUT]
    ran = subprocess.run(program, input="\n".join(commands), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_help_and_wrong_options_need_no_pytorch():
    program = """
import contextlib, io, sys
from lockstep.cli import main
for command in sys.argv[1:]:
    for option in ("--help", "--help-all", "--no-such-option") if command == "serve" else ("--help",):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                code = main([command, option])
            except SystemExit as error:
                code = error.code
        assert code == (2 if option == "--no-such-option" else 0), (command, option, code)
        assert "torch" not in sys.modules, (command, option)
"""
    ran = subprocess.run([sys.executable, "-c", program, *sorted(COMMANDS)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
