"""A codebook that nobody has made is made when a server asks for it, once, in a process of its own."""

import errno
import fcntl
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from filelock import FileLock
from transformers import AutoConfig

from tests.places import PRESET
from tests.unit.damaged import config_with
from vllm_antkv.calibrate.calibrate_on_start import main
from vllm_antkv.calibrate.original import original_of
from vllm_antkv.codebook import Codebook, ModelIdentity, NoCodebookError, codebook_path, own_folder
from vllm_antkv.codebook.automatic import CodebookRequest, find_or_make
from vllm_antkv.config import AntKVConfig
from vllm_antkv.errors import CodebookError, SettingsError


@pytest.fixture(autouse=True)
def users_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def wanted(model: Path) -> CodebookRequest:
    return CodebookRequest(str(model), None, ModelIdentity.from_hf_config(AutoConfig.from_pretrained(model)), PRESET)


def test_the_first_start_makes_it_and_the_second_finds_it(tiny_llama, users_cache, said):
    want = wanted(tiny_llama)
    path = find_or_make(want, AntKVConfig())
    assert users_cache in path.parents
    Codebook.load(path, PRESET, want.identity)
    # Nothing of the work is left.
    assert {found.name for found in path.parent.iterdir()} - {f".{PRESET}.lock"} == {path.name}
    assert any("learning one from the text that comes with the package" in line for line in said)
    said.clear()
    assert find_or_make(want, AntKVConfig(calibrate="never")) == path
    assert not said


@pytest.mark.long
def test_whoever_comes_while_it_is_made_waits_and_takes_it(tiny_llama, tmp_path):
    path = codebook_path(tmp_path, PRESET)
    command = [sys.executable, "-m", "vllm_antkv.calibrate.calibrate_on_start", str(tiny_llama), PRESET, str(tmp_path)]
    with FileLock(tmp_path / f".{PRESET}.lock"):
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert "waiting" in process.stderr.readline()
        path.write_text("of the first")
    process.communicate()
    assert process.returncode == 0
    assert path.read_text() == "of the first"


@pytest.mark.parametrize("settings", [{"calibrate": "never"}, {"codebooks": "elsewhere"}], ids=str)
def test_none_is_made_where_none_is_wanted(tiny_llama, users_cache, settings, refused):
    with refused(NoCodebookError, f"make one with `antkv calibrate {tiny_llama}"):
        find_or_make(wanted(tiny_llama), AntKVConfig(**settings))
    assert not users_cache.exists()


def test_a_text_that_is_not_there_is_refused(tiny_llama, refused):
    with refused(SettingsError, "no-such-file"):
        find_or_make(wanted(tiny_llama), AntKVConfig(calibration_text="no-such-file"))


@pytest.mark.long
def test_a_calibration_that_fails_is_one_sentence(tiny_llama, tmp_path, refused):
    text = tmp_path / "short.txt"
    text.write_text("Seven words are not enough for it.")
    with refused(CodebookError, "fewer than one window"):
        find_or_make(wanted(tiny_llama), AntKVConfig(calibration_text=str(text)))
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_a_cache_that_cannot_be_written_is_one_sentence_that_names_the_variable(tiny_llama, monkeypatch, refused):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    words = "XDG_CACHE_HOME in the server's environment puts it elsewhere"
    with refused(CodebookError, words, "/proc/vllm-antkv/"):
        find_or_make(wanted(tiny_llama), AntKVConfig())


def test_a_file_system_without_locks_is_one_sentence_too(tiny_llama, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    monkeypatch.setattr(sys, "argv", ["once", str(tiny_llama), PRESET, str(tmp_path / "out")])
    assert main() == 1
    said = capsys.readouterr().err.strip()
    assert "is in a file system without locks: No locks available; XDG_CACHE_HOME in the server's environment" in said
    assert not codebook_path(tmp_path / "out", PRESET).exists()


def test_other_weights_and_other_texts_have_folders_of_their_own(tiny_llama, tmp_path):
    identity = wanted(tiny_llama).identity
    same, trained = tmp_path / "same", tmp_path / "trained"
    for copy in (same, trained):
        shutil.copytree(tiny_llama, copy)
    weights = trained / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    text = tmp_path / "text.txt"
    text.write_text("Some words.")
    folder = own_folder(str(tiny_llama), identity)
    assert own_folder(str(same), identity) == folder
    assert own_folder(str(trained), identity) != folder
    assert own_folder(str(same), identity, text=str(text)).parent == folder


def quantised(original: Path, folder: Path, **changes: object) -> Path:
    """The config of a quantised version of a model; nothing reads its weights."""
    folder.mkdir()
    shutil.copy(original / "config.json", folder)
    config_with(quantization_config={"quant_method": "awq", "bits": 4}, **changes)(folder)
    return folder


@pytest.mark.parametrize("where", ["config", pytest.param("card", marks=pytest.mark.long)])
def test_for_quantised_weights_the_original_is_taken(tiny_llama, tmp_path, where, monkeypatch, capsys):
    named = {"base_model": str(tiny_llama)}
    model = quantised(tiny_llama, tmp_path / "awq", **(named if where == "config" else {}))
    if where == "card":
        (model / "README.md").write_text(f"---\nbase_model:\n- {tiny_llama}\n---\n")
    monkeypatch.setattr(sys, "argv", ["once", str(model), PRESET, str(tmp_path / "out")])
    assert main() == 0
    assert str(tiny_llama) in capsys.readouterr().err
    Codebook.load(codebook_path(tmp_path / "out", PRESET), PRESET, wanted(tiny_llama).identity)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "its original is not named in its config or card"),
        ({"base_model": "nobody/nowhere"}, "its original is not at hand (nobody/nowhere)"),
    ],
    ids=["unnamed", "far away"],
)
def test_quantised_weights_without_their_original_are_learned_from_themselves(
    tiny_llama, tmp_path, changes, says, capsys
):
    """How, is tested with a real engine: `tests/serving/test_quantised_calibration.py`."""
    model = str(quantised(tiny_llama, tmp_path / "awq", **changes))
    assert original_of(model) == model
    assert says in capsys.readouterr().err
