"""`kill -9` of a calibration: the same command goes on where it stopped, and ends in the same bytes."""

import json
import os

import pytest

from tests.processes import run_python
from vllm_antkv.codebook import codebook_path

#: Runs `calibrate` in forked children: one killed while it captures, one killed while it clusters, one that finishes,
#: and one that is never disturbed. Each child notes which windows and layers it worked on.
_KILLS = """
import json, os, signal, sys
from pathlib import Path
import torch
from vllm_antkv.calibrate import learn, run, source
from vllm_antkv.calibrate.settings import CalibrationSettings

model, text, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])

def child(out, log, kill_at_window=None, kill_at_layer=None):
    if os.fork():
        return os.wait()[1]
    torch.set_num_threads(1)
    worked = []
    capture_window, learn_layer = source.capture_window, learn.learn_layer
    def note(what):
        worked.append(what)
        (folder / log).write_text(json.dumps(worked))
    def capture(model, window, index, into):
        note(f"window {index}")
        capture_window(model, window, index, into)
        if index == kill_at_window:
            os.kill(os.getpid(), signal.SIGKILL)
    def learned_layer(files, layer, *rest):
        note(f"layer {layer}")
        learned = learn_layer(files, layer, *rest)
        if layer == kill_at_layer:
            os.kill(os.getpid(), signal.SIGKILL)
        return learned
    source.capture_window, learn.learn_layer = capture, learned_layer
    run.calibrate(
        CalibrationSettings(model, ["antkv-1bit"], [text], folder / out, samples=12, seq_len=64, device="cpu")
    )
    os._exit(0)

codes = [child("killed", "1", kill_at_window=9), child("killed", "2", kill_at_layer=2), child("killed", "3"),
         child("whole", "4")]
(folder / "codes").write_text(json.dumps(codes))
"""


@pytest.mark.long
def test_a_killed_run_goes_on_and_ends_in_the_same_bytes(make_model, text_file, tmp_path):
    model = make_model("llama", num_hidden_layers=4, head_dim=8)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run_python("-c", _KILLS, model, text_file, tmp_path, environment=environment)
    assert json.loads((tmp_path / "codes").read_text()) == [9, 9, 0, 0]
    worked = [json.loads((tmp_path / str(child)).read_text()) for child in (1, 2, 3, 4)]
    windows, layers = ([f"{what} {index}" for index in range(count)] for what, count in (("window", 12), ("layer", 4)))
    assert worked[0] == windows[:10]
    assert worked[1] == windows[8:] + layers[:3]
    assert worked[2] == layers[2:]
    assert worked[3] == windows + layers
    killed, whole = (codebook_path(tmp_path / name, "antkv-1bit").read_bytes() for name in ("killed", "whole"))
    assert killed == whole
    assert [path.name for path in (tmp_path / "killed").iterdir()] == ["antkv-1bit.safetensors"]
