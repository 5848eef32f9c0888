"""Tenant and priority class: from a request's fields and headers to what the scheduler shares by.

1. `read` takes the fields when the body is checked: `priority_class` or OpenAI's `service_tier`,
   and `tenant`. Without --priority-classes and --tenant-config they are fields without effect, like
   any unknown one.
2. `resolve` adds the headers: the tenant is the field, else `x-tenant-id`, else a hash of the API
   key, else "default". Its rules clamp the priority and cap the class.
3. `admit` takes the prompt's tokens from the tenant's minute, or refuses with 429; `spend` takes
   generated ones.

The names are trusted: where clients must not choose their tenant, a gateway in front sets the
header and drops the field.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

from baton.config import EngineConfig
from baton.config.classes import SERVICE_TIERS
from baton.config.tenants import DEFAULT_TENANT, NAME_RULE, TENANT_NAME
from baton.errors import BadRequest, RateLimited
from baton.sched.fairness.tenants import RateLimits
from baton.sched.setup import from_config
from baton.server.fields import bad
from baton.server.request.schema import RequestFields

TENANT_HEADER = "x-tenant-id"


class Tenancy:
    def __init__(self, config: EngineConfig) -> None:
        """Raises ConfigError for a bad tenant file."""
        self._rules = from_config.fairness(config)
        rules = self._rules.tenants
        self._rates = None if rules is None else RateLimits(rules, config.max_idle_tenants)

    @property
    def limits_rates(self) -> bool:
        """Generated tokens are counted by tenant."""
        return self._rates is not None

    @property
    def unused_fields(self) -> tuple[str, ...]:
        """Fields of a request that have no effect with these flags."""
        unused = () if self._rules.classes.classes else ("priority_class",)
        return unused if self._rules.tenants is not None else (*unused, "tenant")

    def read(self, request: RequestFields) -> tuple[str, str]:
        """Class and tenant that the body names; "": none."""
        asked_class = tenant = None
        classes = self._rules.classes
        if classes.classes:
            asked_class = request.priority_class
            tier = request.service_tier
            if asked_class is not None and asked_class not in classes.names:
                there = ", ".join(classes.names)
                raise bad(
                    "priority_class",
                    f"is {str(asked_class)[:64]!r}; this engine has the classes {there}",
                )
            if tier is not None and tier not in SERVICE_TIERS:
                raise bad(
                    "service_tier",
                    f"is {str(tier)[:64]!r}, must be one of {', '.join(SERVICE_TIERS)}",
                )
            if asked_class is None and tier is not None:
                asked_class = classes.of_tier(tier)
        if self._rules.tenants is not None:
            tenant = request.tenant
            if tenant is not None and not (type(tenant) is str and TENANT_NAME.fullmatch(tenant)):
                raise bad("tenant", f"is {str(tenant)[:64]!r}, must have {NAME_RULE}")
        return asked_class or "", tenant or ""

    def resolve(
        self, asked_class: str, asked_tenant: str, priority: int | None, headers: Mapping[str, str]
    ) -> tuple[int | None, str, str]:
        """Priority, class and tenant of a request; "" where nothing is shared by it."""
        if not self._rules.enabled:
            return priority, "", ""
        tenant = "" if self._rules.tenants is None else asked_tenant or _of_headers(headers)
        return *self._rules.place_request(tenant, asked_class or None, priority), tenant

    def admit(self, tenant: str, prompt_tokens: int, now: float) -> None:
        """Raises RateLimited, with the seconds after which the request would pass."""
        wait = 0.0 if self._rates is None else self._rates.admit(tenant, prompt_tokens, now)
        if wait > 0:
            assert self._rules.tenants is not None
            limit = self._rules.tenants.rule_of(tenant).tokens_per_minute
            raise RateLimited(
                f"tenant {tenant!r} may use {limit} tokens per minute and this request brings "
                f"{prompt_tokens}; retry "
                f"in {math.ceil(wait)} s",
                param="tenant",
                retry_after_secs=max(math.ceil(wait), 1),
            )

    def spend(self, tenant: str, tokens: int, now: float) -> None:
        """Generated tokens; negative: the prompt's, back, because the request was refused after
        `admit`.
        """
        if self._rates is not None:
            self._rates.spend(tenant, tokens, now)


def _of_headers(headers: Mapping[str, str]) -> str:
    given = headers.get(TENANT_HEADER)
    if given is not None:
        if not TENANT_NAME.fullmatch(given):
            raise BadRequest(
                f"header {TENANT_HEADER} is {given[:64]!r}, must have {NAME_RULE}",
                param=TENANT_HEADER,
            )
        return given
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return "key-" + hashlib.sha256(b"baton tenant\0" + key.strip().encode()).hexdigest()[:16]
    return DEFAULT_TENANT
