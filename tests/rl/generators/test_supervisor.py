"""What a run says of a generator that it has lost, and starts again."""

import logging
import subprocess

from lockstep.config import ActorsConfig
from lockstep.rl.generators.pool import GeneratorPool
from lockstep.rl.generators.supervisor import GeneratorSupervisor


def test_a_process_whose_end_is_seen_after_its_connection_is_lost_is_said_to_be_killed(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "lockstep")
    # Another start is not what this is about: tests/rl/generators/test_disturbed.py has real ones.
    monkeypatch.setattr(GeneratorSupervisor, "_start", lambda *_: None)
    supervisor = GeneratorSupervisor(
        ActorsConfig(generators=1), GeneratorPool(512, 4096, 60.0), "", b"", "cpu", tmp_path
    )
    (generator,) = supervisor._generators
    generator.has_joined = generator.was_ready = True  # and the pool has no generator: its connection is gone
    generator.ranks = [subprocess.Popen(["sh", "-c", "sleep 0.03; kill -9 $$"], stdin=subprocess.PIPE)]
    supervisor._check(generator)
    assert "generator_0 was killed by SIGKILL; restarting it" in caplog.text
