"""The environments that the clients live in, apart from the project's own; each is made on first use."""

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / ".environments"
CLIENTS = {
    "openai": ["openai==3.57.0"],
    "litellm": ["litellm==1.110.2"],
    # Streams in the form of Anthropic import the proxy of litellm.
    "litellm_messages": ["litellm==1.110.2", "fastapi==0.165.0", "orjson==3.13.0", "soundfile==0.14.0"],
    "openai_agents": ["openai-agents==0.24.0", "openai==3.57.0"],
    "smolagents": ["smolagents[openai]==1.26.0"],
    "pydantic_ai": ["pydantic-ai-slim[openai]==2.68.0"],
    "langchain": ["langchain-openai==1.7.4", "langgraph==1.2.24"],
    "inspect_ai": ["inspect-ai==0.3.285", "openai==3.57.0"],
    "mini_swe_agent": ["mini-swe-agent==2.4.6"],
    "tinker_cookbook": [
        *("tinker==0.38.0", "transformers==5.24.0", "datasets==5.2.0", "torch>=2.11,<2.14", "chz>=0.4"),
        *("aiohttp", "anyio", "blobfile", "cloudpickle", "math-verify", "numpy", "pillow", "pydantic", "pylatexenc"),
        *("pyrage", "rich", "safetensors", "sympy", "termcolor", "tiktoken", "tqdm"),
    ],
}
"""What each environment has installed."""
ALONE = {"tinker_cookbook": ["tinker-cookbook==0.6.1"]}
"""What is installed without its requirements: this one asks for a release of tml-renderers that no index has, and that
the models here do not need."""


def client_python(client: str) -> str:
    """The Python of a client's environment. Skips the test if the client cannot be installed."""
    FOLDER.mkdir(exist_ok=True)
    alone = ALONE.get(client, [])
    folder, pins = FOLDER / client, "\n".join([*CLIENTS[client], *alone])
    python, installed = folder / "bin" / "python", folder / ".installed"
    with (FOLDER / f"{client}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests of one client may run in several processes
        if not installed.exists() or installed.read_text() != pins:
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            options = ["--quiet", "--disable-pip-version-check", "--retries", "1"]
            command = [str(python), "-m", "pip", "install", *options]
            for packages in (CLIENTS[client], *([["--no-deps", *alone]] if alone else [])):
                result = subprocess.run([*command, *packages], capture_output=True, text=True)
                if result.returncode:
                    reason = (result.stderr.strip().splitlines() or ["pip failed"])[-1]
                    pytest.skip(f"{client} cannot be installed: {reason}")
            installed.write_text(pins)
    return str(python)
