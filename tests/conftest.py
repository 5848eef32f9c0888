"""Property tests have no time limit."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# Two workers share the cores: a second compute thread in each would only wait for the other's.
os.environ.setdefault("OMP_NUM_THREADS", "1")
