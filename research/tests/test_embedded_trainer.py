"""The embedded model's trainer: a kill costs only time, the token cache is faithful, the baseline is a probability."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

MODELS = Path(__file__).parents[1] / "models"
STEPS = 8


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import one of the scripts in ``models/`` by name."""
    monkeypatch.syspath_prepend(str(MODELS))
    return importlib.import_module


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A token cache of random rows."""
    rows = np.random.default_rng(0).integers(7, 4096, size=(24, 2048), dtype=np.uint16)
    for name, part in (("train", rows), ("val", rows[:2])):
        np.save(tmp_path / f"{name}.npy", part)
    return tmp_path


#: Runs the command in forked children, which import PyTorch once for all: one that is left alone, one that is killed,
#: one that goes on. It kills itself after a few checkpoints, which nobody can do from outside at the same moment on
#: every machine. The last line says how each ended, and after how many steps of the run.
RUNS = """
import json, os, signal, sys
from pathlib import Path
import torch
import train_embedded
save, saved = train_embedded.Trainer.save, []
def save_and_die(self, path, elapsed):
    save(self, path, elapsed)
    saved.append(path)
    if len(saved) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
def train(run, save=save):
    child = os.fork()
    if not child:
        train_embedded.Trainer.save = save
        train_embedded.app(["train", "--run", str(run), *sys.argv[2:]])
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code, torch.load(run / "checkpoint.pt", weights_only=True)["step"]
whole, broken = (Path(sys.argv[1], name) for name in ("whole", "broken"))
print(json.dumps([train(whole), train(broken, save_and_die), train(broken)]))
"""


def load(run: Path) -> Any:
    return torch.load(run / "checkpoint.pt", weights_only=True)


def flat(state: Any) -> list[Any]:
    """Leaves of a nested checkpoint, in order."""
    if isinstance(state, dict):
        return [leaf for key in state for leaf in flat(state[key])]
    if isinstance(state, (list, tuple)):
        return [leaf for item in state for leaf in flat(item)]
    return [state]


def test_killed_and_resumed_run_equals_an_uninterrupted_one(cache: Path, tmp_path: Path) -> None:
    """Tiny runs of ``STEPS`` steps that checkpoint after every step."""
    shape = "--layers 1 --hidden 64 --intermediate 64 --heads 1 --kv-heads 1 --rows-per-step 1 --checkpoint-seconds 0"
    options = ["--cache", str(cache), "--steps", str(STEPS), *shape.split()]
    command = [sys.executable, "-c", RUNS, str(tmp_path), *options]
    said = subprocess.run(command, cwd=MODELS, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    ended = json.loads(said.stdout.splitlines()[-1])
    assert ended == [[0, STEPS], [-signal.SIGKILL, 3], [0, STEPS]]

    first, second = load(tmp_path / "whole"), load(tmp_path / "broken")
    del first["elapsed"], second["elapsed"]
    for one, other in zip(flat(first), flat(second), strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_clock_schedule_anneals_on_time(script: Any) -> None:
    plan = script("train_embedded").TrainPlan(minutes=10)
    assert plan.progress(step=3, elapsed=300) == 0.5
    assert plan.lr_factor(step=0, progress=0.0) < 0.1
    assert plan.lr_factor(step=10_000, progress=0.2) == 1.0
    assert plan.lr_factor(step=10_000, progress=1.0) == 0.01
    assert (plan.context(0.5), plan.context(0.9)) == (512, 2048)


def test_windows_predict_every_token_once_from_a_bos(script: Any) -> None:
    row = torch.arange(7, 7 + 2048)
    inputs, targets = script("train_embedded").windows(row, 512)
    assert inputs.shape == targets.shape == (4, 512)
    assert torch.equal(targets.flatten(), row)
    assert (inputs[:, 0] == 0).all()
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_network_equals_transformers(script: Any) -> None:
    net_module, export = script("embedded_net"), script("embedded_export")
    torch.manual_seed(0)
    net = net_module.EmbeddedNet(net_module.NetConfig(hidden_size=128, intermediate_size=96, num_layers=2))
    for parameter in net.parameters():  # the zero-initialised projections would hide a difference
        torch.nn.init.normal_(parameter, std=0.1)
    llama = export.LlamaForCausalLM(export.llama_config(net.config)).eval()
    llama.load_state_dict(net.state_dict(), strict=False)
    llama.tie_weights()
    assert export.logit_difference(net, llama) < 1e-3


def test_pieces_rebuild_the_document(script: Any) -> None:
    text = script("embedded_text")
    document = "\n\n".join(f"Paragraph {n} of a long book." for n in range(2000))
    pieces = list(text.cut_pieces(document, piece_chars=1000))
    assert "".join(pieces) == document + text.EOS
    assert all(piece.endswith("\n\n") for piece in pieces[:-1])


def test_training_chats_look_like_the_chat_template(script: Any) -> None:
    text = script("embedded_text")
    turns = next(text.dialogue_turns('"Who is there?"\n\n"It is only I."\n\nThe door opened.\n\nNobody came in.'))
    assert turns == ['"Who is there?"', '"It is only I."']
    tokenizer = text.train_tokenizer(["a few words to learn from"], vocab_size=300)
    messages = [{"role": role, "content": turn} for role, turn in zip(("user", "assistant"), turns, strict=True)]
    assert text.BOS + text.as_chat(turns) == tokenizer.apply_chat_template(messages, tokenize=False) + text.EOS


def test_cache_keeps_book_ends_and_decodes_to_the_source(script: Any, tmp_path: Path) -> None:
    text = script("embedded_text")
    words = ["the", "of", "and", "to", "in", "a", "that", "it", "was", "his", "he", "with", "as", "had"]
    rng = np.random.default_rng(0)
    book = "\n\n".join(" ".join(rng.choice(words, 30)) for _ in range(400))
    (tmp_path / "book.txt").write_text(book)
    sources = text.Sources(books=[tmp_path / "book.txt"], docs=[], val=tmp_path / "book.txt")
    text.build_cache(sources, text.Selection(tokens=10**6, docs_share=0.0, chat_share=0.0, seed=0), tmp_path)
    tokenizer = script("transformers").AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    rows = np.load(tmp_path / "train.npy")
    assert rows.shape[1] == text.ROW_TOKENS
    assert all(tokenizer.decode(row, skip_special_tokens=True) in book for row in rows)
    assert sum(row[-1] == 1 for row in rows) == 1


def test_trigram_probabilities_sum_to_one(script: Any) -> None:
    trigram = script("trigram_baseline")
    rows = np.random.default_rng(0).zipf(1.3, size=(4, 2048)).clip(max=4095).astype(np.uint16)
    model = trigram.Trigram(rows)
    for before, last in ((0, 0), (1, 2), (4000, 4001), (3, 1)):
        every = np.array([[before, last, token] for token in range(4096)], dtype=np.uint16)
        assert model.probabilities(every).reshape(-1, 3)[:, 2].sum() == pytest.approx(1.0)
