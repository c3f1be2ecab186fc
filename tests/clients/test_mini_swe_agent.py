"""mini-swe-agent, in an environment of its own, against a server process."""

import pytest

from tests.clients.replies import call

pytestmark = pytest.mark.slow

WRITE, READ = "echo $((6 * 7)) > answer.txt", "cat answer.txt"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat answer.txt"


def bash(command, thought=""):
    return call("bash", {"command": command}, thought)


def block(command):
    return f"I go on.\n\n```mswea_bash_command\n{command}\n```"


def test_its_loop_runs_commands_until_it_submits_by_calls_and_by_code_blocks(scripted, run):
    two = f"{bash(READ, 'I look, twice.')}\n{bash('ls')}"
    scripted.say(bash(WRITE, "I write."), "No command.", two, bash(SUBMIT), block(WRITE), block(READ), block(SUBMIT))
    found = run("mini_swe_agent", "mini_swe_agent.py", scripted.url)
    for way, calls in (("litellm", 4), ("litellm_textbased", 3)):
        assert found[way]["answer"] == "42\n" and found[way]["calls"] == calls
        assert found[way]["status"] == "Submitted" and found[way]["submission"].strip() == "42"
    asked, told = ["system", "user"], ["assistant", "tool"]
    assert found["litellm"]["roles"] == [*asked, *told, "user", *told, "tool", *told, "exit"]
    prompts = scripted.prompts()
    assert "No tool calls found" in prompts[2]
    assert '"output": "42' in prompts[3] and "answer.txt" in prompts[3].rpartition("<tool_response>")[2]
    assert "<output>\n42\n</output>" in prompts[6]
