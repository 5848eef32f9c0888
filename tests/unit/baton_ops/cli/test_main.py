"""The command line: what exists, what is refused, and how `up` turns flags into a cluster."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest

from baton import DISTRIBUTION
from baton.server.launch import process_group
from baton_ops.cli import main
from baton_ops.launch import cluster_node, cluster_plan, local_cluster
from baton_ops.launch.supervisor import ChildFailed


def test_help_lists_exactly_the_commands_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name in main.COMMANDS:
        assert f"\n  {name} " in shown
    assert main.main([]) == 2


def test_unknown_command_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["fly"]) == 2
    assert "no command 'fly'; there are up, chat, router" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["help"], ["-h"]])
def test_help_can_be_asked_for_as_a_command(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(words) == 0
    assert capsys.readouterr().out == main.format_usage()


def test_help_of_a_command_can_be_asked_for_in_front(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["help", "top"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: baton top")


def test_commands_of_other_servers_are_answered_with_ours(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main.main(["serve", "Qwen/Qwen3-0.6B"]) == 2
    assert "baton up --model-path MODEL starts a whole cluster" in capsys.readouterr().err


def test_model_without_a_flag_and_a_missing_one_are_named_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "none")
    flags = ["Qwen/Qwen3-0.6B", "--gpu-memory-utilization", "0.9", "--model", missing]
    with pytest.raises(SystemExit) as ended:
        main.main(["engine", *flags])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "give the model as --model-path Qwen/Qwen3-0.6B" in said
    assert "use --mem-fraction-static" in said
    assert f"--model-path {missing}: {missing} is not a directory" in said


@pytest.mark.parametrize("name", sorted(main.PARSERS))
def test_short_help_is_a_screen_and_full_help_has_every_flag(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    parser = import_module(main.PARSERS[name]).make_parser()
    flags = set(parser._option_string_actions)
    full = "--help-all" if "--help-all" in flags else "--help"
    shown: dict[str, str] = {}
    for flag in ("--help", full):
        with pytest.raises(SystemExit) as ended:
            parser.parse_known_args([flag])
        assert ended.value.code == 0
        shown[flag] = capsys.readouterr().out
    for flag in flags:
        assert re.search(rf"^  (\S+ )*?.*{flag}\b", shown[full], re.MULTILINE), flag
    if full == "--help-all":
        short = shown["--help"]
        named = re.findall(r"^  (--[a-z-]+)", short, re.MULTILINE)
        assert len(named) == 10
        assert len(short.splitlines()) <= 40
        assert f"baton {name} --help-all shows" in short


def test_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("baton ")


def test_version_is_that_of_the_distribution_that_pyproject_names() -> None:
    project = (Path(__file__).parents[4] / "pyproject.toml").read_text()
    assert re.search(rf'^name = "{DISTRIBUTION}"', project, re.MULTILINE)


def test_help_imports_nothing_heavy() -> None:
    script = "import sys; from baton_ops.cli import main; main.main(['--help']); print(sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = done.stdout.splitlines()[-1]
    for heavy in ("'torch'", "'aiohttp'", "'asyncio'", "'zmq'", "'baton._native'"):
        assert heavy not in loaded


def test_engine_command_imports_no_other_command_and_no_torch() -> None:
    script = (
        "import sys\nfrom baton_ops.cli import main\n"
        "try: main.main(['engine', '--help'])\nexcept SystemExit: pass\n"
        "names = [name for name in sys.modules if name.partition('.')[0] in ('baton_ops', 'torch')]\n"
        "print(*sorted(names))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "baton_ops baton_ops.cli baton_ops.cli.main"


def test_defaults_are_one_pair() -> None:
    plan = cluster_plan.parse_flags([])
    assert plan.counts == {"prefill": 1, "decode": 1, "worker": 0}
    assert plan.engine == {}


def test_workers_replace_the_pair() -> None:
    assert cluster_plan.parse_flags(["--workers", "2"]).counts == {
        "prefill": 0,
        "decode": 0,
        "worker": 2,
    }
    assert (
        cluster_plan.parse_flags(["--prefill", "0", "--decode", "0", "--workers", "1"]).processes
        == 1
    )
    assert (
        cluster_plan.parse_flags(["--tp-size", "2", "--decode-args", "--dp-size 2"]).processes
        == 2 + 4
    )


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--prefill", "2", "--decode", "0"], "a request needs one of each"),
        (["--workers", "1", "--prefill", "1", "--decode", "1"], "give workers, or both"),
        (["--prefill", "-1"], "none may be negative"),
        (
            ["--disaggregation-mode", "prefill"],
            "--disaggregation-mode: baton up sets it for each node; say how many",
        ),
        (["--decode-args", "--page-size 3"], "--decode-args: --page-size 3: use a power of two"),
        (["--prefill-args", "--bogus 3"], "--prefill-args: --bogus: there is no such flag"),
        (["--prefill-args", "'"], "--prefill-args: No closing quotation"),
        (["--page-size", "3"], "--page-size 3: use a power of two"),
        (["--pre", "2"], "there is no such flag"),
        (["--port", "99999"], "--port 99999: give 0 to 65535"),
        (["--start-timeout-secs", "0"], "--start-timeout-secs 0"),
        (["--decode-args", "--bogus"], "follows an equals sign: --decode-args='--bogus'"),
        (["Qwen/Qwen3-0.6B"], "give the model as --model-path Qwen/Qwen3-0.6B"),
    ],
)
def test_impossible_clusters_are_refused(
    flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cluster_plan.parse_flags(flags)
    assert stop.value.code == 2
    assert complaint in capsys.readouterr().err


def test_engine_flags_reach_every_engine_and_secrets_stay_off_command_lines(tmp_path: Path) -> None:
    flags = ["--page-size", "8", "--disable-radix-cache", "--dp-size", "2", "--transport", "tcp"]
    flags += [
        "--cluster-key",
        "s3cret",
        "--decode-args",
        "--log-level debug --cpu-threads 3",
        "--policy",
        "random",
    ]
    plan = cluster_plan.parse_flags(flags)
    cluster = local_cluster.LocalCluster(plan, tmp_path, print)
    prefill, decode = (node.argv() for node in cluster.nodes)
    for argv in (prefill, decode):
        joined = " ".join(argv)
        assert "--page-size 8 " in joined
        assert "--disable-radix-cache" in argv
        assert "--disaggregation-transfer-backend tcp" in joined
        assert "s3cret" not in joined
    assert " ".join(decode).endswith("--log-level debug --cpu-threads 3")
    assert "--log-level" not in prefill
    assert "--disaggregation-bootstrap-port" in prefill
    assert "--disaggregation-bootstrap-port" not in decode
    router = cluster._router_argv()
    assert "--dp-aware" in router
    assert router[-2:] == ["--policy", "random"]


def test_nodes_get_a_cluster_key_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key(*flags: str) -> str:
        cluster = local_cluster.LocalCluster(cluster_plan.parse_flags(flags), tmp_path, print)
        keys = {node.child._env["BATON_CLUSTER_KEY"] for node in cluster.nodes}
        assert all(key not in " ".join(node.argv()) for key in keys for node in cluster.nodes)
        return keys.pop() if len(keys) == 1 else ""

    monkeypatch.delenv("BATON_CLUSTER_KEY", raising=False)
    assert len(key()) == 64
    assert key() != key()
    assert key("--cluster-key", "s3cret") == "s3cret"
    monkeypatch.setenv("BATON_CLUSTER_KEY", "from-environment")
    assert key() == "from-environment"


def test_cores_are_divided_between_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def threads(cores: int, *flags: str) -> list[str]:
        monkeypatch.setattr(cluster_node, "_count_cores", lambda: cores)
        argv = (
            local_cluster.LocalCluster(cluster_plan.parse_flags(flags), tmp_path, print)
            .nodes[0]
            .argv()
        )
        return [argv[i + 1] for i, arg in enumerate(argv) if arg == "--cpu-threads"]

    assert threads(2) == ["1"]
    assert threads(2, "--workers", "1") == ["2"]
    assert threads(16, "--prefill", "2", "--decode", "2", "--dp-size", "2") == ["2"]
    assert threads(2, "--cpu-threads", "5") == ["5"]
    assert threads(12, "--prefill-args", "--dp-size 4", "--decode-args", "--dp-size 2") == ["2"]


def test_ranks_of_one_role_are_passed_to_the_router(tmp_path: Path) -> None:
    def router(*flags: str) -> list[str]:
        return local_cluster.LocalCluster(
            cluster_plan.parse_flags(flags), tmp_path, print
        )._router_argv()

    assert "--dp-aware" not in router()
    assert "--dp-aware" in router("--decode-args", "--dp-size 2")
    assert "--dp-aware" not in router("--worker-args", "--dp-size 2"), "there is no worker"


def test_traces_go_to_one_place_from_all(tmp_path: Path) -> None:
    flags = ["--enable-trace", "--otlp-traces-endpoint", "http://c:4318"]
    flags += ["--allowed-hosts", "a.lan,b.lan"]
    cluster = local_cluster.LocalCluster(cluster_plan.parse_flags(flags), tmp_path, print)
    for argv in (cluster._router_argv(), *(node.argv() for node in cluster.nodes)):
        assert "--enable-trace" in argv
        assert argv[argv.index("--otlp-traces-endpoint") + 1] == "http://c:4318"
        assert argv[argv.index("--allowed-hosts") + 1] == "a.lan,b.lan"
    assert (
        "--enable-trace"
        not in local_cluster.LocalCluster(
            cluster_plan.parse_flags([]), tmp_path, print
        )._router_argv()
    )


def test_taken_port_is_refused_when_asked_for_and_skipped_when_not() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ChildFailed, match="is taken"):
            local_cluster.choose_port("127.0.0.1", taken.getsockname()[1])
    port, note = local_cluster.choose_port("127.0.0.1", None)
    assert 8000 <= port < 8000 + local_cluster.PORTS_TRIED
    assert (note is None) == (port == 8000)
    assert local_cluster.choose_port("127.0.0.1", 0)[0] > 0


def test_state_file_has_exactly_the_agreed_fields(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    cluster = local_cluster.LocalCluster(
        cluster_plan.parse_flags(["--state-file", str(path)]), tmp_path, print
    )
    cluster.port = 8123
    cluster.nodes[0].port, cluster.nodes[0].bootstrap_port = 30000, 8998
    cluster.write_state()
    state = json.loads(path.read_text())
    assert state["router"] == {
        "pid": 0, "url": "http://127.0.0.1:8123", "incarnation": None, "control_key": cluster.control_key,
    }  # fmt: skip
    assert state["nodes"][0] == {
        "role": "prefill", "pid": 0, "url": "http://127.0.0.1:30000", "incarnation": None, "bootstrap_port": 8998,
        "restarts": 0,
    }  # fmt: skip
    assert state["nodes"][1]["bootstrap_port"] is None
    assert os.listdir(tmp_path) == ["state.json"]


def test_wrong_router_flag_is_reported_before_any_node_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, complaint in (
        (["--policy", "nope"], "invalid value 'nope' for '--policy"),
        (["--router-args=--no-such-flag"], "--no-such-flag"),
    ):
        assert local_cluster.main([*flags, "--log-dir", str(tmp_path / "logs")]) == 2
        assert complaint in capsys.readouterr().err
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--page-size 0", "--page-size 0: use a power of two"),
        ("--host 192.0.2.1", "--host 192.0.2.1 cannot be bound"),
        ("--router-args=--port=9", "--router-args: --port is set by baton up"),
        ("--router-args=--api-key=secret", "set BATON_API_KEY for baton up instead"),
        (
            "--router-args=--control-plane-api-keys=a:b:admin:c",
            "set BATON_ROUTER_FLAG_CONTROL_PLANE_API_KEYS for baton up instead",
        ),
        ("--decode-args=--cluster-key=secret", "--decode-args: --cluster-key is secret"),
        ("--log-dir /proc/x", "--log-dir: /proc/x cannot be written to"),
        (
            "--state-file /no-such-directory/x",
            "--state-file: /no-such-directory cannot be written to",
        ),
        ("--model-path /no-such-model", "/no-such-model is not a directory"),
        ("--model-path no-such-owner/model", "hf download no-such-owner/model"),
        ("--kv-pool-mib 99999999", "195312.50 GiB for KV pools"),
    ],
)
def test_invalid_flags_are_refused_before_any_process_starts(
    flags: str, complaint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_cluster, "check_router_flags", lambda plan: None)
    monkeypatch.setattr(local_cluster, "_run_plan", None)
    with pytest.raises(SystemExit) as ended:
        local_cluster.main(flags.split())
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_failing_first_start_ends_up_with_the_end_of_the_log(tmp_path: Path) -> None:
    """A whole `baton up` with a node that cannot start: its exit code, the reason on stderr, no process left."""
    command = [
        sys.executable,
        "-m",
        "baton_ops.cli",
        "up",
        "--port",
        "0",
        "--log-dir",
        str(tmp_path),
    ]
    command += ["--prefill-args", f"--model-path {tmp_path / 'no-such-model'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "before it was ready" in done.stderr
    assert "no-such-model" in done.stderr


def test_node_that_dies_while_the_router_starts_ends_the_start() -> None:
    """The router would wait for it until the timeout."""

    async def forever() -> None:
        await asyncio.Event().wait()

    async def dies() -> None:
        raise ChildFailed("prefill 0 exited with code 1 just after it was ready")

    async def work() -> None:
        tasks = [asyncio.ensure_future(work) for work in (forever(), dies())]
        with pytest.raises(ChildFailed, match="just after it was ready"):
            await process_group.first_of(*tasks)
        assert all(task.done() for task in tasks)

    asyncio.run(asyncio.wait_for(work(), 10))


def test_engines_of_one_gpu_share_its_memory() -> None:
    def share(*argv: str) -> str:
        words = cluster_node.ClusterNode(
            "prefill", "p0", cluster_plan.parse_flags(list(argv))
        ).argv()
        return (
            words[words.index("--mem-fraction-static") + 1]
            if "--mem-fraction-static" in words
            else ""
        )

    assert share() == "", "it is refused with --device cpu"
    assert share("--device", "cuda") == "0.425"
    assert share("--device", "cuda", "--decode", "3") == "0.212"
    assert share("--device", "cuda", "--mem-fraction-static", "0.3") == "0.3"


def test_engines_on_a_gpu_have_time_to_compile_their_kernels() -> None:
    def wait(*argv: str) -> float:
        return cluster_plan.parse_flags(list(argv)).start_timeout_secs

    assert wait() == 300
    assert wait("--device", "cuda") == 1800
    assert wait("--device", "cuda", "--start-timeout-secs", "60") == 60


def test_log_directory_is_removed_after_a_clean_stop_only(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    async def ends(_: object, log_dir: Path, code: int) -> int:
        (log_dir / "router.log").write_text("")
        made.append(log_dir)
        return code

    monkeypatch.setattr(local_cluster, "check_router_flags", lambda plan: None)
    for code in (0, 1):
        monkeypatch.setattr(local_cluster, "_run_plan", partial(ends, code=code))
        assert local_cluster.main([]) == code
    assert [path.exists() for path in made] == [False, True]
    shutil.rmtree(made[1])


def test_installed_router_command_is_the_router(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    project = (Path(__file__).parents[4] / "pyproject.toml").read_text()
    assert 'baton-router = "baton_ops.cli.main:router"\n' in project
    monkeypatch.setattr(sys, "argv", ["baton-router", "--port", "not-a-port"])
    assert main.router() == 2
    assert capfd.readouterr().err.startswith("baton-router: ")
