"""With this folder in PYTHONPATH an engine's rank processes have their pages on a stand-in for a GPU."""

import sys

if "baton.server.worker.process" in sys.orig_argv:
    from tests.support.devices.stand_in import StandIn

    USED = StandIn().used()  # kept: it ends with its last reference
    USED.__enter__()
