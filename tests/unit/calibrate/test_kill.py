"""`kill -9` of a calibration at any moment: no codebook is ever half-written, and the same command still ends well."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from vllm_antkv.codebook import Codebook, codebook_path

KILLS = 4

#: Calibrates in forked children: one that is left alone, some that are killed after a random part of the work it took,
#: one that is left to go on. After every kill each file under its final name must be a whole one.
_KILLED = """
import json, os, random, signal, sys, time
import psutil
from pathlib import Path
import torch
from vllm_antkv.calibrate.run import calibrate
from vllm_antkv.calibrate.settings import CalibrationSettings
from vllm_antkv.codebook import Codebook

model, text, folder, kills = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
presets = ["antkv-1bit"]
moments = random.Random(0)

def start(out):
    child = os.fork()
    if not child:
        torch.set_num_threads(1)
        calibrate(CalibrationSettings(model, presets, [text], folder / out, samples=8, seq_len=64, device="cpu"))
        os._exit(0)
    return child

def end(child):
    return os.waitpid(child, 0)[1]

# Of the processor, so that it is the same part on a busy machine.
def worked(child):
    times = psutil.Process(child).cpu_times()
    return times.user + times.system

_, status, usage = os.wait4(start("whole"), 0)
ended = [status]
seconds = usage.ru_utime + usage.ru_stime
for _ in range(kills):
    child = start("killed")
    moment = moments.uniform(0.1, 1) * seconds
    while worked(child) < moment and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    ended.append(end(child))
    for path in (folder / "killed").glob("*"):
        if not path.name.startswith(".work-"):
            Codebook.load(path)
ended.append(end(start("killed")))
(folder / "ended.json").write_text(json.dumps(ended))
"""


def test_a_calibration_survives_kills_at_random_moments(
    make_model: Callable[..., Path], text_file: Path, tmp_path: Path
) -> None:
    model = make_model("llama")
    command = [sys.executable, "-c", _KILLED, str(model), str(text_file), str(tmp_path), str(KILLS)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})

    first, *others, last = json.loads((tmp_path / "ended.json").read_text())
    assert first == last == 0
    # A child that was quicker than its moment ended by itself.
    assert others.count(9) >= KILLS // 2
    assert [path.name for path in (tmp_path / "killed").iterdir()] == ["antkv-1bit.safetensors"]
    path = codebook_path(tmp_path / "killed", "antkv-1bit")
    assert path.read_bytes() == codebook_path(tmp_path / "whole", "antkv-1bit").read_bytes()
    Codebook.load(path, "antkv-1bit")
