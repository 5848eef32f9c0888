"""An external.metrics API for HorizontalPodAutoscalers: Prometheus, asked by the rules of prometheus-adapter.yml.

Stands in for prometheus-adapter, of which there is no package. It understands the parts of a rule that ours have.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import ssl
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from deploy.monitoring.generate import MONITORING
from deploy.tests.e2e.cluster import TestCluster, wait_until
from deploy.tests.prometheus import Server

GROUP, VERSION = "external.metrics.k8s.io", "v1beta1"
ROOT = f"/apis/{GROUP}/{VERSION}"
PATH = re.compile(rf"{re.escape(ROOT)}/namespaces/([^/]+)/([^/]+)")


def rules() -> dict[str, dict[str, Any]]:
    """Rules of prometheus-adapter.yml by the names of their metrics."""
    config = yaml.safe_load((MONITORING / "prometheus-adapter.yml").read_text())
    return {rule["name"]["as"]: rule for rule in config["externalRules"]}


def metric_values(
    prometheus: Server, *, namespace: str, name: str, selector: str
) -> list[dict[str, Any]]:
    """Samples of an external metric; `selector` is a label selector of equalities."""
    rule = rules()[name]
    (label,) = (
        key for key, of in rule["resources"]["overrides"].items() if of["resource"] == "namespace"
    )
    equalities = [f"{label}={namespace}", *filter(None, selector.split(","))]
    matchers = ",".join(
        f'{key}="{value}"' for key, _, value in (text.partition("=") for text in equalities)
    )
    return [
        {
            "metricName": name,
            "metricLabels": sample["metric"],
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "value": sample["value"][1],
        }
        for sample in prometheus.query(rule["metricsQuery"].replace("<<.LabelMatchers>>", matchers))
    ]


def answer(prometheus: Server, target: str) -> dict[str, Any] | None:
    """Body of a GET request; None if there is no such path."""
    url = urllib.parse.urlsplit(target)
    if url.path == ROOT:
        resource = {
            "singularName": "",
            "namespaced": True,
            "kind": "ExternalMetricValueList",
            "verbs": ["get"],
        }
        resources = [{"name": name, **resource} for name in rules()]
        group = f"{GROUP}/{VERSION}"
        return {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": group,
            "resources": resources,
        }
    if found := PATH.fullmatch(url.path):
        selector = dict(urllib.parse.parse_qsl(url.query)).get("labelSelector", "")
        items = metric_values(prometheus, namespace=found[1], name=found[2], selector=selector)
        return {
            "kind": "ExternalMetricValueList",
            "apiVersion": f"{GROUP}/{VERSION}",
            "metadata": {},
            "items": items,
        }
    return None


def handler(prometheus: Server) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            reply = answer(prometheus, self.path)
            body = json.dumps(reply or {}).encode()
            self.send_response(404 if reply is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Keep the test's output free of requests."""

    return Handler


@contextlib.contextmanager
def serve(cluster: TestCluster, prometheus: Server, folder: Path) -> Iterator[None]:
    """Serve the API to the cluster, which forwards the group to it, until the end of the block."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "1",
         "-keyout", folder / "key.pem", "-out", folder / "certificate.pem"],
        check=True, capture_output=True,
    )  # fmt: skip
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler(prometheus))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    objects = json.dumps(api_service(server.server_address[1]))
    try:
        cluster.kubectl("apply", "-f", "-", stdin=objects)
        name = f"apiservice/{VERSION}.{GROUP}"
        wait_until(
            lambda: "True" in cluster.kubectl("get", name, "--no-headers"),
            "the API of metrics is available",
        )
        yield
    finally:
        cluster.kubectl("delete", "--ignore-not-found", "-f", "-", stdin=objects)
        server.shutdown()
        thread.join()
        server.server_close()


def api_service(port: int) -> dict[str, Any]:
    service = {"namespace": "default", "name": "external-metrics", "port": port}
    return {
        "apiVersion": "v1",
        "kind": "List",
        "items": [
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"namespace": "default", "name": "external-metrics"},
                "spec": {
                    "type": "ExternalName",
                    "externalName": "localhost",
                    "ports": [{"port": port}],
                },
            },
            {
                "apiVersion": "apiregistration.k8s.io/v1",
                "kind": "APIService",
                "metadata": {"name": f"{VERSION}.{GROUP}"},
                "spec": {
                    "group": GROUP,
                    "version": VERSION,
                    "service": service,
                    "insecureSkipTLSVerify": True,
                    "groupPriorityMinimum": 100,
                    "versionPriority": 100,
                },
            },
        ],
    }
