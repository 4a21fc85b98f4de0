"""Builds deploy/Containerfile without a container engine, and passes its health check as its unprivileged user.

`python -m tools.container_check --root /var/tmp/clean-root` makes a clean Debian there with debootstrap (once), does
what the Containerfile says in a copy of it, and starts its entry point: root file system read-only, processes and
mounts of its own, a model at /model. Then the file's own health check must pass, a picture be answered, nothing but
/tmp be writable, and SIGTERM end it in time. This takes root, debootstrap, `unshare`, and an index of packages. What
differs from an engine: the base image is Debian's Python, not python.org's, and the network is the machine's own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONTAINERFILE = ROOT / "deploy" / "Containerfile"
MIRROR = "http://deb.debian.org/debian"
PACKAGES = "python3,python3-venv,ca-certificates"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
STOP_S = 60


@dataclass
class Image:
    """What a Containerfile says, as far as ours says it."""

    steps: list[tuple[str, str]] = field(default_factory=list)
    """ARG, COPY, ENV, RUN and WORKDIR, in their order."""
    user: str = "0"
    env: dict[str, str] = field(default_factory=dict)
    health: list[str] = field(default_factory=list)
    start_seconds: float = 0.0
    entry: list[str] = field(default_factory=list)
    workdir: str = "/"


def read(text: str) -> Image:
    """A Containerfile; ValueError for what is not understood, so that nothing is passed over."""
    image = Image()
    whole = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    for line in filter(None, map(str.strip, whole.splitlines())):
        word, _, rest = line.partition(" ")
        if word in {"ARG", "COPY", "RUN"}:
            image.steps.append((word, rest.strip()))
        elif word == "WORKDIR":
            image.workdir = rest.strip()
        elif word == "ENV":
            image.env |= dict(part.split("=", 1) for part in shlex.split(rest))
        elif word == "USER":
            image.user = rest.strip()
        elif word == "HEALTHCHECK":
            options, _, command = rest.partition(" CMD ")
            image.health = json.loads(command)
            found = re.search(r"--start-period=(\d+)s", options)
            image.start_seconds = float(found[1]) if found else 0.0
        elif word == "ENTRYPOINT":
            image.entry = json.loads(rest)
        elif word not in {"FROM", "EXPOSE"}:
            raise ValueError(f"{word} is not known here")
    return image


class Root:
    """A folder that is the root of processes: with their own mounts, and gone with them."""

    def __init__(self, path: Path, binds: list[Path]) -> None:
        self.path, self.binds = path, binds

    def command(self, words: list[str], image: Image, env: dict[str, str], *, sealed: bool) -> list[str]:
        """`words` in this root. `sealed`: as the image's user, with nothing to write but /tmp."""
        place = shlex.quote(str(self.path))
        script = [f"mount --bind {place} {place}", f"mount -t proc proc {place}/proc"]
        binds = (shlex.quote(str(bind)) for bind in self.binds)
        script += [f"mount --bind {bind} {place}{bind}" for bind in binds]
        if sealed:
            script += [f"mount -t tmpfs tmpfs {place}/tmp", f"mount -o remount,bind,ro {place}"]
        user = image.user if sealed else "0"
        told = " ".join(f"{name}={shlex.quote(value)}" for name, value in ({"PATH": PATH} | env).items())
        inner = f"cd {shlex.quote(image.workdir)} && exec {shlex.join(words)}"
        script.append(f"exec chroot --userspec={user}:{user} {place} env -i {told} sh -c {shlex.quote(inner)}")
        return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec", "\n".join(script)]


def build(image: Image, root: Root, given: dict[str, str], env: dict[str, str]) -> None:
    """What the steps say. `given` are build arguments, `env` is for RUN alone."""
    arguments: dict[str, str] = {}
    place = root.path / image.workdir.lstrip("/")
    place.mkdir(parents=True, exist_ok=True)
    for word, rest in image.steps:
        if word == "ARG":
            name, _, usual = rest.partition("=")
            arguments[name] = given.get(name, usual)
        elif word == "COPY":
            *sources, target = shlex.split(rest)
            for source in sources:
                copy(ROOT / source, place / target, len(sources) > 1 or target.endswith("/"))
        else:
            print(f"RUN {rest}", file=sys.stderr)
            command = root.command(["sh", "-c", rest], image, env | arguments, sealed=False)
            subprocess.run(command, check=True, stdout=sys.stderr)


def copy(source: Path, target: Path, inside: bool) -> None:
    """A file, or what a folder holds."""
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target / source.name if inside else target)


def clean(path: Path, mirror: str) -> Path:
    """A Debian as it comes, with a Python at the place where images of Python have theirs; made once."""
    if not (path / "usr").is_dir():
        words = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(path), mirror]
        subprocess.run(words, check=True, stdout=sys.stderr)
        subprocess.run(["chroot", path, "python3", "-m", "venv", "/usr/local"], check=True)
    return path


def small_model(folder: Path) -> Path:
    """A model that has barely learned, and a picture."""
    from benchmarks.serving import pictures
    from zeroforget.store import open_model

    open_model(folder / "model").learn(pictures(folder / "pictures", 16), "colors", network="lenet", size=16, epochs=1)
    return folder / "model"


def check(image: Image, root: Root, picture: bytes) -> dict[str, object]:
    """Start it as its user, and look at it from outside."""
    began = time.monotonic()
    process = subprocess.Popen(root.command(image.entry, image, image.env, sealed=True), stdout=sys.stderr)
    try:
        healthy = None
        while healthy is None and time.monotonic() - began < image.start_seconds + 60:
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with {process.returncode}")
            probe = subprocess.run(
                root.command(image.health, image, image.env, sealed=True), capture_output=True, check=False
            )
            healthy = time.monotonic() - began if probe.returncode == 0 else None
            time.sleep(0.2)
        if healthy is None:
            raise RuntimeError("the health check does not pass")
        server = _below(process.pid)
        request = urllib.request.Request("http://127.0.0.1:8000/predict", picture, method="POST")
        with urllib.request.urlopen(request, timeout=30) as reply:
            answer = json.load(reply)
        told = time.monotonic()
        os.kill(server, signal.SIGTERM)
        process.wait(STOP_S)
        return {
            "healthy_after_s": round(healthy, 1), "within_start_period": healthy <= image.start_seconds,
            "user": _user(image, root), "writable": _writable(image, root), "answer": answer["classes"][0]["class"],
            "stopped_after_s": round(time.monotonic() - told, 1), "exit": process.returncode,
        }  # fmt: skip
    finally:
        process.kill()


def _below(pid: int) -> int:
    """The process that was started in its own namespaces."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def _inside(image: Image, root: Root, words: list[str]) -> str:
    command = root.command(words, image, image.env, sealed=True)
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _user(image: Image, root: Root) -> str:
    return _inside(image, root, ["id", "-u"])


def _writable(image: Image, root: Root) -> list[str]:
    """Of the folders where something might be written, those where it can be."""
    script = f"for at in / /tmp /model /opt/zeroforget /usr/local /var/tmp /etc /home {image.workdir}; do "
    return sorted(set(_inside(image, root, ["sh", "-c", f"{script} [ -w $at ] && echo $at; done"]).split()))


def main() -> None:
    """Build, check and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="where the clean Debian is, or is to be made")
    parser.add_argument("--mirror", default=MIRROR)
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="for RUN alone; pip's own, say"
    )
    parser.add_argument(
        "--bind", action="append", default=[], type=Path, help="a folder of this machine for RUN to see"
    )
    args = parser.parse_args()
    image = read(CONTAINERFILE.read_text(encoding="utf-8"))
    clean(args.root, args.mirror)
    with tempfile.TemporaryDirectory(dir=args.root.parent) as place:
        built = Path(place) / "root"
        subprocess.run(["cp", "-a", args.root, built], check=True)
        shutil.copy("/etc/resolv.conf", built / "etc" / "resolv.conf")
        for bind in args.bind:
            (built / str(bind).lstrip("/")).mkdir(parents=True, exist_ok=True)
        given, env = (dict(one.split("=", 1) for one in many) for many in (args.build_arg, args.env))
        build(image, Root(built, args.bind), given, env)
        model = small_model(Path(place))
        shutil.copytree(model, built / "model")
        picture = next(iter(sorted((Path(place) / "pictures").rglob("*.jpg")))).read_bytes()
        print(json.dumps(check(image, Root(built, []), picture)))


if __name__ == "__main__":
    main()
