"""Every command of the README and the docs is run here, or is read by its own program, or says what it needs.

How: `docs_commands.py`. Those of `antkv` in which nothing is to be filled in are run as they stand.
"""

from pathlib import Path

import pytest

from tests.house.docs_commands import (
    PAGES,
    ROOT,
    Command,
    WrongCommand,
    check,
    commands,
    known_options,
    options_in_prose,
)
from vllm_antkv import cli

COMMANDS = [command for page in PAGES for command in commands(page) if command.words]
RUN = [command for command in COMMANDS if command.words[0] == "antkv" and not (command.needs or command.has_blanks)]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.page}: {command.line}"[:90])
def test_a_command_is_right(command: Command) -> None:
    check(command)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_in_prose_exist(page: Path) -> None:
    of_kubectl = {"--namespace", "--filename"}
    assert set(options_in_prose(page)) <= known_options() | of_kubectl


def test_commands_with_nothing_to_fill_in_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        ("antkv inspect MODEL --text FILE --out DIR --figures none-such", "none-such"),
        ("vllm serve MODEL --kv-cache-dtype antkv-1bit --no-such-flag 3", "--no-such-flag"),
        ("vllm serve MODEL --kv-cache-dtype antkv-3bit", "antkv-3bit"),
        ('vllm serve MODEL --additional-config \'{"antkv": {"recent": 3}}\'', "recent"),
        ("vllm bench serve --model MODEL --random-input 3 --no-such-flag", "--no-such-flag"),
        ("make demon", "demon"),
        ("make demo ARGS=--twice", "--twice"),
        ("python -m loadtest.run loadtest/scenarios/embedded.yaml --uri http://127.0.0.1:8000", "--uri"),
        ("pytest tests/nothing.py", "nothing.py"),
        ("pip install --requirement requirements/nothing.lock", "nothing.lock"),
        ("curl http://localhost:8000/metrics | wget", "wget"),
        ("curl http://localhost:8000/antkv/state", "state"),
        ("docker compose --file docker/nothing.yaml up", "nothing.yaml"),
        ("helm install vllm-antkv docker/helm/nothing", "nothing"),
    ],
)
def test_a_wrong_command_is_found(line: str, words: str) -> None:
    with pytest.raises(WrongCommand, match=words):
        check(Command("page.md", line, None))


@pytest.mark.parametrize("fence", ["```\nrm -rf x\n```\n", '```bash title="Slow"\nmake test\n```\n'])
def test_no_command_hides_in_a_fence(tmp_path: Path, fence: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(fence)
    with pytest.raises(WrongCommand):
        list(commands(page))


def test_a_page_is_read(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        'Try `x --seed a`:\n\n    ```bash title="Needs a GPU"\n    A=1 make test \\\n      ARGS=-x  # so\n    ```\n'
    )
    (command,) = commands(page)
    assert command.words == ["make", "test", "ARGS=-x"]
    assert command.needs == "Needs a GPU"
    assert list(options_in_prose(page)) == ["--seed"]
