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
    flags_in_prose,
    known_flags,
    names_in_prose,
)
from vllm_antkv import cli
from vllm_antkv.evaluate.figures import FIGURES
from vllm_antkv.evaluate.methods import check_method

COMMANDS = [command for page in PAGES for command in commands(page) if command.words]
RUN = [command for command in COMMANDS if command.words[0] == "antkv" and not (command.needs or command.has_blanks)]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.page}: {command.line}"[:90])
def test_a_command_is_right(command: Command) -> None:
    check(command)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_in_prose_exist(page: Path) -> None:
    of_kubectl = {"--namespace", "--filename"}
    assert set(flags_in_prose(page)) <= known_flags() | of_kubectl


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_figures_and_methods_in_prose_exist(page: Path) -> None:
    assert set(names_in_prose(page, "--figures")) <= set(FIGURES)
    for name in names_in_prose(page, "--methods"):
        check_method(name)


def test_prose_is_read(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Try `inspect --figures a-b,c --out X` or\n```bash\nmake --jobs 3\n```\n")
    assert list(flags_in_prose(page)) == ["--figures", "--out"]
    assert list(names_in_prose(page, "--figures")) == ["a-b", "c"]


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
        ("python benchmarks/gpu_nothing.py", "gpu_nothing"),
        ("python -m loadtest.run loadtest/scenarios/embedded.yaml --uri http://127.0.0.1:8000", "--uri"),
        ("python -m loadtest.soak --minute 3", "--minute"),
        (
            "python -m locust --locustfile loadtest/locustfile.py --scenarios loadtest/scenarios/embedded.yaml",
            "scenarios",
        ),
        ("pip install --requirement requirements/nothing.lock", "nothing.lock"),
        ("pip install 'vllm-antkv[task]'", "task"),
        ("pip install --no-dep .", "--no-dep"),
        ("curl http://localhost:8000/antkv/state", "state"),
        ("cp centroids/*/antkv-3bit.safetensors DIR/", "antkv-3bit"),
        ("docker build --file docker/Dockerfile .", "Needs Docker"),
        ("wget http://localhost:8000", "wget"),
    ],
)
def test_a_wrong_command_is_found(line: str, words: str) -> None:
    with pytest.raises(WrongCommand, match=words):
        check(Command("page.md", line, None))


@pytest.mark.parametrize(
    ("line", "needs", "words"),
    [
        ("docker compose --file docker/nothing.yaml up", "Needs Docker", "nothing.yaml"),
        ("docker run vllm-antkv:9.9.9 MODEL", "Needs Docker", "9.9.9"),
        ("helm install vllm-antkv docker/helm/vllm-antkv --set modell=MODEL", "Needs a cluster", "modell"),
    ],
)
def test_what_needs_more_is_checked_too(line: str, needs: str, words: str) -> None:
    with pytest.raises(WrongCommand, match=words):
        check(Command("page.md", line, needs))


@pytest.mark.parametrize("fence", ["```\nrm -rf x\n```\n", '```bash title="Slow"\nmake test\n```\n'])
def test_no_command_hides_in_a_fence(tmp_path: Path, fence: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(fence)
    with pytest.raises(WrongCommand):
        list(commands(page))


def test_a_fence_says_which_commands_it_has(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        '1. x\n\n    ```bash title="Needs a GPU"\n    # why\n    A=1 make test \\\n      ARGS=-x  # so\n    ```\n'
    )
    (command,) = commands(page)
    assert command.words == ["make", "test", "ARGS=-x"]
    assert command.needs == "Needs a GPU"
