"""Run the steps of a Dockerfile without Docker: `sudo python docker/run_steps.py docker/Dockerfile.cpu --base ROOT`.

ROOT stands for every image named in FROM that is not a stage: a folder with a root file system, as debootstrap makes it

    debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv bookworm ROOT

Each stage gets a copy of it; COPY copies, RUN runs in a chroot with a mount namespace of its own. The command given
with `--then` runs last, as a container would run it: as the image's user, with its environment and folder, the root
file system read-only, and nothing writable but /tmp and the volumes.

This is a check of the steps, not an image builder: instructions that only describe the image are skipped, wildcards in
COPY mean what the shell means by them, and of .dockerignore nothing is known.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dockerfile_parse import DockerfileParser

CONTEXT = Path(__file__).parents[1]
#: Of this machine: how to resolve names and whom to trust, as Docker gives them to a build.
_NETWORK = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#: Predefined build arguments of Docker, and what pip needs behind a proxy.
_PASSED_ON = re.compile(r"(?i)((https?|no|ftp|all)_proxy|PIP_\w+|SSL_CERT_\w+)")


@dataclass
class Stage:
    """A root file system in the making, and what its instructions have set so far."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "0:0"
    volumes: list[str] = field(default_factory=list)

    def expand(self, value: str) -> str:
        """Replace `$NAME` and `${NAME}`."""
        known = self.arguments | {"PATH": _PATH} | self.environment
        return re.sub(r"\$\{?(\w+)\}?", lambda match: known.get(match[1], ""), value)

    def inside(self, path: str) -> Path:
        """Where a path of the image is on this machine."""
        return self.root / os.path.normpath(os.path.join(self.folder, path)).lstrip("/")


class Builder:
    """Carries out one Dockerfile."""

    def __init__(self, base: Path, work: Path, binds: Sequence[str]) -> None:
        self._base = base
        self._work = work
        self._binds = [*_NETWORK, *binds]
        self._stages: dict[str, Stage] = {}
        self.stage = Stage(base)

    def build(self, dockerfile: Path) -> None:
        """All instructions, in order."""
        with dockerfile.open("rb") as file:
            steps = DockerfileParser(fileobj=file).structure
        handlers = {
            "FROM": self._from,
            "ARG": self._arg,
            "ENV": self._env,
            "WORKDIR": self._workdir,
            "USER": self._user,
            "VOLUME": self._volume,
            "COPY": self._copy,
            "RUN": self._run,
        }
        for step in steps:
            if step["instruction"] in handlers:
                print(f"== {step['instruction']} {' '.join(step['value'].split())}", flush=True)
                handlers[step["instruction"]](step["value"])

    def run_image(self, command: str) -> int:
        """Run a shell command as a container would, with a read-only root file system; its exit code."""
        print(f"== as {self.stage.user}, read-only: {command}", flush=True)
        return self._chroot(command, read_only=True)

    def _from(self, value: str) -> None:
        image, *name = re.split(r"\s+as\s+", value, flags=re.IGNORECASE)
        if image in self._stages:
            sys.exit(f"FROM {image}: stages that build on stages are not supported.")
        label = name[0] if name else "final"
        root = self._work / label
        subprocess.run(["cp", "--archive", str(self._base), str(root)], check=True)
        self.stage = self._stages[label] = Stage(root)

    def _arg(self, value: str) -> None:
        name, _, default = value.partition("=")
        self.stage.arguments[name] = default

    def _env(self, value: str) -> None:
        self.stage.environment |= {
            name: self.stage.expand(text) for name, _, text in (pair.partition("=") for pair in shlex.split(value))
        }

    def _workdir(self, value: str) -> None:
        self.stage.folder = os.path.join(self.stage.folder, value)
        self.stage.inside(".").mkdir(parents=True, exist_ok=True)

    def _user(self, value: str) -> None:
        self.stage.user = value

    def _volume(self, value: str) -> None:
        self.stage.volumes = json.loads(value)

    def _copy(self, value: str) -> None:
        words = shlex.split(value)
        options = [word for word in words if word.startswith("--")]
        *sources, target = (word for word in words if not word.startswith("--"))
        origin = self._stages[options[0].removeprefix("--from=")].root if options else CONTEXT
        destination = self.stage.inside(target)
        for source in sources:
            for path in sorted(origin.glob(source.lstrip("/"))):
                if path.is_dir():
                    shutil.copytree(path, destination, dirs_exist_ok=True, ignore=_ignore)
                else:
                    destination.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, destination)

    def _run(self, value: str) -> None:
        begin = time.monotonic()
        if code := self._chroot(value, read_only=False):
            sys.exit(f"The step failed with exit code {code}.")
        print(f"   done in {time.monotonic() - begin:.0f} s", flush=True)

    def _chroot(self, command: str, read_only: bool) -> int:
        """Run a shell command inside the stage; its mounts end with it."""
        root, stage = self.stage.root, self.stage
        lines = ["set -eu", f"mount --rbind {root} {root}"]
        for bind in self._binds:
            target = root / bind.lstrip("/")
            if Path(bind).is_dir():
                target.mkdir(parents=True, exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.touch()
            lines.append(f"mount --bind {bind} {target} && mount -o remount,ro,bind {target}")
        lines += [f"mount -t proc proc {root}/proc", f"mount --rbind /dev {root}/dev", f"mount --rbind /sys {root}/sys"]
        if read_only:
            lines.append(f"mount -o remount,ro,bind {root}")
            lines += [f"mount -t tmpfs -o mode=1777 tmpfs {root}{path}" for path in ("/tmp", *stage.volumes)]
        user, _, group = stage.user.partition(":")
        enter = f"setpriv --reuid {user} --regid {group or user} --clear-groups --no-new-privs"
        environment = {"PATH": _PATH, "HOME": "/root"}
        environment |= {name: text for name, text in os.environ.items() if _PASSED_ON.fullmatch(name)}
        environment |= stage.arguments | stage.environment
        script = f"cd {shlex.quote(stage.folder)} && {command}"
        pairs = " ".join(shlex.quote(f"{name}={text}") for name, text in environment.items())
        lines.append(f"exec chroot {root} {enter} env -i {pairs} /bin/sh -c {shlex.quote(script)}")
        unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", "\n".join(lines)]
        return subprocess.run(unshare, check=False).returncode


def _ignore(_: str, names: list[str]) -> set[str]:
    return {name for name in names if name in ("__pycache__", "build") or name.endswith(".egg-info")}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("--base", type=Path, required=True, help="root file system that stands for the images in FROM")
    parser.add_argument("--work", type=Path, required=True, help="empty folder for the stages: several GB")
    parser.add_argument("--bind", action="append", default=[], help="file or folder of this machine to show inside")
    parser.add_argument("--then", help="shell command to run in the result")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    builder = Builder(arguments.base.resolve(), arguments.work.resolve(), arguments.bind)
    builder.build(arguments.dockerfile)
    return builder.run_image(arguments.then) if arguments.then else 0


if __name__ == "__main__":
    sys.exit(main())
