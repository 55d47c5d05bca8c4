"""Every command of the README and the docs is run here, or is read by its own program, or says what it needs.

How: `docs_commands.py`. Those of `antkv` in which nothing is to be filled in are run as they stand.
"""

import re

import pytest

from tests.house.docs_commands import (
    PAGES,
    ROOT,
    Command,
    WrongCommand,
    check,
    commands,
)
from vllm_antkv import cli

COMMANDS = [command for page in PAGES for command in commands(page) if command.words]
RUN = [command for command in COMMANDS if command.words[0] == "antkv" and not (command.needs or command.has_blanks)]


def test_what_a_command_needs_stands_before_its_fence(tmp_path):
    """GitHub drops what stands beside the language."""
    assert not [page.name for page in PAGES if re.search(r"^ *```\w+ ", page.read_text(), re.M)]
    page = tmp_path / "page.md"
    fence = "```bash\nantkv doctor\n```\n"
    for sentence, needs in {"This needs a GPU:": True, "One needs Docker and a GPU:": True, "Read it:": False}.items():
        page.write_text(f"{sentence}\n\n{fence}\nMore.\n\n{fence}")
        assert [command.needs for command in commands(page)] == [needs, False]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.page}: {command.line}"[:90])
def test_a_command_is_right(command):
    check(command)


def test_commands_with_nothing_to_fill_in_run(tmp_path, monkeypatch):
    """In the order of the pages, in one folder: later ones use what earlier ones made."""
    assert len(RUN) >= 4, "the quick start has some"
    for name in ("LICENSE", "models"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    for line, command in {command.line: command for command in RUN}.items():
        assert cli.run(command.words[1:]) == 0, line


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("antkv calibrate MODEL --preset antkv-1bit --text FILE --out DIR --sample 3", "--sample"),
        ("antkv calibrate MODEL --preset antkv-3bit --text FILE --out DIR", "antkv-3bit"),
        ("antkv callibrate MODEL", "callibrate"),
        ("antkv eval compare MODEL --methods fp16,rtn-9bit --text FILE --json OUT", "rtn-9bit"),
        ("vllm serve MODEL --kv-cache-dtype antkv-1bit --no-such-flag 3", "--no-such-flag"),
        ("vllm serve MODEL --kv-cache-dtype antkv-3bit", "antkv-3bit"),
        ('vllm serve MODEL --additional-config \'{"antkv": {"recent": 3}}\'', "recent"),
        ("make demon", "demon"),
        ("python -m scripts.nothing", "nothing.py"),
        ("pytest tests/nothing.py", "nothing.py"),
        ("pip install --requirement requirements/nothing.lock", "nothing.lock"),
    ],
)
def test_a_wrong_command_is_found(line, words):
    with pytest.raises(WrongCommand, match=words):
        check(Command("page.md", line, None))
