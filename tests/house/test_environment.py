"""Environments are made on one screen, and an installation that fails says why and where all of it is."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.places import ROOT

SCREEN = 24


@pytest.mark.long
def test_a_failed_installation_shows_its_end_and_names_its_log(tmp_path):
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "make_venv.sh", tmp_path / "scripts")
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "cpu.lock").write_text("setuptools==0.0.1\n")
    environment = os.environ | {"GPU": "0", "PYTHON": sys.executable, "PIP_NO_INDEX": "1"}
    command = ["bash", "scripts/make_venv.sh", "serve"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "No matching distribution found for setuptools==0.0.1" in done.stderr
    assert done.stderr.splitlines()[-1] == "The installation failed; all that was said: .venv/install.log"
    assert (tmp_path / ".venv" / "install.log").read_text()
    assert len((done.stdout + done.stderr).splitlines()) <= SCREEN
