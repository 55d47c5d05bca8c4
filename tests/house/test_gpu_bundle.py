"""The bundle for a GPU without network: pinned as the lock is, trimmed to what its GPU can use, installable by pip."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import triton

from scripts import gpu_bundle
from scripts.gpu.fatbin import containers, machine_code, rewrite
from scripts.gpu.wheels import repack

ROOT = Path(__file__).parents[2]
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
SOURCE = """
__global__ void add(float* x) { x[threadIdx.x] += 1; }
extern "C" void run(float* x) { add<<<1, 32>>>(x); }
"""


def pins(path):
    lines = [line for line in path.read_text().splitlines() if "==" in line and not line.startswith("#")]
    return {re.sub(r"[-_.]+", "-", line.split("==")[0]).lower(): line.split("==")[1].split()[0] for line in lines}


def test_versions_are_those_of_the_lock_for_gpus():
    lock = pins(ROOT / "requirements" / "gpu.lock")
    bundle = pins(gpu_bundle.PACKAGES)
    assert bundle.items() <= lock.items()
    assert "vllm" in bundle


def test_every_package_is_pinned_by_hash():
    lines = [line for line in gpu_bundle.PACKAGES.read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    """A shared library with machine code for two architectures, and PTX."""
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    folder = tmp_path_factory.mktemp("module")
    (folder / "add.cu").write_text(SOURCE)
    targets = [f"-gencode=arch=compute_{a},code={kind}_{a}" for a, kind in ((80, "sm"), (90, "sm"), (90, "compute"))]
    command = ["nvcc", "-shared", "-Xcompiler", "-fPIC", *targets, "-cudart", "none", "add.cu", "-o", "add.so"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "add.so"


def device_code(path, option="--list-elf"):
    """What NVIDIA's own tool finds."""
    return subprocess.run([CUOBJDUMP, option, path], capture_output=True, text=True, check=True).stdout


def test_only_what_is_kept_is_left_and_everything_else_stays_in_place(module, tmp_path):
    before = module.read_bytes()
    after = rewrite(before, lambda c: [i for i in c.images if i.architecture == 90 and not i.is_ptx])
    assert len(after) == len(before)
    (container,) = containers(before)
    assert after[: container.offset] == before[: container.offset]
    assert after[container.end :] == before[container.end :]
    (tmp_path / "after.so").write_bytes(after)
    found = device_code(tmp_path / "after.so")
    assert "sm_90" in found
    assert "sm_80" not in found
    assert "sm_90" not in device_code(tmp_path / "after.so", "--list-ptx")


def test_a_container_of_which_nothing_is_kept_has_nothing_for_the_gpu(module, tmp_path):
    keep_none = rewrite(module.read_bytes(), lambda container: [])
    (tmp_path / "none.so").write_bytes(keep_none)
    found = device_code(tmp_path / "none.so") + device_code(tmp_path / "none.so", "--list-ptx")
    assert "sm_80" in found
    assert "sm_90" not in found


def test_machine_code_can_take_the_place_of_another(module, tmp_path):
    (container,) = containers(module.read_bytes())
    old = next(image for image in container.images if image.architecture == 80)
    new = next(image for image in container.images if image.architecture == 90 and not image.is_ptx)
    made = machine_code(new.payload, 90, like=old)
    (tmp_path / "made.so").write_bytes(rewrite(module.read_bytes(), lambda c: [made]))
    extract = [CUOBJDUMP, "--extract-elf", "all", tmp_path / "made.so"]
    subprocess.run(extract, cwd=tmp_path, check=True, capture_output=True)
    (cubin,) = tmp_path.glob("*.sm_90.cubin")
    assert new.payload.startswith(cubin.read_bytes())


def test_a_file_that_is_no_module_is_refused():
    with pytest.raises(ValueError, match="ELF"):
        rewrite(b"PK\x03\x04" + bytes(100), lambda container: [])


def test_a_repacked_wheel_installs_with_what_was_kept(tmp_path):
    wheel = tmp_path / "thing-1.0-py3-none-any.whl"
    contents = {
        "thing/__init__.py": b"answer = 42\n",
        "thing/large.bin": bytes(1000),
        "thing/a,b.json": b"{}",
        "thing-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n",
        "thing-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "thing-1.0.dist-info/RECORD": b"",
    }
    with zipfile.ZipFile(wheel, "w") as file:
        for name, content in contents.items():
            file.writestr(name, content)
    (tmp_path / "out").mkdir()
    changed = repack(wheel, lambda name, content: None if name.endswith(".bin") else content, tmp_path / "out")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(site)]
    run = subprocess.run([*command, str(changed)], check=True, capture_output=True, text=True)
    assert "RECORD" not in run.stderr
    assert sorted(path.name for path in (site / "thing").glob("*.*")) == ["__init__.py", "a,b.json"]


def test_parts_put_together_are_the_archive(tmp_path):
    archive = tmp_path / "archive"
    archive.write_bytes(bytes(range(250)))
    (tmp_path / "part-07").write_bytes(b"of an older build")
    parts = gpu_bundle._cut(archive, 100, tmp_path)
    assert [part["bytes"] for part in parts] == [100, 100, 50]
    assert sorted(path.name for path in tmp_path.glob("part-*")) == [part["file"] for part in parts]
    assert b"".join((tmp_path / part["file"]).read_bytes() for part in parts) == archive.read_bytes()


def test_installing_says_which_parts_are_missing(tmp_path):
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    shutil.copy(ROOT / "scripts" / "gpu" / "install.sh", bundle)
    (bundle / "part-00").write_bytes(b"here")
    digests = [gpu_bundle.sha256(content) for content in (b"here", b"still to come")]
    (bundle / "SHA256SUMS").write_text("".join(f"{d}  part-{i:02}\n" for i, d in enumerate(digests)))
    run = subprocess.run(["bash", bundle / "install.sh", tmp_path / "env"], capture_output=True, text=True)
    assert run.returncode == 3
    assert "part-01" in run.stdout
    assert "part-00" not in run.stdout
