"""Pack vLLM for a machine with a Hopper GPU, CUDA 13 and PyTorch 2.11, but without network (`make gpu-bundle`).

Makes the folder .gpu/, which travels beside the checkout:

    part-00, part-01, ...   an archive of trimmed wheels, cut into parts
    install.sh, env.sh      what to run there: docs/gpu-check.md
    SHA256SUMS              of the parts, in their order
    manifest.json           what is inside, where it came from, and the options

What is packed is in scripts/gpu/packages.txt, what is left out and why in scripts/gpu/trim.py. The first run downloads
330 MB and takes minutes; a run with nothing new to do ends at once.
"""

import argparse
import json
import lzma
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from scripts.gpu.trim import Trimmer
from scripts.gpu.wheels import download, repack, sha256

ROOT = Path(__file__).parent.parent
HERE = ROOT / "scripts" / "gpu"
PACKAGES = HERE / "packages.txt"
PYTHON = "3.12"
SCRIPTS = ("install.sh", "env.sh")
#: What one transfer to the machine may hold, the checkout included.
TRANSFER_MIB = 64


def main() -> int:
    """Make the bundle, unless it is there already."""
    arguments = _arguments()
    limit = int(arguments.part_mib * 2**20)
    recipe = {"sources": sha256(b"".join(path.read_bytes() for path in _sources())), "part_bytes": limit}
    arguments.out.mkdir(parents=True, exist_ok=True)
    if _is_current(arguments.out, recipe):
        print(f"{arguments.out} is up to date.")
        return 0
    wheels = download(PACKAGES, PYTHON, arguments.cache / "wheels")
    with tempfile.TemporaryDirectory(dir=arguments.cache) as folder:
        archive = Path(folder, "bundle.tar.xz")
        packed = _pack(wheels, Trimmer(arguments.cache / "cubin"), archive)
        parts = _cut(archive, limit, arguments.out)
    (arguments.out / "SHA256SUMS").write_text("".join(f"{part['sha256']}  {part['file']}\n" for part in parts))
    for name in SCRIPTS:
        shutil.copy(HERE / name, arguments.out)
    manifest = {"recipe": recipe, "python": PYTHON, "parts": parts, "wheels": packed}
    (arguments.out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return _report(parts)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / ".gpu", help="folder to make (default: .gpu)")
    parser.add_argument("--part-mib", type=float, default=24, help="largest size of a part (default: 24)")
    parser.add_argument(
        "--cache",
        type=Path,
        default=user_cache_path("vllm-antkv") / "gpu-bundle",
        help="downloads and compiled kernels",
    )
    return parser.parse_args()


def _sources() -> list[Path]:
    return sorted([Path(__file__), *(path for path in HERE.iterdir() if path.is_file())])


def _is_current(out: Path, recipe: dict[str, Any]) -> bool:
    try:
        manifest = json.loads((out / "manifest.json").read_text())
        parts = all(sha256((out / part["file"]).read_bytes()) == part["sha256"] for part in manifest["parts"])
    except FileNotFoundError:
        return False
    return parts and manifest["recipe"] == recipe


def _pack(wheels: list[Path], trimmer: Trimmer, archive: Path) -> list[dict[str, Any]]:
    """Write the trimmed wheels into one archive; what went in."""
    packed = []
    # The preset's dictionary, 64 MiB, is what lets the kernels of FlashAttention share their common parts.
    with (
        lzma.open(archive, "wb", preset=9) as compressed,
        tarfile.open(fileobj=compressed, mode="w") as tar,
        tempfile.TemporaryDirectory() as folder,
    ):
        for wheel in wheels:
            print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB", file=sys.stderr, flush=True)
            path = repack(wheel, trimmer, Path(folder))
            tar.add(path, path.name, filter=_anonymous)
            packed.append({"file": wheel.name, "sha256": sha256(wheel.read_bytes())})
            path.unlink()
    return packed


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """The same input gives the same archive, whoever makes it."""
    entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname, entry.mode = 0, 0, 0, "", "", 0o644
    return entry


def _cut(archive: Path, limit: int, out: Path) -> list[dict[str, Any]]:
    for old in out.glob("part-*"):
        old.unlink()
    parts = []
    for index, content in enumerate(_pieces(archive, limit)):
        name = f"part-{index:02}"
        (out / name).write_bytes(content)
        parts.append({"file": name, "bytes": len(content), "sha256": sha256(content)})
    return parts


def _pieces(archive: Path, limit: int) -> Iterator[bytes]:
    with archive.open("rb") as file:
        while content := file.read(limit):
            yield content


def _report(parts: list[dict[str, Any]]) -> int:
    """Print the sizes; 1 when a part and the checkout do not fit into one transfer."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    checkout = sum(path.stat().st_size for name in listing.split("\0")[:-1] if (path := ROOT / name).is_file()) / 2**20
    for part in parts:
        print(f"{part['file']}: {part['bytes'] / 2**20:.1f} MiB")
    largest = max(part["bytes"] for part in parts) / 2**20
    print(f"The checkout has {checkout:.1f} MiB; with the largest part, a transfer has {checkout + largest:.1f} MiB.")
    if checkout + largest < TRANSFER_MIB:
        return 0
    print(f"That is more than {TRANSFER_MIB} MiB: choose a smaller --part-mib.", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
