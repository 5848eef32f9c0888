"""Checks of `baton up` before it starts a process: of the address, the files and the model that its
flags name.
"""

from __future__ import annotations

import json
import socket
import tempfile
from pathlib import Path

from baton.config import build_config
from baton.config.files import read_regular_file, refuse_unwritable_kinds
from baton.errors import ConfigError
from baton.models import checkpoint
from baton.server.launch.draft_model import resolve_draft_model
from baton.server.text import model_info
from baton_ops.clients.http_client import HttpClient
from baton_ops.clients.instance import stated_incarnation
from baton_ops.launch.cluster_plan import ROLES, ClusterPlan


def check_place(plan: ClusterPlan) -> str | None:
    """Faults of the address, the files and the model that the flags name."""
    up = plan.up
    try:
        socket.create_server(
            (up.host, 0), family=socket.AF_INET6 if ":" in up.host else socket.AF_INET
        ).close()
    except OSError as err:
        reason = (err.strerror or str(err)).partition(" (while")[0]
        return f"--host {up.host} cannot be bound ({reason}); give an address of this machine"
    for name, path in (
        ("--log-dir", up.log_dir),
        ("--state-file", up.state_file and Path(up.state_file).parent),
    ):
        try:
            if path and name == "--log-dir":
                Path(path).mkdir(parents=True, exist_ok=True)
            if path:
                tempfile.TemporaryFile(dir=path).close()
        except OSError as err:
            return f"{name}: {path} cannot be written to ({err.strerror}); give another directory"
    for name in ("router", *(f"{role}-{i}" for role in ROLES for i in range(plan.counts[role]))):
        file = Path(up.log_dir or "") / f"{name}.log"
        try:
            if up.log_dir:
                refuse_unwritable_kinds(file)
        except OSError as err:
            return f"--log-dir: {file} cannot be written to ({err.strerror}); remove it"
    if up.state_file and (complaint := living_cluster(Path(up.state_file))):
        return complaint
    try:
        config = build_config(dict(plan.engine))
        facts = model_info.load(config)
        if config.simulate is None:
            config = resolve_draft_model(config)
            checkpoint.check_checkpoint(config, facts.path, sum(plan.counts.values()))
    except ConfigError as err:
        return err.message
    return None


def living_cluster(path: Path) -> str | None:
    """Complaint about a state file of a cluster that runs; one that a dead cluster left is
    replaced.
    """
    try:
        router = json.loads(read_regular_file(path))["router"]
        url = router["url"]
        incarnation = router["incarnation"]
    except FileNotFoundError:
        return None
    except OSError as err:
        return f"--state-file: {path} cannot be read ({err.strerror}); give another file"
    except (ValueError, KeyError, TypeError):  # empty, or of no cluster: it is replaced
        return None
    stated = stated_incarnation(HttpClient().get(f"{url}/livez").text)
    if stated is None or stated != incarnation:
        return None
    return (
        f"--state-file: {path} is that of a cluster that runs, its router at {url}; give "
        "another file"
    )
