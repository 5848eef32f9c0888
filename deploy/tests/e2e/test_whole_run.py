"""Audit log of the API server over all tests before this file, which pytest runs last."""

from __future__ import annotations

import pytest

from deploy.tests.e2e.cluster import TestCluster
from deploy.tests.manifests import named, render

pytestmark = pytest.mark.kube


def test_each_right_of_the_role_was_used_and_no_other_asked_for(demo: TestCluster) -> None:
    rules = named(render("overlays/cpu-demo"), "Role", "baton-router")["rules"]
    rights = {
        (resource, verb)
        for rule in rules
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    asked = {(request["objectRef"].get("resource"), request["verb"]) for request in demo.audited()}
    assert asked == rights
    assert {request["user"]["username"] for request in demo.audited()} == {
        "system:serviceaccount:baton:baton-router"
    }
