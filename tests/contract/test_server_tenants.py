"""Classes and tenants over HTTP: what reaches the (scripted) ranks, and the 400, 429 and 503 that clients see."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.processes.front import FakeEngine, end, fake_engine, model, spawn

TENANTS = {
    "tenants": {
        "acme": {"priority_class": "standard", "min_priority": 0, "max_priority": 5},
        "slow": {"tokens_per_minute": 60},
        "answers": {"tokens_per_minute": 40},
    }
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeEngine]:
    file = tmp_path_factory.mktemp("tenants") / "tenants.json"
    file.write_text(json.dumps(TENANTS))
    flags = ("--priority-classes", "interactive:8,standard:4,batch:1", "--tenant-config", str(file))
    with fake_engine("--model-path", model(), "--served-model-name", "tiny", *flags) as running:
        yield running


@pytest.fixture(scope="module")
def http(engine: FakeEngine) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=engine.url, timeout=20) as client:
        yield client


def ask(http: httpx.Client, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    return http.post(
        "/v1/completions", json={"prompt": [5] * 10, "max_tokens": 2} | body, headers=headers
    )


def seen(engine: FakeEngine) -> tuple[str, str, int | None]:
    last = engine.last_submit()
    return last["tenant"], last["priority_class"], last["priority"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi", "max_tokens": 2}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
        ),
        ("/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 2}}),
    ],
)
def test_fields_and_header_reach_the_rank(
    http: httpx.Client, engine: FakeEngine, path: str, body: Any
) -> None:
    r = http.post(path, json=body | {"priority_class": "batch", "tenant": "a@b"})
    assert r.status_code == 200
    assert "x-ignored-params" not in r.headers
    assert seen(engine) == ("a@b", "batch", None)
    assert (
        http.post(
            path, json=body | {"service_tier": "flex"}, headers={"X-Tenant-Id": "t9"}
        ).status_code
        == 200
    )
    assert seen(engine) == ("t9", "batch", None)


def test_tenants_class_caps_and_its_range_clamps(http: httpx.Client, engine: FakeEngine) -> None:
    assert ask(http, tenant="acme", priority_class="interactive", priority=99).status_code == 200
    assert seen(engine) == ("acme", "standard", 5)
    assert ask(http).status_code == 200
    assert seen(engine) == ("default", "standard", None)


@pytest.mark.parametrize(
    ("body", "headers", "param"),
    [
        ({"priority_class": "gold"}, {}, "priority_class"),
        ({"service_tier": "turbo"}, {}, "service_tier"),
        ({"tenant": "a b"}, {}, "tenant"),
        ({}, {"x-tenant-id": "a,b"}, "x-tenant-id"),
    ],
)
def test_unknown_names_are_400(
    http: httpx.Client, body: dict[str, Any], headers: dict[str, str], param: str
) -> None:
    r = ask(http, headers, **body)
    assert (r.status_code, r.json()["error"]["code"], r.json()["error"]["param"]) == (
        400,
        "invalid_value",
        param,
    )


def test_used_up_minute_is_429_with_retry_after_and_others_pass(http: httpx.Client) -> None:
    assert ask(http, {"x-tenant-id": "slow"}, prompt=[5] * 50).status_code == 200
    r = ask(http, {"x-tenant-id": "slow"}, prompt=[5] * 50)
    assert (r.status_code, r.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert r.json()["error"]["type"] == "overloaded_error"
    assert 1 <= int(r.headers["retry-after"]) <= 42, (
        "at most 42 tokens are missing at one per second"
    )
    assert ask(http, {"x-tenant-id": "fast"}, prompt=[5] * 50).status_code == 200
    assert "baton_tenant_rate_limited_total 1.0" in http.get("/metrics").text


def test_generated_tokens_count_and_a_refused_prompt_does_not(http: httpx.Client) -> None:
    tenant = {"x-tenant-id": "answers"}
    for _ in range(3):
        salt = json.dumps({"error": ["queue_full", "full"]})
        assert ask(http, tenant, prompt=[5] * 40, cache_salt=salt).status_code == 503
    assert ask(http, tenant, prompt=[5] * 2, max_tokens=100, ignore_eos=True).status_code == 200
    assert ask(http, tenant, prompt=[5] * 1).status_code == 429, "the answer overdrew the bucket"


def test_without_the_flags_the_fields_are_ignored_and_say_so() -> None:
    with (
        fake_engine("--model-path", model()) as plain,
        httpx.Client(base_url=plain.url, timeout=20) as http,
    ):
        r = ask(
            http, {"x-tenant-id": "a b"}, tenant="a b", priority_class="gold", service_tier="turbo"
        )
        assert r.status_code == 200
        assert set(r.headers["x-ignored-params"].split(",")) == {"tenant", "priority_class"}
        assert seen(plain) == ("", "", None)


def test_bad_tenant_file_ends_the_start_with_2_and_all_its_mistakes(tmp_path: Path) -> None:
    file = tmp_path / "tenants.json"
    file.write_text('{"default": {"weight": 0}, "tenants": {"x": {"speed": 1}}}')
    engine = spawn("--model-path", model(), "--tenant-config", str(file))
    try:
        assert engine.process.wait(timeout=20) == 2
        assert "default.weight is 0" in engine.log
        assert "tenants.x.speed: unknown" in engine.log
    finally:
        end(engine)
