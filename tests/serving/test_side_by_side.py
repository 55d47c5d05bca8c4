"""`antkv diff` between real servers of one model: antkv-1bit against `auto`, and against itself."""

import json
from pathlib import Path

import pytest

from loadtest.server import EMBEDDED, Server
from tests.serving.embedded_server import API_KEY, SharedServers
from vllm_antkv import cli
from vllm_antkv.evaluate.side_by_side import first_difference

pytestmark = [pytest.mark.serving, pytest.mark.long]

#: Longer than a block of codes, so that the cache shows.
PROMPT = (EMBEDDED.parents[1] / "LICENSE").read_text()[:1500]
TOKENS = 12


@pytest.fixture(scope="module")
def auto(shared_servers: SharedServers) -> Server:
    """The same model with vLLM's own cache."""
    return shared_servers.running("auto")


def run(this: Server, other: Server, *more: str, key: str = API_KEY) -> int:
    asked = ("--prompt", PROMPT, "--max-tokens", str(TOKENS), "--api-key", key)
    return cli.run(["diff", this.url, other.url, *asked, *more])


def test_a_server_does_not_differ_from_itself(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(server, server, "--json", "-") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["first_difference"] is None
    assert found["answers"][0] == found["answers"][1]
    assert found["prompt_kl"] == pytest.approx(0, abs=1e-6)
    assert found["answer_kl"] == pytest.approx(0, abs=1e-6)
    assert all(token["best"][0] == token["best"][1] for token in found["tokens"])


def test_1_bit_differs_from_auto(
    server: Server, auto: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, figure = tmp_path / "diff.json", tmp_path / "diff.png"
    assert run(server, auto, "--json", str(out), "--figure", str(figure)) == 0
    found = json.loads(out.read_text())
    assert found["prompt_kl"] > 1e-4, "codes were read"
    assert [token["token"] for token in found["tokens"]] == found["answers"][1]
    assert found["answer_kl"] == pytest.approx(sum(token["kl"] for token in found["tokens"]) / len(found["tokens"]))
    at = found["first_difference"]
    assert at == first_difference(*found["answers"])
    if at is not None:
        assert found["tokens"][at]["best"][0] == found["answers"][0][at]
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert f"{found['answer_kl']:.5f}" in lines[-1]
    assert figure.stat().st_size > 5000


def test_what_cannot_be_asked_is_one_sentence(server: Server, auto: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(server, auto, key="wrong") == 1
    assert f"{server.url}/v1/models answers 401" in capsys.readouterr().err
    nowhere = Server("http://127.0.0.1:9", 0)
    assert run(server, nowhere) == 1
    assert "http://127.0.0.1:9 does not answer" in capsys.readouterr().err
