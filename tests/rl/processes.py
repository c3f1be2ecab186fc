"""The processes of this machine, as tests see them."""

import os
from pathlib import Path


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def command_of(pid):
    """The arguments that a process was started with; none if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def running(*words):
    """The processes in whose command each of these words is."""
    commands = {int(name): " ".join(command_of(name)) for name in os.listdir("/proc") if name.isdigit()}
    return [pid for pid, command in commands.items() if all(word in command for word in words) and is_alive(pid)]
