"""`baton doctor`: checks of a machine, a fleet or a namespace, a line with a remedy for each.

Without a flag this machine is checked; with the URL of a router, or --fleet, routers and all
engines that they list; with --namespace the objects of Kubernetes, through kubectl. Changes
nothing. Exit code: 0 all well, 1 warnings, 2 failures or wrong flags.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.config.flags import FlagParser, add_flags, exit_with_mistakes, flags_table, opt
from baton.server.observability.host_facts import HostFacts
from baton_ops.clients.flags import (
    API_KEY_ENV,
    CONTROL_KEY_ENV,
    DEFAULT_ROUTER,
    make_client,
    wrong_urls,
)
from baton_ops.clients.http_client import HttpClient
from baton_ops.doctor.check import CheckResult, exit_code, render_json, render_text, skip
from baton_ops.doctor.engines import check_engines
from baton_ops.doctor.fleet import FleetKeys, read_fleet
from baton_ops.doctor.gpu import check_gpu, read_gpu_facts
from baton_ops.doctor.host import check_host, check_skew
from baton_ops.doctor.kubernetes import check_namespace, read_namespace
from baton_ops.doctor.pairs import check_pairs
from baton_ops.doctor.routers import check_routers

PROG = "baton doctor"


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorConfig:
    """Flags of the command."""

    fleet: bool = opt(False, "check routers and all engines that they list")
    router: str | None = opt(
        None,
        f"router to ask, or several with commas between (default with --fleet: {DEFAULT_ROUTER}); "
        "without --fleet its clock is compared with that of this machine",
    )
    namespace: str | None = opt(None, "check the objects of this Kubernetes namespace with kubectl")
    node: bool = opt(False, "check this machine, beside the targets of --fleet and --namespace")
    json: bool = opt(False, "print one JSON object instead of text")
    key: str | None = opt(
        None, "key of the routers' control plane (default: --api-key)", env=CONTROL_KEY_ENV
    )
    api_key: str | None = opt(None, "key of engines and routers", env=API_KEY_ENV)
    ca_cert: str | None = opt(
        None, "PEM file of an authority to trust besides the system's, for https addresses"
    )
    kubectl: str = opt(
        "kubectl",
        "command that reaches the cluster, with its flags: --kubectl='kubectl --context x'",
    )

    @property
    def routers(self) -> list[str]:
        return [url.strip().rstrip("/") for url in self.router.split(",")] if self.router else []


def make_parser() -> FlagParser:
    parser = FlagParser(
        PROG,
        "Check this machine, or the fleet of a router, or a Kubernetes namespace (--namespace).",
    )
    parser.usage = f"{PROG} [ROUTER …] [flags]"
    parser.epilog = "exit code: 0 all well, 1 warnings, 2 failures or wrong flags"
    text = "URL of a router whose fleet is checked, the same as --fleet --router URL"
    parser.add_argument("urls", nargs="*", metavar="ROUTER", help=text)
    add_flags(parser, DoctorConfig)
    return parser


def parse_flags(argv: Sequence[str]) -> DoctorConfig:
    """Flags; prints mistakes and exits with 2."""
    config, others, bad = make_parser().read_config(DoctorConfig, argv)
    urls: list[str] = others["urls"]
    bad += wrong_urls(urls, "")
    bad += wrong_urls(config.routers, "--router ")
    if bad:
        exit_with_mistakes(PROG, bad)
    if not urls:
        return config
    return replace(config, fleet=True, router=",".join([*urls, *config.routers]))


def keys_of(config: DoctorConfig) -> FleetKeys:
    return FleetKeys(control=config.key or config.api_key, engine=config.api_key)


def examine_fleet(config: DoctorConfig) -> list[CheckResult]:
    """All results that the flags ask for."""
    client = make_client(PROG, config.ca_cert)
    is_alone = not config.fleet and not config.namespace
    results = examine_node(config.routers, client) if config.node or is_alone else []
    if config.fleet:
        view = read_fleet(config.routers or [DEFAULT_ROUTER], keys_of(config), client)
        results += check_routers(view) + check_engines(view) + check_pairs(view)
    if config.namespace:
        results += check_namespace(read_namespace(config.namespace, config.kubectl))
    return results


def examine_node(routers: Sequence[str], client: HttpClient) -> list[CheckResult]:
    results = check_host(HostFacts())
    for url in routers:
        offset = client.get(f"{url}/livez").clock_offset_secs
        if offset is None:
            result = skip(f"router {url} does not answer with its time")
        else:
            result = check_skew(f"router {url}, against this one,", offset)
        results.append(replace(result, name="host.clock"))
    return results + check_gpu(read_gpu_facts())


def main(argv: Sequence[str]) -> int:
    config = parse_flags(argv)
    results = examine_fleet(config)
    is_colored = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    print(render_json(results) if config.json else render_text(results, is_colored=is_colored))
    return exit_code(results)


if __name__ == "__main__":
    print(flags_table(DoctorConfig))
