"""Nothing that we read can run as code: no pickle, none of its relatives, no eval and no shell, in any Python file."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Modules that run, or rebuild any object from, what they read.
MODULES = {
    "_pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "jsonpickle",
    "marshal",
    "pickle",
    "pickletools",
    "shelve",
}
#: Functions that do, as they are written in code.
FUNCTIONS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "yaml.load",
    "yaml.load_all",
    "yaml.unsafe_load",
    "yaml.full_load",
    "pandas.read_pickle",
}
#: A keyword with which, or with another value than this, a function may unpickle or run a shell.
FORBIDDEN = {"shell": "False", "allow_pickle": "False", "trust_remote_code": "False", "weights_only": "True"}


def python_files() -> list[Path]:
    """Everything that git knows or would know."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [path for path in (ROOT / name for name in listed) if path.is_file()]


def violations(source: str) -> Iterator[str]:
    """What must not stand in a file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[0] in MODULES:
                yield f"from {node.module}"
        elif isinstance(node, ast.Call):
            yield from _of_a_call(node)


def _of_a_call(call: ast.Call) -> Iterator[str]:
    function = ast.unparse(call.func)
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg}
    if function in FUNCTIONS:
        yield f"{function}()"
    if function == "torch.load" and "weights_only" not in keywords:
        # The default depends on the version of PyTorch.
        yield "torch.load() without weights_only=True"
    for name, value in FORBIDDEN.items():
        if keywords.get(name, value) != value:
            yield f"{function}({name}={keywords[name]})"


def test_no_file_reads_what_may_run() -> None:
    files = python_files()
    assert len(files) > 100
    found = [f"{path.relative_to(ROOT)}: {what}" for path in files for what in violations(path.read_text())]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, pickle as p",
        "from pickle import loads",
        "import joblib.externals",
        "def f():\n    import marshal",
        "eval('1')",
        "exec(text)",
        "os.system('ls')",
        "yaml.load(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "np.save(path, array, allow_pickle=True)",
        "subprocess.run('ls', shell=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_what_may_run_is_found(source: str) -> None:
    assert list(violations(source))


def test_what_may_not_run_is_not_found() -> None:
    source = "torch.load(path, weights_only=True); np.load(path, allow_pickle=False); model.eval(); re.compile('a')"
    assert list(violations(source)) == []
