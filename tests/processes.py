"""Python in a process of its own: for what a process can have, import or start only once."""

import os
import subprocess
import sys
from collections.abc import Mapping

from tests.places import ROOT


def run_python(*arguments: object, environment: Mapping[str, str] = os.environ) -> str:
    """What it prints. Where it fails, so does the test, with the end of what it said."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout


def run_pytest(*arguments: object, environment: Mapping[str, str] = os.environ) -> str:
    """The same of tests, of which one passes at least."""
    said = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, environment=environment)
    assert " passed" in said
    return said
