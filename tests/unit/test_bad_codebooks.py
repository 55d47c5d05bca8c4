"""Codebook files that must not be served, one a row: each is refused with one sentence, and without being read first.

How a file is spoilt: `tests/unit/spoilt.py`. Another model: test_codebook.py. Random damage: `tests/fuzz`.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.unit.spoilt import (
    MODEL,
    PRESET,
    Spoil,
    a_fifo,
    a_folder,
    claiming,
    duplicated,
    head,
    header_field,
    header_text,
    model_field,
    nothing,
    raw_header,
    replaced_bytes,
    sinks,
    sparse,
    tensor,
    without_tensor,
)
from vllm_antkv.codebook import Codebook
from vllm_antkv.errors import CodebookError

NAN, INFINITE = float("nan"), float("inf")
#: How the names of those begin that claim more than there is.
BOMBS = ("a header of", "a million", "10 TB", "more bytes", "offsets beyond", "a sparse")

#: Of channels of keys: what is known of each of them.
CHANNELS = torch.ones(MODEL.num_layers, MODEL.num_kv_heads, MODEL.head_size)


def with_first(number: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """This number for one channel alone."""
    return lambda _: CHANNELS.index_fill(-1, torch.tensor([0]), number)


#: What is wrong, how the file is made so, words of the sentence.
TABLE: dict[str, tuple[Spoil, str]] = {
    # What stands in its place.
    "missing": (nothing, "No such file"),
    "a folder": (a_folder, "is not a file"),
    "a pipe": (a_fifo, "is not a file"),
    # The file as bytes.
    "empty": (replaced_bytes(b""), "not a readable codebook"),
    "text": (replaced_bytes(b"These are not centroids.\n" * 100), "header is too large"),
    "a pickle": (replaced_bytes(b"\x80\x04\x95" + bytes(500)), "not a readable codebook"),
    "the header is no JSON": (raw_header(b"{" * 100), "not a readable codebook"),
    # Bombs.
    "a header of 9 exabytes": (replaced_bytes(head(2**63) + b"{}"), "header is too large"),
    "a header of 90 MB": (replaced_bytes(head(90_000_000) + b" " * 1000), "header is too large"),
    "a million tensors": (raw_header(b'{"__metadata__": {' + b'"a": "b",' * 300_000 + b"}}"), "header is too large"),
    "10 TB of tensor in a small file": (claiming([10**9, 5000]), "not a readable codebook"),
    "more bytes than there are numbers": (claiming([2**63, 2**63]), "not a readable codebook"),
    "offsets beyond the file": (claiming([2], (10**12, 10**12 + 4)), "not a readable codebook"),
    "a tensor that is a list of control characters": (raw_header(b'{"k": ["\\u001b[2J"]}'), "not a readable codebook"),
    "a sparse file of 8 TB": (sparse(8 << 40), "more than the codebooks of any model"),
    "a sparse file of 16 GB and a header that fits it": (sparse(16 << 30), "num_layers"),
    "a sparse file of 100 MB and a header that fits it": (sparse(100 << 20), "another model"),
    "metadata nested 100,000 deep": (header_text("[" * 100_000), "not a readable codebook"),
    "a number of 10,000 digits": (header_text('{"format_version": ' + "9" * 10_000 + "}"), "not a readable codebook"),
    # The header as JSON.
    "no metadata": (header_text(None), "but not a codebook of vllm-antkv"),
    "metadata is no JSON": (header_text("{"), "not a readable codebook"),
    "a key twice": (duplicated("preset"), "stands there twice"),
    "NaN in the header": (header_field(calibration={"loss": NAN}), "NaN in its header"),
    "format 2": (header_field(format_version=2), "format 2"),
    "format is a fraction": (header_field(format_version=1.0), "'format_version'"),
    "an unknown key": (header_field(permutation=[1, 0]), "'permutation'"),
    "a key with a line break": (header_field(**{"a\nb": 1}), r"'a\nb'"),
    "no checksum": (header_field(checksum=""), "checksum does not match"),
    "the checksum is a number": (header_field(checksum=5), "'checksum'"),
    # How K turns.
    "a turn of no layer": (header_field(turns=[{"rotary_dim": 2}] * 9), "turns are not one for each"),
    "turns wider than a head": (header_field(turns=2 * [{"rotary_dim": 1 << 40}]), "turns are not one for each"),
    # Its preset.
    "the preset is a megabyte": (header_field(preset="x" * 900_000), "which is none of"),
    "the preset clears the screen": (header_field(preset="\x1b[2J"), r"'\x1b[2J', which is none of"),
    "another preset": (header_field(preset="antkv-4bit"), "holds centroids for antkv-4bit, not for antkv-1bit"),
    "a preset that does not divide the head": (header_field(preset="antkv-0.375bit"), "does not divide its head size"),
    "layers that cost more than it": (header_field(layers=["antkv-2bit", "antkv-1bit"]), "take more bytes"),
    "few layers": (header_field(layers=["antkv-1bit"]), "one preset for each"),
    "a layer of an unknown preset": (header_field(layers=["antkv-1bit", "antkv-3bit"]), "one preset for each"),
    "no layers with a preset": (header_field(layers=[]), "one preset for each"),
    # Its model.
    "the model is empty": (header_field(model={}), "'model.architecture'"),
    "no layers": (model_field(num_layers=0), "'model.num_layers'"),
    "10**4000 layers": (model_field(num_layers=10**4000), "'model.num_layers'"),
    "attention in fewer layers": (model_field(attention_layers=[1]), "attention_layers are not 2 in ascending order"),
    "attention backwards": (model_field(attention_layers=[3, 1]), "in ascending order"),
    "attention in layer -1": (model_field(attention_layers=[-1, 1]), "'model.attention_layers"),
    "attention in other layers": (model_field(attention_layers=[0, 2]), "attention_layers is (0, 2), the served"),
    "an unknown size": (model_field(depth=5), "'model.depth'"),
    "the architecture is a path": (model_field(architecture="../../etc/passwd"), "'model.architecture'"),
    # Its sinks.
    "sinks behind the last layer": (sinks(2, [1], 1.0), "outside the model"),
    "sinks before the first layer": (sinks(-1, [1], 1.0), "'sinks.layer'"),
    "sinks in no channel": (sinks(0, [], 1.0), "'sinks.channels'"),
    "sinks in a channel too high": (sinks(0, [64], 1.0), "outside the model"),
    "sinks above nothing": (sinks(0, [1], 0), "'sinks.threshold'"),
    "sinks above what a number can hold": (sinks(0, [1], "1e999"), "'sinks.threshold'"),
    # The prefix of files that older versions trained.
    "a prefix": (header_field(prefix=[5]), "'prefix' of its header"),
    "rows without a prefix": (tensor("prefix_k", lambda k: k), "tensors ['k', 'prefix_k', 'v'], not k and v."),
    # Its tensors.
    "no k": (without_tensor("k"), "tensors ['v'], not k and v"),
    "an extra tensor": (tensor("w", lambda k: k), "not k and v"),
    "a tensor whose name is a megabyte": (tensor("k" * 900_000, lambda k: k), "not k and v"),
    "k in float32": (tensor("k", lambda k: k.float()), "k is F32"),
    "k with its dimensions swapped": (tensor("k", lambda k: k.transpose(3, 4)), "k is F16 (2, 2, 2, 8, 256)"),
    "v with fewer centroids": (tensor("v", lambda v: v[:, :, :, :255]), "v is F16"),
    "a NaN in every row of k": (tensor("k", lambda k: torch.cat((k[..., 1:], k[..., :1] * NAN), -1)), "not finite"),
    "infinities in v": (tensor("v", lambda v: v.clamp(min=INFINITE)), "v holds values that are not finite"),
    "errors of one layer": (tensor("k_errors", lambda _: CHANNELS[:1]), "k_errors is F32 (1, 2, 16), but must be F32"),
    "errors in float16": (tensor("k_errors", lambda _: CHANNELS.half()), "k_errors is F16"),
    "errors below 0": (tensor("k_errors", lambda _: -CHANNELS), "k_errors holds values below 0"),
    "infinite errors": (tensor("k_errors", lambda _: CHANNELS / 0), "k_errors holds values that are not finite"),
    # Logits would change.
    "a scale below 0": (tensor("k_scale", with_first(-1)), "k_scale holds values below 0"),
    "a scale of 0": (tensor("k_scale", with_first(0)), "powers of two"),
    "a scale of 3/2": (tensor("k_scale", with_first(1.5)), "powers of two"),
    "a large scale": (tensor("k_scale", with_first(256)), "powers of two"),
    "other values": (tensor("v", lambda v: v + 1), "checksum does not match"),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_a_bad_codebook(name, tmp_path, refused):
    (spoil, words), path = TABLE[name], tmp_path / "codebook"
    spoil(path)
    before = os.listdir(path.parent)
    with refused(CodebookError, words, str(path)) as caught:
        Codebook.load(path, PRESET, MODEL)
    assert str(caught.value).isprintable()
    assert os.listdir(path.parent) == before


@pytest.mark.parametrize("name", [name for name in TABLE if name.startswith(BOMBS)])
def test_a_bomb_is_refused_before_it_takes_memory(name, tmp_path):
    path = tmp_path / "codebook"
    TABLE[name][0](path)
    # Resets the peak that Linux keeps of this process.
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_memory()
    with pytest.raises(CodebookError):
        Codebook.load(path, PRESET, MODEL)
    assert peak_memory() - before < 32 << 20


def peak_memory() -> int:
    """The most bytes of memory that this process has held."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) << 10
