"""With this folder in PYTHONPATH an engine's clock is ten minutes ahead, and it is of another version."""

import sys
import time
from importlib import metadata

AHEAD_SECS = 600.0
VERSION = "9.9.9"

if any(name in sys.orig_argv for name in ("tests.support.processes.front", "baton_ops.cli")):
    true_time, true_version = time.time, metadata.version
    time.time = lambda: true_time() + AHEAD_SECS
    metadata.version = lambda name: VERSION if name == "baton-serve" else true_version(name)
