"""`lockstep doctor` on this very machine, and on it with one thing broken after the other."""

import json
import os
import socket
import subprocess
import sys

import pytest

from lockstep.observe import doctor
from lockstep.observe.doctor import as_json, as_text, usable
from lockstep.ops.native.build import SHIPPED


def _found(area):
    return {finding.name: finding for finding in doctor.AREAS[area]()}


@pytest.mark.slow
def test_the_command_prints_one_json_object_within_ten_seconds():
    command = [sys.executable, "-m", "lockstep", "doctor", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    report = json.loads(result.stdout)
    findings = report["findings"]
    assert report["usable"] is (result.returncode == 0) is True, result.stdout
    assert {name.split("/")[0] for name in findings} == set(doctor.AREAS)
    assert findings["operators/float32"]["value"] > 1e8 and findings["memory/speed"]["value"] > 1e8
    assert findings["processor/arithmetic"]["value"] in ("portable", "bf16_pairs", "bf16_tiles")
    assert all(finding["remedy"] for finding in findings.values() if finding["state"] in ("note", "bad"))


def test_a_missing_package_is_broken_and_one_of_another_version_is_noted_with_the_command_for_it(monkeypatch):
    monkeypatch.setitem(doctor.REQUIRED, "no-such-package", "no_such_package")
    needed = ["torchmonarch>=1", "torch>=2.11,<2.99", "numpy>=1000"]
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: needed)
    findings = list(doctor.AREAS["packages"]())
    states = {finding.name: (finding.state, finding.remedy) for finding in findings}
    assert states["packages/numpy"] == ("note", 'pip install "numpy>=1000"') and states["packages/torch"][0] == "ok"
    assert not usable(findings) and json.loads(as_json(findings))["usable"] is False
    text = as_text(findings)
    assert "✗  no-such-package    missing\n" in text and 'pip install "no-such-package"' in text
    assert as_text(findings, "ascii").encode("ascii"), "for a terminal without these characters"


@pytest.mark.slow
def test_a_cache_that_others_may_write_to_is_broken_and_the_rest_is_examined(tmp_path):
    (tmp_path / "lockstep").mkdir()
    (tmp_path / "lockstep").chmod(0o777)
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "LOCKSTEP_NATIVE": "1"}
    command = [sys.executable, "-m", "lockstep", "doctor", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    findings = json.loads(result.stdout)["findings"]
    cache, used = findings["folders/cache"], findings["processor/used"]
    assert result.returncode == 1 and cache["state"] == "bad" and cache["value"] == str(tmp_path / "lockstep")
    assert "rm -r" in cache["remedy"] and "network/port" in findings
    if not any(SHIPPED.glob("*.so")):
        assert used["state"] == "bad" and "rm -r" in used["remedy"] and findings["operators/native"]["state"] == "bad"


def test_a_port_in_use_a_busy_machine_and_few_files_are_noted_but_not_broken(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(doctor, "PORT", taken.getsockname()[1])
        port = _found("network")["network/port"]
    assert port.state == "note" and "--port 0" in port.remedy
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    load = _found("processor")["processor/load"]
    assert load.state == "note" and "other work is running" in load.remedy
    assert usable([port, load])
