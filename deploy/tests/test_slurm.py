"""deploy/slurm/baton.sbatch: its numbers, and its life from start to drain.

The life is tested twice. With SLURM, where its programs are installed: a controller, one node and munge, all on this
machine and ended with the test. And without: `srun` and `squeue` are then small programs that run steps here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest

from deploy.tests.images import ROOT
from tests.support.processes.cluster import eventually, family, get

SCRIPT = ROOT / "deploy" / "slurm" / "baton.sbatch"
TEXT = SCRIPT.read_text()
PROGRAMS = {
    "scontrol": "print('localhost')",
    "srun": """
import os, sys
words = sys.argv[1:]
options = dict(word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word)
while words[0].startswith("-"):
    words.pop(0)
log = os.open(options["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
os.dup2(log, 1)
os.dup2(log, 2)
with open(os.path.join(os.environ["STEPS"], options["job-name"]), "w") as step:
    step.write(str(os.getpid()))
os.execvp(words[0], words)
""",
    "squeue": """
import os
for name in os.listdir(os.environ["STEPS"]):
    print(open(os.path.join(os.environ["STEPS"], name)).read(), name)
""",
    "scancel": "import os, signal, sys; os.kill(int(sys.argv[2]), signal.SIGTERM)",
}
"""Stand-ins for SLURM's commands, as the script calls them: steps are processes of this machine."""
OURS = {"baton": "['-m', 'baton_ops.cli']", "baton-router": "['-m', 'baton_ops.cli', 'router']"}
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldPort={first}
SlurmdPort={second}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def test_script_is_clean() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not in PATH: only the syntax was checked (Debian: shellcheck)")
    done = subprocess.run(["shellcheck", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_drain_fits_into_the_time_before_the_limit() -> None:
    warned = int(re.findall(r"^#SBATCH --signal=B:TERM@(\d+)$", TEXT, re.MULTILINE)[0])
    router = int(re.findall(r"BATON_DRAIN_SECONDS:-(\d+)", TEXT)[0])
    engine = int(re.findall(r"--drain-timeout-secs=(\d+)", TEXT)[0])
    assert router + engine + 20 <= warned


def free_ports(count: int) -> int:
    """First of `count` consecutive ports that are free now, below those that the system hands out."""
    for first in range(12000 + os.getpid() % 8000, 32000 - count):
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for port in range(first, first + count):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise AssertionError(f"no {count} consecutive free ports")


def write_program(path: Path, text: str) -> None:
    path.write_text(f"#!{sys.executable}\n{text}\n")
    path.chmod(0o755)


class Job:
    """A job: the batch script, with steps that run on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs = folder / "bin"
        self.programs.mkdir()
        for name, words in OURS.items():
            run = f"import os, sys\nos.execv(sys.executable, [sys.executable, *{words}, *sys.argv[1:]])"
            write_program(self.programs / name, run)
        self.directory = folder / "job"
        self.log = folder / "log"
        self.first = free_ports(400)
        self.url = f"http://localhost:{self.first}"
        self.env = {
            **os.environ, "PATH": f"{self.programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "engine"),
            "BATON_DIR": str(self.directory), "BATON_ROUTER_PORT": str(self.first),
            "BATON_ENGINE_PORT": str(self.first + 1), "BATON_DRAIN_SECONDS": "60",
        }  # fmt: skip
        self.args = [
            str(SCRIPT),
            "--model-path=demo",
            "--cpu-threads=1",
            "--disaggregation-transfer-backend=tcp",
        ]
        self._processes: list[subprocess.Popen[bytes]] = []
        self.start()

    def spawn(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.out").open("wb") as log:
            process = subprocess.Popen(
                command, env=self.env, cwd="/", stdout=log, stderr=subprocess.STDOUT
            )
        self._processes.append(process)
        return process

    def start(self) -> None:
        (self.folder / "steps").mkdir()
        self.env |= {
            "STEPS": str(self.folder / "steps"),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "x",
        }
        for name, text in PROGRAMS.items():
            write_program(self.programs / name, text)
        self.script = self.spawn("script", "bash", *self.args)

    def is_running(self) -> bool:
        return self.script.poll() is None

    def terminate(self) -> None:
        """Send the signal that SLURM sends before the time limit."""
        self.script.send_signal(signal.SIGTERM)

    def exit_code(self) -> int:
        return self.script.wait(120)

    def close(self) -> None:
        for started in reversed(self._processes):
            for process in reversed(family(started.pid)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            started.wait(30)

    def output(self) -> str:
        paths = [*self.folder.glob("*.out"), *self.directory.glob("*.log")]
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in paths
        )

    def key(self, name: str) -> str:
        return dict(line.split("=", 1) for line in (self.directory / "keys").read_text().split())[
            name
        ]

    def client(self) -> openai.OpenAI:
        key = self.key("BATON_API_KEY")
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120)

    def engine(self, role: str) -> int:
        """Process id of an engine's front; 0 if there is none."""
        for child in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = child.cmdline()
                is_ours = f"--port={self.first + (1 if role == 'prefill' else 2)}" in words
                if (
                    is_ours
                    and words[0] == sys.executable
                    and f"--disaggregation-mode={role}" in words
                ):
                    return child.pid
        return 0


class SlurmJob(Job):
    """The same job under SLURM."""

    def start(self) -> None:
        munge = self.folder / "munge"
        munge.mkdir(mode=0o700)
        (munge / "key").write_bytes(os.urandom(1024))
        (munge / "key").chmod(0o400)
        for path in (munge, munge / "key"):
            shutil.chown(path, "root", "root")
        paths = {
            "socket": "socket",
            "key-file": "key",
            "log-file": "log",
            "pid-file": "pid",
            "seed-file": "seed",
        }
        self.spawn(
            "munged",
            "munged",
            "--foreground",
            "--force",
            *(f"--{k}={munge}/{v}" for k, v in paths.items()),
        )
        host = socket.gethostname().partition(".")[0]
        text = CONFIGURATION.format(
            folder=self.folder,
            host=host,
            first=self.first + 398,
            second=self.first + 399,
            cpus=os.cpu_count(),
        )
        configuration = self.folder / "slurm.conf"
        configuration.write_text(text)
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        self.env["SLURM_CONF"] = str(configuration)
        eventually("munge listens", (munge / "socket").exists)
        for daemon in ("slurmctld", "slurmd"):
            self.spawn(daemon, daemon, "-D", "-f", str(configuration))
        eventually(
            "the node is idle", lambda: "idle" in self.ask("sinfo", "--noheader", "--format=%T"), 60
        )
        options = [
            "--nodes=1",
            f"--cpus-per-task={os.cpu_count()}",
            f"--output={self.folder}/script.out",
            "--parsable",
        ]
        self.number = self.ask("sbatch", *options, *self.args).strip()
        assert self.number, self.output()

    def ask(self, *command: str) -> str:
        return subprocess.run(
            command, env=self.env, cwd="/", capture_output=True, text=True, timeout=60
        ).stdout

    def field(self, name: str) -> str:
        return dict(
            word.split("=", 1) for word in self.ask("scontrol", "show", "job", self.number).split()
        )[name]

    def is_running(self) -> bool:
        return self.field("JobState") in ("PENDING", "RUNNING")

    def terminate(self) -> None:
        self.ask("scancel", "--signal=TERM", "--batch", self.number)

    def exit_code(self) -> int:
        eventually("the job ends", lambda: not self.is_running(), 120)
        return int(self.field("ExitCode").split(":")[0])

    def close(self) -> None:
        self.ask("scancel", "--full", "--signal=KILL", self.number)
        eventually(
            "no step is left", lambda: not self.engine("prefill") and not self.engine("decode"), 60
        )
        super().close()


@pytest.fixture(params=["stand-ins", "slurm"])
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    missing = [
        name for name in ("slurmctld", "slurmd", "sbatch", "munged") if shutil.which(name) is None
    ]
    if request.param == "slurm" and (missing or os.geteuid() != 0):
        pytest.skip(
            f"SLURM is not tested: needs root and {', '.join(missing)} (Debian: slurm-wlm munge)"
        )
    with tempfile.TemporaryDirectory(prefix="baton-slurm-") as folder:
        Path(folder).chmod(0o755)
        started = (SlurmJob if request.param == "slurm" else Job)(Path(folder))
        try:
            yield started
        except BaseException:
            print(started.output())
            raise
        finally:
            started.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_job_serves_restarts_engines_and_drains_before_it_ends(job: Job) -> None:
    def ready() -> bool:
        assert job.is_running(), job.output()
        return get(f"{job.url}/readyz") is not None

    eventually("the job serves", ready, 180)
    assert (job.directory / "keys").stat().st_mode & 0o077 == 0
    workers = json.loads((job.directory / "workers.json").read_text())
    assert [worker["role"] for worker in workers] == ["prefill", "decode"]
    question = [{"role": "user", "content": "What is Baton?"}]
    with job.client() as client:
        answer = client.chat.completions.create(model="demo", messages=question, temperature=0)
    assert answer.choices[0].message.content

    first = eventually("a decode node runs", lambda: job.engine("decode"))
    os.kill(first, signal.SIGKILL)
    eventually("it is started again", lambda: job.engine("decode") not in (0, first), 120)
    eventually("the router is ready again", ready, 180)

    texts: list[str] = []
    begun = threading.Event()

    def stream() -> None:
        with job.client() as client:
            chunks = client.completions.create(
                model="demo", prompt="Baton is", max_tokens=300, temperature=0, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            for chunk in chunks:
                texts.append(chunk.choices[0].finish_reason or "" if chunk.choices else "")
                begun.set()

    reader = threading.Thread(target=stream)
    reader.start()
    assert begun.wait(120), job.output()
    job.terminate()
    reader.join(120)
    assert "length" in texts, f"the stream broke: {job.output()}"
    assert job.exit_code() == 0, job.output()
    assert "all steps have ended" in job.output()
