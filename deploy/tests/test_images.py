"""The images of deploy/docker: what the Dockerfile promises, and the router's image built, measured and run by runc."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
from pathlib import Path

import openai
import pytest

from deploy.tests.images import (
    DOCKER,
    DOCKERFILE,
    ROOT,
    CannotBuild,
    Tools,
    container,
    router_image,
    unpack,
)
from deploy.tests.manifests import main_container, of_kind, render
from tests.support.processes.cluster import Cluster, eventually, get

MB = 1_000_000
ROUTER_BYTES = 110 * MB
ROUTER_COMPRESSED_BYTES = 45 * MB
QUESTION = [{"role": "user", "content": "What is Baton?"}]


def stages() -> dict[str, str]:
    """Text of each stage of the Dockerfile by name."""
    parts = re.split(r"^FROM \S+ AS (\S+)\n", DOCKERFILE.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def entry_point(stage: str) -> list[str]:
    return json.loads(re.findall(r"^ENTRYPOINT (.+)$", stages()[stage], re.MULTILINE)[-1])


@pytest.mark.parametrize("target", ["router", "engine-cpu", "engine-cuda"])
def test_targets_run_as_one_user_and_carry_version_and_revision(target: str) -> None:
    text = stages()[target]
    assert re.findall(r"^USER (.+)$", text, re.MULTILINE) == ["65532:65532"]
    for label in ("title", "version", "revision", "licenses", "source"):
        assert f"org.opencontainers.image.{label}=" in text


def test_version_is_that_of_the_workspace() -> None:
    version = re.search(r'^version = "(.+)"$', (ROOT / "Cargo.toml").read_text(), re.M)
    assert version
    text = DOCKERFILE.read_text()
    assert set(re.findall(r"^ARG VERSION=(.+)$", text, re.MULTILINE)) == {version[1]}
    assert set(re.findall(r"-t baton-\w+:(\S+)", text)) == {version[1]}
    assert ":latest" not in text


def test_package_of_the_engine_is_in_the_last_layer() -> None:
    for target in ("engine-cpu", "engine-cuda"):
        commands = re.findall(r"^(RUN|COPY|ADD) ((?:.*\\\n)*.+)", stages()[target], re.MULTILINE)
        assert len(commands) == 1, commands
        assert "/wheel/*.whl" in commands[0][1]


def test_context_has_what_the_dockerfile_copies() -> None:
    lines = Path(f"{DOCKERFILE}.dockerignore").read_text().splitlines()
    kept = [line[1:] for line in lines if line.startswith("!")]
    assert [path for path in kept if not (ROOT / path).exists()] == []
    copied = [
        path
        for words in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE.read_text(), re.MULTILINE)
        for path in words.split()
        if path != "."
    ]
    assert copied
    for path in copied:
        assert (ROOT / path).exists()
        assert any(path == keep or path.startswith(f"{keep}/") for keep in kept), path


def test_manifests_start_programs_of_the_images() -> None:
    programs = {"baton-router": entry_point("router"), "baton-engine": entry_point("engine-cpu")}
    assert programs["baton-engine"] == entry_point("engine-cuda")
    for workload in of_kind(render("base"), "Deployment"):
        first = main_container(workload)
        assert first["command"] == programs[first["image"].split(":")[0]]


def test_cpu_packages_are_the_locked_ones_without_cuda(tmp_path: Path) -> None:
    for name in (DOCKER / "install_packages.sh", ROOT / "engine" / "requirements.lock"):
        (tmp_path / name.name).write_text(name.read_text())
    command = ["bash", str(tmp_path / "install_packages.sh"), "--print"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    locked = set(
        re.findall(
            r"^[\w.-]+==\S+", (ROOT / "engine" / "requirements.lock").read_text(), re.MULTILINE
        )
    )
    chosen = set(re.findall(r"^[\w.-]+==\S+", printed, re.MULTILINE))
    assert chosen <= locked
    left_out = {name.split("==")[0] for name in locked - chosen}
    assert {"triton", "nvidia-cublas", "nvidia-nccl-cu13", "cuda-bindings"} <= left_out
    assert {
        name for name in left_out if not re.match(r"torch$|triton$|cuda-|nvidia-", name)
    } == set()
    torch = [line for line in printed.splitlines() if line.startswith("torch==")]
    assert len(torch) == 1
    assert printed.count("--hash=sha256:") > len(chosen)


# ---- the router's image, built and run ----


@pytest.fixture(scope="module")
def tools() -> Tools:
    try:
        return Tools.find()
    except CannotBuild as err:
        pytest.skip(f"no image is built: {err}")


@pytest.fixture(scope="module")
def bundle(tools: Tools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        name = router_image(tools)
    except CannotBuild as err:
        pytest.skip(f"no image is built: {err}")
    return unpack(tools, name, tmp_path_factory.mktemp("image"))


built = [pytest.mark.slow, pytest.mark.timeout(1800)]


def bytes_of(folder: Path) -> int:
    files = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            status = os.lstat(os.path.join(parent, name))
            files[status.st_ino] = status.st_size
    return sum(files.values())


class TestRouterImage:
    pytestmark = built

    def test_is_small(self, bundle: Path) -> None:
        size, compressed = bytes_of(bundle / "rootfs"), bytes_of(bundle.parent / "layout" / "blobs")
        print(f"router image: {size / MB:.1f} MB, compressed {compressed / MB:.1f} MB")
        assert size <= ROUTER_BYTES
        assert compressed <= ROUTER_COMPRESSED_BYTES

    def test_has_no_python(self, bundle: Path) -> None:
        assert [
            path for path in (bundle / "rootfs" / "usr").rglob("*python*") if path.is_file()
        ] == []

    def test_names_its_version_and_revision(self, bundle: Path) -> None:
        annotations = json.loads((bundle / "config.json").read_text())["annotations"]
        version = re.search(r'^version = "(.+)"$', (ROOT / "Cargo.toml").read_text(), re.M)
        assert version
        assert annotations["org.opencontainers.image.version"] == version[1]
        assert re.fullmatch(
            r"[0-9a-f]{40}|unknown", annotations["org.opencontainers.image.revision"]
        )

    def test_serves_a_request_read_only_and_unprivileged(self, tools: Tools, bundle: Path) -> None:
        with Cluster.up("--transport", "tcp") as cluster, contextlib.ExitStack() as stack:
            workers = [f"--{role}={cluster.node(role)['url']}" for role in ("prefill", "decode")]
            flags = ("--host=127.0.0.1", "--port=0", "--pd-disaggregation", *workers)
            router = stack.enter_context(container(tools, bundle, *flags))
            url = eventually("the container listens", router.address)
            assert get(f"{url}/livez") is not None
            eventually("the container is ready", lambda: get(f"{url}/readyz") is not None)

            answers = []
            for base in (cluster.url, url):
                with openai.OpenAI(
                    base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=60
                ) as client:
                    answer = client.chat.completions.create(
                        model="demo", messages=QUESTION, temperature=0
                    )
                answers.append(answer.choices[0].message.content)
            assert answers[0]
            assert answers[0] == answers[1]

            status = router.execute("cat", "/proc/1/status").stdout
            assert "Uid:\t65532\t65532\t65532\t65532" in status
            assert set(re.findall(r"^Cap\w+:\t(\w+)$", status, re.MULTILINE)) == {"0" * 16}
            assert (
                "Read-only file system" in router.execute("touch", "/usr/local/bin/written").stderr
            )
            assert router.execute("touch", "/tmp/written").returncode == 0
            assert router.stop(30) == 0, router.output()
