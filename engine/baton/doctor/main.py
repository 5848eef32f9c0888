"""`baton doctor`: is this machine, this fleet, this namespace well? One line per check, with a remedy.

Without a flag this machine is checked; with --fleet routers and all engines that they list; with --namespace the
objects of Kubernetes, through kubectl. Changes nothing. Exit code: 0 all well, 1 warnings, 2 failures or wrong flags.
"""

from __future__ import annotations

import argparse
import os
import ssl
import sys
from collections.abc import Sequence

from baton.doctor.check import CheckResult, exit_code, render_json, render_text
from baton.doctor.client import HttpClient
from baton.doctor.fleet import FleetKeys

DEFAULT_ROUTER = "http://127.0.0.1:8000"


def add_router_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of the commands that ask a router."""
    parser.add_argument(
        "--key", default=os.environ.get("BATON_CONTROL_KEY"), metavar="KEY",
        help="key of the router's control plane; environment BATON_CONTROL_KEY (default: --api-key)",
    )  # fmt: skip
    parser.add_argument(
        "--api-key", default=os.environ.get("BATON_API_KEY"), metavar="KEY",
        help="key of engines and router; environment BATON_API_KEY",
    )  # fmt: skip
    parser.add_argument("--ca-cert", metavar="FILE", help="PEM file of an authority to trust, for https:// addresses")
    parser.add_argument("--json", action="store_true", help="print JSON")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="baton doctor",
        description="Check this machine (default), a fleet (--fleet), a Kubernetes namespace (--namespace).",
        epilog="exit code: 0 all well, 1 warnings, 2 failures",
        allow_abbrev=False,
    )
    parser.add_argument("--fleet", action="store_true", help="check routers and all engines that they list")
    parser.add_argument(
        "--router", action="append", metavar="URL",
        help=f"router to ask; repeat for several (default: {DEFAULT_ROUTER}); without --fleet its clock is compared",
    )  # fmt: skip
    parser.add_argument(
        "--namespace", metavar="NAME", help="check the objects of this Kubernetes namespace with kubectl"
    )
    parser.add_argument("--kubeconfig", metavar="FILE", help="for kubectl (default: as kubectl finds it)")
    parser.add_argument("--node", action="store_true", help="check this machine besides what the other flags name")
    add_router_flags(parser)
    options = parser.parse_args(argv)
    for url in options.router or ():
        if not url.startswith(("http://", "https://")):
            parser.error(f"--router {url}: give http://HOST:PORT or https://HOST:PORT")
    if options.kubeconfig and not options.namespace:
        parser.error("--kubeconfig means nothing without --namespace; name the namespace, too")
    return options


def make_client(options: argparse.Namespace) -> HttpClient:
    try:
        return HttpClient(options.ca_cert)
    except (OSError, ssl.SSLError) as err:
        raise SystemExit(f"--ca-cert {options.ca_cert}: {err.strerror or err}") from err


def keys_of(options: argparse.Namespace) -> FleetKeys:
    return FleetKeys(control=options.key or options.api_key, engine=options.api_key)


def examine(options: argparse.Namespace) -> list[CheckResult]:
    """All results that the flags ask for."""
    client = make_client(options)
    keys = keys_of(options)
    results: list[CheckResult] = []
    if options.node or not (options.fleet or options.namespace):
        results += examine_node(options.router or (), client)
    if options.fleet:
        from baton.doctor.engines import check_engines
        from baton.doctor.fleet import read_fleet
        from baton.doctor.pairs import check_pairs
        from baton.doctor.routers import check_routers

        view = read_fleet(options.router or [DEFAULT_ROUTER], keys, client)
        results += check_routers(view) + check_engines(view) + check_pairs(view)
    if options.namespace:
        from baton.doctor.kubernetes import check_namespace, read_namespace

        results += check_namespace(read_namespace(options.namespace, options.kubeconfig))
    return results


def examine_node(routers: Sequence[str], client: HttpClient) -> list[CheckResult]:
    from baton.doctor.check import skip
    from baton.doctor.gpu import check_gpu, read_gpu_facts
    from baton.doctor.host import check_host, skew
    from baton.server.host_facts import read_host_facts

    results = check_host(read_host_facts())
    for url in routers:
        offset = client.get(f"{url.rstrip('/')}/livez").clock_offset_secs
        if offset is None:
            results.append(skip("host.clock", f"router {url} does not answer with its time"))
        else:
            results.append(skew(f"router {url}, against this one,", offset).under("host"))
    return results + check_gpu(read_gpu_facts())


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    results = examine(options)
    is_colored = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    print(render_json(results) if options.json else render_text(results, is_colored=is_colored))
    return exit_code(results)
