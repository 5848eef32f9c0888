"""Tenant file, and what a request's fields and headers make of its tenant, class and priority."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from baton import config
from baton.errors import BadRequest, ConfigError, RateLimited
from baton.sched.setup import from_config
from baton.server.fields import read
from baton.server.request.schema import RequestFields
from baton.server.request.tenancy import Tenancy


def file(folder: Path, document: Any) -> str:
    path = folder / "tenants.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return str(path)


def tenancy(folder: Path, document: Any = None, **flags: Any) -> Tenancy:
    if document is not None:
        flags["tenant_config"] = file(folder, document)
    return Tenancy(config.build_config(flags))


class Placed(NamedTuple):
    priority: int | None
    priority_class: str = ""
    tenant: str = ""


def placed(t: Tenancy, body: dict[str, Any], headers: dict[str, str] | None = None) -> Placed:
    return Placed(
        *t.resolve(*t.read(read(RequestFields, body)), body.get("priority"), headers or {})
    )


def test_flags_become_rules(tmp_path: Path) -> None:
    made = from_config.fairness(
        config.build_config(
            {
                "priority_classes": "a:2:5,b:1:0", "disable_class_charge_decode": True, "cached_token_weight": 0.5,
                "prompt_token_weight": 3.0, "output_token_weight": 4.0, "max_idle_tenants": 7,
                "tenant_config": file(tmp_path, {"default": {"weight": 2}}),
            }
        )
    )  # fmt: skip
    assert made.enabled
    assert made.classes.names == ("a", "b")
    assert (made.charge_decode, made.max_idle_tenants) == (False, 7)
    assert (made.prompt_token_weight, made.output_token_weight, made.cached_token_weight) == (
        3.0,
        4.0,
        0.5,
    )
    assert made.tenants is not None
    assert made.tenants.rule_of("x").weight == 2
    assert not from_config.fairness(config.EngineConfig()).enabled
    assert from_config.fairness(config.EngineConfig(tenant_config=" {}")).enabled


def test_every_mistake_of_a_tenant_file_is_reported_with_the_file(tmp_path: Path) -> None:
    document = {"default": {"weight": -1}, "tenants": {"t": {"priority_class": "gold"}}}
    with pytest.raises(ConfigError) as caught:
        tenancy(tmp_path, document, priority_classes="a:1")
    lines = caught.value.message.splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"--tenant-config {tmp_path}/tenants.json: ") for line in lines)
    with pytest.raises(ConfigError, match="is not JSON"):
        tenancy(tmp_path, "weight = 3")
    with pytest.raises(ConfigError, match=r"^--tenant-config: default\.weight is -1"):
        Tenancy(config.build_config({"tenant_config": '{"default": {"weight": -1}}'}))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        Tenancy(config.build_config({"tenant_config": str(tmp_path / "missing.json")}))


def test_bad_flags_name_themselves() -> None:
    with pytest.raises(ConfigError) as caught:
        config.build_config(
            {
                "priority_classes": "a:0,a b:1", "cached_token_weight": 2.0, "prompt_token_weight": 0.0,
                "output_token_weight": -1.0, "max_idle_tenants": 0,
            }
        )  # fmt: skip
    flags = [line.split()[0] for line in caught.value.message.splitlines()]
    assert flags == [
        "--prompt-token-weight", "--output-token-weight", "--cached-token-weight", "--max-idle-tenants",
        "--priority-classes", "--priority-classes",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="--disable-class-charge-decode: there are no classes"):
        config.build_config({"disable_class_charge_decode": True})


def test_tenant_is_the_field_else_the_header_else_the_key_else_default(tmp_path: Path) -> None:
    t = tenancy(tmp_path, {})
    headers = {"x-tenant-id": "from-header", "authorization": "Bearer secret"}
    assert placed(t, {"tenant": "from-field"}, headers).tenant == "from-field"
    assert placed(t, {}, headers).tenant == "from-header"
    by_key = placed(t, {}, {"authorization": "bearer  secret "}).tenant
    assert by_key == placed(t, {}, {"authorization": "Bearer secret"}).tenant
    assert by_key != placed(t, {}, {"authorization": "Bearer other"}).tenant
    assert "secret" not in by_key
    assert (
        placed(t, {}).tenant
        == placed(t, {"tenant": None}, {"authorization": "Basic x"}).tenant
        == "default"
    )


def test_bad_names_are_refused_with_field_or_header(tmp_path: Path) -> None:
    t = tenancy(tmp_path, {}, priority_classes="a:2,b:1")
    for body, headers, param in (
        ({"tenant": 'a"b'}, {}, "tenant"),
        ({"tenant": ""}, {}, "tenant"),
        ({"tenant": 5}, {}, "tenant"),
        ({}, {"x-tenant-id": "a b"}, "x-tenant-id"),
        ({"priority_class": "gold"}, {}, "priority_class"),
        ({"service_tier": "gold"}, {}, "service_tier"),
        ({"service_tier": ["gold"]}, {}, "service_tier"),
        ({"priority_class": {}}, {}, "priority_class"),
        ({"priority_class": "a", "service_tier": "gold"}, {}, "service_tier"),
    ):
        with pytest.raises(BadRequest) as caught:
            placed(t, body, headers)
        assert caught.value.param == param


def test_class_is_the_field_else_the_tier_else_the_tenants_else_by_priority(
    tmp_path: Path,
) -> None:
    tenants = {"tenants": {"low": {"priority_class": "b"}, "lowest": {"priority_class": "c"}}}
    t = tenancy(tmp_path, tenants, priority_classes="a:4:10,b:2:0,c:1:-10")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"priority_class": "a", "service_tier": "flex"}, "a"),
        ({"service_tier": "priority"}, "a"),
        ({"service_tier": "flex", "priority": 99}, "c"),
        ({"priority": 10}, "a"),
        ({"priority": -99}, "c"),
        ({}, "b"),
        ({"tenant": "low"}, "b"),
        ({"tenant": "low", "priority": 99}, "b"),
        ({"tenant": "low", "priority_class": "a"}, "b"),
        ({"tenant": "low", "priority_class": "c"}, "c"),
        ({"tenant": "lowest"}, "c"),
        ({"tenant": "lowest", "service_tier": "priority"}, "c"),
    ]
    for body, name in cases:
        assert placed(t, body).priority_class == name, body


def test_priorities_are_clamped_before_they_choose_a_class(tmp_path: Path) -> None:
    tenants = {"default": {"min_priority": -5, "max_priority": 5}}
    t = tenancy(tmp_path, tenants, priority_classes="a:4:10,b:2:0,c:1:-10")
    assert placed(t, {"priority": 99}) == Placed(5, "b", "default")
    assert placed(t, {}) == Placed(-5, "c", "default"), "none is the least important of the range"


def test_without_the_flags_nothing_is_read_and_nothing_changes() -> None:
    t = Tenancy(config.EngineConfig())
    body = {"tenant": 'a"b', "priority_class": 7, "service_tier": "gold", "priority": 3}
    assert t.read(read(RequestFields, body)) == ("", "")
    assert t.unused_fields == ("priority_class", "tenant")
    assert placed(t, body, {"x-tenant-id": "a b"}) == Placed(3)
    t.admit("", 10**9, 0.0)
    t.spend("", 10**9, 0.0)


def test_fields_are_unused_without_their_own_flag(tmp_path: Path) -> None:
    with_tenants = tenancy(tmp_path, {})
    with_classes = tenancy(tmp_path, priority_classes="a:1")
    assert with_tenants.unused_fields == ("priority_class",)
    assert with_classes.unused_fields == ("tenant",)
    assert tenancy(tmp_path, {}, priority_classes="a:1").unused_fields == ()
    assert with_tenants.read(read(RequestFields, {})) == ("", "")


def test_used_up_minute_is_429_with_the_seconds_to_wait(tmp_path: Path) -> None:
    t = tenancy(tmp_path, {"tenants": {"t": {"tokens_per_minute": 600}}})
    t.admit("t", 500, 0.0)
    t.spend("t", 90, 0.0)
    t.admit("other", 10**6, 0.0)
    with pytest.raises(
        RateLimited, match=r"tenant 't' may use 600 tokens per minute and this request brings 25"
    ) as got:
        t.admit("t", 25, 0.0)
    assert (got.value.status, got.value.code, got.value.param) == (
        429,
        "rate_limit_exceeded",
        "tenant",
    )
    assert got.value.retry_after_secs == 2, "15 tokens at 10 per second"
    t.admit("t", 25, 2.0)
