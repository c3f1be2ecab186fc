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


def test_a_missing_package_is_broken_and_named_with_its_command(monkeypatch):
    monkeypatch.setitem(doctor.REQUIRED, "no-such-package", "no_such_package")
    findings = list(doctor.AREAS["packages"]())
    assert not usable(findings) and json.loads(as_json(findings))["usable"] is False
    text = as_text(findings)
    assert "✗  no-such-package    missing\n" in text and 'pip install "no-such-package"' in text
    assert text.endswith("1 broken; what to do is shown next to each")


def test_a_package_of_a_version_that_this_one_does_not_take_is_noted(monkeypatch):
    monkeypatch.setattr(doctor, "_wanted", lambda package: ">=1000" if package == "numpy" else "")
    findings = _found("packages")
    assert findings["packages/numpy"].state == "note"
    assert findings["packages/numpy"].remedy == 'pip install "numpy>=1000"' and findings["packages/torch"].state == "ok"


def _reported(**environment):
    """The command's exit code and findings under these variables."""
    command = [sys.executable, "-m", "lockstep", "doctor", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | environment)
    return result.returncode, json.loads(result.stdout)["findings"]


def test_a_cache_that_others_may_write_to_is_broken_and_the_rest_is_examined(tmp_path):
    (tmp_path / "lockstep").mkdir()
    (tmp_path / "lockstep").chmod(0o777)
    code, findings = _reported(XDG_CACHE_HOME=str(tmp_path), LOCKSTEP_NATIVE="1")
    cache, used = findings["folders/cache"], findings["processor/used"]
    assert code == 1 and cache["state"] == "bad" and cache["value"] == str(tmp_path / "lockstep")
    assert "rm -r" in cache["remedy"] and "network/port" in findings
    if not any(SHIPPED.glob("*.so")):
        assert used["state"] == "bad" and "rm -r" in used["remedy"] and findings["operators/native"]["state"] == "bad"


def test_an_unknown_instruction_set_is_broken_and_the_rest_is_examined():
    code, findings = _reported(LOCKSTEP_ISA="bogus", LOCKSTEP_NATIVE="1")
    assert code == 1 and findings["processor/used"]["state"] == "bad" and "network/port" in findings
    assert "LOCKSTEP_ISA is bogus: there is no such instruction set" in findings["processor/used"]["remedy"]


def test_a_port_in_use_a_busy_machine_and_few_files_are_noted_but_not_broken(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(doctor, "PORT", taken.getsockname()[1])
        port = _found("network")["network/port"]
    assert port.state == "note" and "--port 0" in port.remedy
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    load = _found("processor")["processor/load"]
    assert load.state == "note" and "other work is running" in load.remedy
    assert usable([port, load])


def test_a_terminal_without_these_characters_gets_others():
    findings = list(doctor.AREAS["network"]())
    assert "✓" in as_text(findings) and as_text(findings, "ascii").encode("ascii")


def test_the_wanted_version_is_read_from_the_installation(monkeypatch):
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: ["torchmonarch>=1", "torch>=2.11,<2.16"])
    assert doctor._wanted("torch") == ">=2.11,<2.16" and doctor._wanted("jinja2") == ""
