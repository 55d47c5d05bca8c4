"""Nothing that we read can run as code. Ruff finds pickle, eval and shells (`pyproject.toml`); here are keywords."""

import ast
import subprocess
from collections.abc import Iterator

import pytest

from tests.places import ROOT

#: Keywords with which, or with another value than this, a function may unpickle, or run what a model brings along.
FORBIDDEN = {"allow_pickle": "False", "trust_remote_code": "False", "weights_only": "True"}


def violations(source: str) -> Iterator[str]:
    """Calls that must not stand in a file."""
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call):
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            # The default depends on the version of PyTorch.
            unsafe_load = ast.unparse(call.func) == "torch.load" and "weights_only" not in keywords
            if unsafe_load or any(keywords.get(name, value) != value for name, value in FORBIDDEN.items()):
                yield ast.unparse(call)


def test_no_file_reads_what_may_run():
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    files = [path for name in listed if (path := ROOT / name).is_file()]
    assert len(files) > 100
    assert [f"{path}: {what}" for path in files for what in violations(path.read_text())] == []


@pytest.mark.parametrize("unsafe", ["torch.load(p)", "torch.load(p, weights_only=False)", "f(trust_remote_code=True)"])
def test_what_may_run_is_found(unsafe):
    assert list(violations(unsafe)) == [unsafe]
    assert not list(violations("torch.load(p, weights_only=True)"))
