"""Container images built without a registry or a daemon, for tests: base system by mmdebstrap, images by buildah.

1. `Tools.find` takes the programs from PATH, or unpacks Debian's packages of them into a cache directory;
2. `router_image` compiles the router, builds the image of deploy/docker/Dockerfile and unpacks it with umoci;
3. `Container` starts an unpacked image with runc.

`python -m deploy.tests.images` does step 2 and prints the directory of the unpacked image: kube/run.sh uses it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
DOCKERFILE = DOCKER / "Dockerfile"
SUITE = "bookworm"
PACKAGES = {
    "mmdebstrap": ["mmdebstrap"],
    "buildah": [
        "buildah", "libgpgme11", "libassuan0", "libdevmapper1.02.1", "libsubid4", "golang-github-containers-image",
    ],
    "umoci": ["umoci"],
    "runc": ["runc"],
}  # fmt: skip
"""Debian packages of the programs, with the libraries that a minimal system lacks."""


class CannotBuild(Exception):
    """This machine cannot build images; the message says what is missing."""


def cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("BATON_IMAGES_CACHE", Path(base) / "baton-images"))


def run(*command: str | Path, env: Mapping[str, str] | None = None, timeout: float = 1200) -> str:
    """Run a command; return its standard output, or raise with what it printed."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, env=env, cwd=ROOT, timeout=timeout)
    assert done.returncode == 0, (
        f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
    )
    return done.stdout


@dataclass(frozen=True, slots=True)
class Tools:
    env: dict[str, str]
    """Environment in which the programs are in PATH and find their libraries and settings."""

    @staticmethod
    def find() -> Tools:
        """Return the programs. Raises CannotBuild."""
        if sys.platform != "linux" or os.geteuid() != 0:
            raise CannotBuild("images are built and run by root on Linux")
        cache = cache_directory()
        cache.mkdir(parents=True, exist_ok=True)
        debian = cache / "debian"
        path = f"{debian}/usr/bin:{debian}/usr/sbin:{os.environ['PATH']}:/usr/sbin"
        for program, packages in PACKAGES.items():
            if shutil.which(program, path=path) is None:
                unpack_packages(packages, debian)
        missing = [program for program in PACKAGES if shutil.which(program, path=path) is None]
        if missing:
            raise CannotBuild(f"not in PATH, nor among Debian's packages: {', '.join(missing)}")
        env = {**os.environ, "PATH": path}
        if (debian / "usr/bin/buildah").exists():
            libraries = ":".join(str(found) for found in debian.glob("usr/lib/*-linux-gnu"))
            env["LD_LIBRARY_PATH"] = f"{libraries}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(
                ":"
            )
            env["CONTAINERS_REGISTRIES_CONF"] = str(debian / "etc/containers/registries.conf")
        return Tools(env)

    def buildah(self, *args: str | Path) -> str:
        """Run buildah on an image store of its own."""
        store = cache_directory() / "store"
        policy = store / "policy.json"
        store.mkdir(parents=True, exist_ok=True)
        policy.write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
        command, *rest = args
        own = (
            []
            if command in ("from", "copy", "add", "rm", "inspect")
            else ["--signature-policy", policy]
        )
        paths = ["--root", store / "root", "--runroot", store / "run"]
        return run("buildah", *paths, command, *own, *rest, env=self.env).strip()


def unpack_packages(packages: Sequence[str], into: Path) -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise CannotBuild(f"needs apt-get, or these in PATH: {', '.join(PACKAGES)}")
    with tempfile.TemporaryDirectory() as folder:
        fetch = ["apt-get", "download", "-q", *packages]
        done = subprocess.run(fetch, cwd=folder, capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            raise CannotBuild(
                f"apt-get download {' '.join(packages)}: {done.stderr.strip()[-300:]}"
            )
        for package in Path(folder).glob("*.deb"):
            run("dpkg", "-x", package, into)


def base_image(tools: Tools) -> str:
    """Make an image like debian:bookworm-slim from Debian's packages; made once."""
    name = f"localhost/baton-base:{SUITE}"
    archive = cache_directory() / f"{SUITE}.tar"
    if not archive.exists():
        unwanted = ("doc", "groff", "info", "linda", "lintian", "locale", "man")
        exclude = [f"--dpkgopt=path-exclude=/usr/share/{folder}/*" for folder in unwanted]
        hooks = next(
            (
                p
                for p in (Path("/"), cache_directory() / "debian")
                if (p / "usr/share/mmdebstrap/hooks").exists()
            ),
            None,
        )
        assert hooks is not None, "mmdebstrap has no hooks directory"
        merged = (
            f"--hook-dir={hooks}/usr/share/mmdebstrap/hooks/merged-usr"  # else usrmerge brings perl
        )
        # Two runs may make it at the same time: the directory is shared by all checkouts.
        with tempfile.TemporaryDirectory(dir=cache_directory()) as folder:
            partial = Path(folder) / archive.name
            run("mmdebstrap", "--variant=minbase", merged, *exclude, SUITE, partial, env=tools.env)
            partial.rename(archive)
    image_of(tools, name, archive, "add")
    return name


def image_of(tools: Tools, name: str, path: Path, how: str = "copy", to: str = "/") -> None:
    """Commit an image that contains one file, or what an archive contains."""
    container = tools.buildah("from", "scratch")
    try:
        tools.buildah(how, "-q", container, path, to)
        tools.buildah("commit", "-q", container, name)
    finally:
        tools.buildah("rm", container)


def router_program() -> Path:
    """Compile the router with the profile of `make run`: `dist`, which images of users have, takes minutes longer."""
    run(
        "cargo",
        "build",
        "--release",
        "--locked",
        "--quiet",
        "-p",
        "baton-router",
        "--bin",
        "baton-router",
    )
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    return ROOT / target / "release" / "baton-router"


def router_image(tools: Tools, name: str = "localhost/baton-router:test") -> str:
    """Build target `router` of the Dockerfile from a compiled program; return the image's name."""
    if shutil.which("cargo") is None:
        raise CannotBuild("cargo is not in PATH")
    image_of(tools, "localhost/router-program:test", router_program(), to="/baton-router")
    revision = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    tools.buildah(
        "build", "--isolation=chroot", "--ignorefile", Path(f"{DOCKERFILE}.dockerignore"), "--target=router",
        f"--build-arg=BASE={base_image(tools)}", "--build-arg=ROUTER_PROGRAM=localhost/router-program:test",
        f"--build-arg=REVISION={revision or 'unknown'}", "--tag", name, "--file", DOCKERFILE, ROOT,
    )  # fmt: skip
    return name


def unpack(tools: Tools, name: str, into: Path) -> Path:
    """Unpack an image with umoci; return the bundle: `rootfs` and `config.json`. `into` also gets the OCI layout."""
    tools.buildah("push", "-q", name, f"oci:{into / 'layout'}:image")
    run("umoci", "unpack", "--image", f"{into / 'layout'}:image", into / "bundle", env=tools.env)
    return into / "bundle"


@contextlib.contextmanager
def container(
    tools: Tools, bundle: Path, *args: str, env: Sequence[str] = ()
) -> Iterator[Container]:
    """Run an image's entry point with `args` in the host's network: read-only, unprivileged."""
    config: dict[str, Any] = json.loads((bundle / "config.json").read_text())
    process = config["process"]
    process.pop("rlimits", None)
    process["terminal"], process["noNewPrivileges"] = False, True
    process["capabilities"] = {"bounding": []}
    process["args"] += args
    process["env"] += env
    config["root"]["readonly"] = True
    config["mounts"].append(
        {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["mode=1777"]}
    )
    config["linux"]["namespaces"] = [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")]
    config["linux"].pop("resources", None)
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "bundle"
        own.mkdir()
        config["root"]["path"] = str(bundle / "rootfs")
        (own / "config.json").write_text(json.dumps(config))
        yield from Container(tools, own, Path(folder)).running()


class Container:
    def __init__(self, tools: Tools, bundle: Path, state: Path) -> None:
        self._runc = ["runc", "--root", str(state / "runc")]
        self._env, self._bundle, self._name = tools.env, bundle, f"baton-{os.getpid()}-{state.name}"
        self._log = state / "log"
        self._process: subprocess.Popen[bytes] | None = None

    def running(self) -> Iterator[Container]:
        command = [*self._runc, "run", "--bundle", str(self._bundle), self._name]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=self._env
            )
        try:
            yield self
        finally:
            subprocess.run(
                [*self._runc, "kill", self._name, "KILL"], capture_output=True, env=self._env
            )
            self._process.wait(30)
            subprocess.run(
                [*self._runc, "delete", "--force", self._name], capture_output=True, env=self._env
            )

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def address(self) -> str:
        """URL that the router's log names; empty until then."""
        assert self._process is not None
        assert self._process.poll() is None, f"exit code {self._process.poll()}: {self.output()}"
        found = re.search(r"listening on (http://\S+)", self.output())
        return found[1] if found else ""

    def execute(self, *argv: str) -> subprocess.CompletedProcess[str]:
        command = [*self._runc, "exec", self._name, *argv]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=self._env)

    def stop(self, timeout_secs: float) -> int:
        """Send SIGTERM; return the exit code."""
        assert self._process is not None
        run(*self._runc, "kill", self._name, "TERM", env=self._env)
        return self._process.wait(timeout_secs)


def main() -> int:
    cache = cache_directory()
    try:
        tools = Tools.find()
        name = router_image(tools)
    except CannotBuild as err:
        print(f"router image: NOT BUILT: {err}", file=sys.stderr)
        return 1
    fresh = Path(tempfile.mkdtemp(dir=cache))
    bundle = unpack(tools, name, fresh)
    final = cache / "router"
    shutil.rmtree(final, ignore_errors=True)
    bundle.rename(final)
    shutil.rmtree(fresh)
    print(final / "rootfs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
