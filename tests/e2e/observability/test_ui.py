"""The router's web page in a real browser, before a real cluster and before a worker that writes HTML."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.request
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.support.processes.axe import axe_source, violations
from tests.support.processes.browser import Browser, Page, chromium
from tests.support.processes.cluster import Cluster, eventually, family, get, metric
from tests.support.processes.router import Router

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        chromium() is None, reason="no Chromium is installed (Debian: apt-get install chromium)"
    ),
]

QUESTION = "How do KV pages get from P to D?"
ANSWERED = "document.querySelector('.message[data-state=ended]')"
LONG = 600
"""Tokens of an answer that is long enough to lose its worker in the middle."""
HTML = "<img src=x onerror=\"alert('injected')\"><script>alert('injected')</script> & <b>bold</b>"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster.up("--prefill", "1", "--decode", "2") as cluster:
        yield cluster


def in_browser(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scene, 240))


@contextlib.contextmanager
def suspended(pid: int) -> Iterator[None]:
    """The process and its children stand still meanwhile."""
    processes = family(pid)
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


async def ask(page: Page, text: str, max_tokens: int = 24, *, ignore_eos: bool = False) -> None:
    """Write a message in the chat view and send it, by keyboard."""
    await page.evaluate(f"document.querySelector('#max_tokens').value = '{max_tokens}'")
    await page.evaluate(
        f"document.querySelector('#ignore_eos').checked = {str(ignore_eos).lower()}"
    )
    await page.evaluate("document.querySelector('#message').focus()")
    await page.write(text)
    await page.press("Enter")


async def chat_page(browser: Browser, url: str, **size: Any) -> Page:
    page = await browser.open(f"{url}/ui/chat.html", **size)
    await page.until("document.querySelector('#model option')")
    return page


LAST_TEXT = "[...document.querySelectorAll('.message.assistant .text')].at(-1).textContent"


def whole_answer(url: str, text: str, max_tokens: int) -> str:
    """The undisturbed answer, from the API."""
    body = {
        "model": "demo", "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": max_tokens,
        "ignore_eos": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        content: str = json.load(answer)["choices"][0]["message"]["content"]
    return content


def test_answer_has_a_bar_of_its_stages_and_the_reasons_for_its_workers(cluster: Cluster) -> None:
    async def scene() -> None:
        async with Browser.start() as browser:
            page = await chat_page(browser, cluster.url)
            await ask(page, QUESTION)
            await page.until(ANSWERED)
            stages = await page.evaluate(
                "[...document.querySelectorAll('.legend li')].map((li) => li.dataset.stage)"
            )
            assert stages[0] == "queue"
            assert {"queue", "prefill", "decode"} <= set(stages), (
                "a transfer may end with the prefill"
            )
            legend = await page.evaluate("document.querySelector('.legend').textContent")
            p, decodes = (
                cluster.node("prefill")["url"],
                [cluster.node("decode", i)["url"] for i in (0, 1)],
            )
            assert p.removeprefix("http://") in legend
            assert any(url.removeprefix("http://") in legend for url in decodes)
            facts = await page.evaluate("document.querySelector('.facts-line').textContent")
            assert "prompt tokens" in facts
            assert "cached" in facts
            # The reasons name every candidate.
            await page.evaluate("document.querySelector('.why').open = true")
            reasons = await page.evaluate("document.querySelector('.why').textContent")
            assert all(url.removeprefix("http://") in reasons for url in [p, *decodes])
            assert "chosen" in reasons
            # Its timeline in the request view.
            await page.evaluate("document.querySelector('.facts-line a').click()")
            timeline = await page.until("document.querySelector('.timeline')?.textContent")
            assert "/v1/chat/completions" in timeline
            page.assert_clean(cluster.url)

    in_browser(scene())


def test_chat_with_a_tool_folds_reasoning_shows_the_call_and_takes_its_result(
    cluster: Cluster,
) -> None:
    weather = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }

    async def scene() -> None:
        async with Browser.start() as browser:
            page = await chat_page(browser, cluster.url)
            tools = json.dumps(json.dumps([weather]))
            await page.evaluate(f"document.querySelector('#tools').value = {tools}")
            await ask(page, "What is the weather in Paris?", 200)
            await page.until(ANSWERED)
            reasoning = "document.querySelector('details.reasoning')"
            assert await page.evaluate(f"{reasoning}.open") is False
            assert "Paris" in await page.evaluate(f"{reasoning}.textContent")
            call = await page.evaluate("document.querySelector('.call').textContent")
            assert "get_weather" in call
            assert "Paris" in call
            await page.write('{"temperature_c": 18, "sky": "cloudy"}')
            await page.press("Enter")
            await page.until("document.querySelectorAll('.message[data-state=ended]').length === 2")
            assert await page.evaluate(LAST_TEXT)
            who = "[...document.querySelectorAll('.who')].map((title) => title.textContent)"
            assert await page.evaluate(who) == ["You", "Answer", "Result", "Answer"]
            page.assert_clean(cluster.url)

    in_browser(scene())


def test_killed_decode_node_shows_as_failover_and_the_text_is_that_of_an_undisturbed_answer(
    cluster: Cluster,
) -> None:
    undisturbed = whole_answer(cluster.url, QUESTION, LONG)

    def busy_decodes() -> list[int]:
        loads = cluster.loads()
        return [i for i in (0, 1) if loads[cluster.node("decode", i)["url"]] > 0]

    async def scene() -> None:
        async with Browser.start() as browser:
            page = await chat_page(browser, cluster.url)
            await ask(page, QUESTION, LONG, ignore_eos=True)
            # Found first: on a busy machine the page may show the text when little of the answer is left.
            [busy] = await asyncio.to_thread(
                eventually, "a decode node has the request", busy_decodes
            )
            await page.until(f"{LAST_TEXT}.length > 40")
            # The bar of a running answer is drawn while its text comes, by the router's timeline.
            await page.until(
                "document.querySelector('.message[aria-busy] .legend [data-stage=decode]')"
                "?.textContent.includes(' on ')"
            )
            cluster.kill("decode", busy)
            await page.until(ANSWERED, secs=120)
            assert await page.evaluate(LAST_TEXT) == undisturbed
            legend = await page.until(
                "document.querySelector('.legend li[data-stage=failover]')?.textContent"
            )
            assert "Failover after" in legend
            assert await page.evaluate("document.querySelectorAll('.bar .mark').length") == 1
            page.assert_clean(cluster.url)
            # The cluster view tells of it, with a link to the request, and of the node that is back.
            await page.go(f"{cluster.url}/ui/")
            await page.until("document.querySelector('#events .badge.failover')")
            await page.evaluate("document.querySelector('#events a').click()")
            timeline = await page.until("document.querySelector('.timeline')?.textContent")
            assert "the answer was resumed after" in timeline
            await asyncio.to_thread(cluster.await_restart, "decode", busy)
            await page.until("document.querySelectorAll('.node[data-state=ready]').length === 3")
            page.assert_clean(cluster.url)

    in_browser(scene())


def test_cluster_view_shows_nodes_pairs_and_requests(cluster: Cluster) -> None:
    for _ in range(3):
        cluster.complete("Baton is " * 20, max_tokens=2)

    async def scene() -> None:
        async with Browser.start() as browser:
            page = await browser.open(f"{cluster.url}/ui/")
            await page.until("document.querySelectorAll('.node[data-state=ready]').length === 3")
            roles = await page.evaluate(
                "[...document.querySelectorAll('.node')].map((n) => n.dataset.role).sort()"
            )
            assert roles == ["decode", "decode", "prefill"]
            await page.until(
                "[...document.querySelectorAll('.kv')].every((kv) => /% of/.test(kv.textContent))"
            )
            matrix = await page.until("document.querySelector('.matrix')?.textContent")
            assert any(name in matrix for name in ("shm", "tcp", "no pull yet")), matrix
            await page.until("document.querySelector('#requests a')")
            page.assert_clean(cluster.url)

    in_browser(scene())


def test_feed_stops_while_the_tab_is_hidden(cluster: Cluster) -> None:
    def listening() -> float:
        return metric(cluster.url, "baton_router_feed_clients")

    async def scene() -> None:
        async with Browser.start() as browser:
            page = await browser.open(f"{cluster.url}/ui/")
            await page.until("document.querySelector('.live.on')")
            assert listening() == 1
            other = await browser.open(f"{cluster.url}/ui/chat.html")
            await browser.send("Target.activateTarget", targetId=other.target)
            if not await page.evaluate(
                "document.hidden"
            ):  # a headless tab that is covered counts as visible
                await page.evaluate(
                    "Object.defineProperty(document, 'hidden', {value: true, configurable: true})"
                )
                await page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
            await asyncio.to_thread(eventually, "no page listens", lambda: listening() == 0, 30)
            assert await page.evaluate("document.querySelector('#live').textContent") == "paused"
            await browser.send("Target.activateTarget", targetId=page.target)
            await page.evaluate(
                "delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))"
            )
            await asyncio.to_thread(
                eventually, "the page listens again", lambda: listening() == 1, 30
            )
            page.assert_clean(cluster.url)

    in_browser(scene())


def test_everything_is_reached_by_keyboard(cluster: Cluster) -> None:
    async def scene() -> None:
        async with Browser.start() as browser:
            page = await chat_page(browser, cluster.url)
            await page.tab_to("#temperature")
            await page.evaluate("document.querySelector('#parameters-box').scrollIntoView()")
            await page.evaluate("document.activeElement.blur()")
            await page.tab_to("#message")
            await page.write("What is a page?")
            await page.press("Tab")
            await page.tab_to("#why")
            await page.press("Enter")
            await page.until("document.activeElement.id === 'dry-run-title'")
            assert "Policy" in await page.evaluate("document.querySelector('#dry-run').textContent")
            await page.tab_to("#dry-run-close")
            await page.press("Enter")
            await page.until("document.activeElement.id === 'why'")
            await page.tab_to("#send")
            await page.press("Enter")
            await page.until(ANSWERED)
            # Stop ends an answer.
            with suspended(cluster.node("prefill")["pid"]):  # no answer ends by itself
                await ask(page, QUESTION, LONG, ignore_eos=True)
                await page.until("document.querySelector('#stop:not([hidden])')")
                await page.tab_to("#stop")
                await page.press("Enter")
                await page.until(
                    "[...document.querySelectorAll('.outcome')].at(-1).textContent === 'Stopped.'"
                )
            await asyncio.to_thread(
                eventually, "all workers are ready", lambda: len(cluster.ready()) == 3
            )

            await page.go(f"{cluster.url}/ui/")
            await page.until("document.querySelectorAll('.node').length === 3")
            await page.tab_to(".node button")
            await page.press("Enter")
            await page.until("document.querySelector('#confirm').open")
            await page.press("Escape")
            await page.until("!document.querySelector('#confirm').open")
            assert len(cluster.ready()) == 3, "Escape drains nothing"
            await page.tab_to("#requests a")
            await page.press("Enter")
            await page.until("document.querySelector('.timeline')")
            await page.tab_to("#request-close")
            await page.press("Enter")
            await page.until("document.querySelector('#request').hidden")
            # Each control has a name for screen readers.
            tree = (await page.send("Accessibility.getFullAXTree"))["nodes"]
            roles = {
                "button",
                "textbox",
                "link",
                "combobox",
                "spinbutton",
                "checkbox",
                "meter",
                "region",
            }
            unnamed = [
                node["role"]["value"]
                for node in tree
                if not node.get("ignored")
                and node["role"]["value"] in roles
                and not node.get("name", {}).get("value")
            ]
            assert unnamed == []
            page.assert_clean(cluster.url)

    in_browser(scene())


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("is_dark", [False, True])
def test_pages_fit_their_width(cluster: Cluster, tmp_path: Path, width: int, is_dark: bool) -> None:
    """The screenshots stay in pytest's folder for a person to look at."""
    cluster.complete("Baton is " * 20, max_tokens=2)
    fits = "document.documentElement.scrollWidth <= innerWidth"
    # Only tables may be wider than the page, and they scroll in a box of their own.
    cut = """[...document.querySelectorAll('main *')].filter((element) => {
        const box = element.getBoundingClientRect();
        const isShown = box.width > 1 && !element.closest('.scroll, .hidden, svg');
        return isShown && (box.right > innerWidth + 1 || box.left < -1 || element.scrollWidth > element.clientWidth + 1
            && getComputedStyle(element).overflowX === 'hidden');
    }).map((element) => element.outerHTML.slice(0, 120))"""

    async def scene() -> None:
        async with Browser.start() as browser:
            page = await browser.open(f"{cluster.url}/ui/", width=width, is_dark=is_dark)
            await page.until("document.querySelector('#requests a')")
            await page.screenshot(tmp_path / "cluster.png")
            assert await page.evaluate(fits)
            assert await page.evaluate(cut) == []
            await page.evaluate("document.querySelector('#requests a').click()")
            await page.until("document.querySelector('.timeline')")
            await page.screenshot(tmp_path / "request.png")
            assert await page.evaluate(fits)
            assert await page.evaluate(cut) == []
            page.assert_clean(cluster.url)
            page = await chat_page(browser, cluster.url, width=width, is_dark=is_dark)
            await ask(page, QUESTION)
            await page.until(ANSWERED)
            await page.evaluate("document.querySelector('.why').open = true")
            await page.evaluate("document.querySelector('#why').click()")
            await page.until("document.querySelector('#dry-run .explanation')")
            await page.screenshot(tmp_path / "chat.png")
            assert await page.evaluate(fits)
            assert await page.evaluate(cut) == []
            # The decision begins with a sentence; the values come below.
            said = await page.evaluate(
                "document.querySelector('#dry-run .explanation p').textContent"
            )
            assert "Prefill: " in said
            assert " is the only candidate." in said
            background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
            lightness = sum(
                int(part) for part in background.removeprefix("rgb(").removesuffix(")").split(",")
            )
            assert (lightness < 3 * 128) == is_dark, background
            page.assert_clean(cluster.url)

    in_browser(scene())
    assert all(
        (tmp_path / f"{name}.png").stat().st_size > 10_000
        for name in ("cluster", "request", "chat")
    )


def test_hung_router_shows_stale_numbers_and_recovers(cluster: Cluster) -> None:
    async def scene() -> None:
        async with Browser.start() as browser:
            page = await browser.open(f"{cluster.url}/ui/")
            await page.until("document.querySelector('.live.on')")
            live = "document.querySelector('#live').textContent"
            is_stale = "document.body.classList.contains('stale')"
            assert not await page.evaluate(is_stale)
            with suspended(cluster.state["router"]["pid"]):
                await page.until(f"{live}.startsWith('stale since ')")
                assert await page.evaluate(is_stale)
            await page.until(f"{live} === 'live'")
            assert not await page.evaluate(is_stale)
            await page.until("document.querySelectorAll('.node[data-state=ready]').length === 3")

    in_browser(scene())


def test_drain_of_the_last_node_of_a_role_is_warned_of(cluster: Cluster) -> None:
    async def scene() -> None:
        async with Browser.start() as browser:
            page = await browser.open(f"{cluster.url}/ui/")
            await page.until("document.querySelectorAll('.node[data-state=ready]').length === 3")
            for role, warned in (("prefill", True), ("decode", False)):
                await page.evaluate(
                    f"document.querySelector('.node[data-role={role}] button').click()"
                )
                await page.until("document.querySelector('#confirm').open")
                warning = await page.evaluate(
                    "document.querySelector('#confirm-warning:not([hidden])')?.textContent ?? ''"
                )
                assert ("the last ready prefill node" in warning) == warned, warning
                await page.press("Escape")
                await page.until("!document.querySelector('#confirm').open")
            assert len(cluster.ready()) == 3
            page.assert_clean(cluster.url)

    in_browser(scene())


def test_charts_filters_and_theme(cluster: Cluster) -> None:
    cluster.complete("Baton is " * 20, max_tokens=2)
    status, answer = cluster.post(
        "/v1/completions", {"model": "demo", "prompt": "x", "max_tokens": -1}
    )
    assert status == 400, answer
    rows = "[...document.querySelectorAll('#requests .badge')].map((badge) => badge.textContent)"
    background = "getComputedStyle(document.body).backgroundColor"

    async def scene() -> None:
        async with Browser.start() as browser:
            page = await browser.open(f"{cluster.url}/ui/")
            drawn = "document.querySelector('[data-chart={}] path[d^=M]')"
            for chart in ("requests", "errors", "ttft", "tokens", "kv"):
                await page.until(drawn.format(chart))
            spoken = await page.evaluate(
                "document.querySelector('[data-chart=ttft] svg').getAttribute('aria-label')"
            )
            assert spoken.startswith("TTFT: p50 now ")
            await page.evaluate("document.querySelector('[value=failed_requests]').click()")
            await page.until(f"{rows}.length > 0")
            assert "ok" not in await page.evaluate(rows)
            await page.evaluate("document.querySelector('[value=slow_requests]').click()")
            await page.until(f"{rows}.includes('ok')")
            # The theme chosen here is kept, on both pages; the system's is light.
            light = await page.evaluate(background)
            choose = (
                "document.querySelector('#theme').value = '{0}';"
                "document.querySelector('#theme').dispatchEvent(new Event('change'))"
            )
            await page.evaluate(choose.format("dark"))
            dark = await page.evaluate(background)
            assert dark != light
            await page.go(f"{cluster.url}/ui/chat.html")
            assert await page.evaluate(background) == dark
            await page.until("document.querySelector('#theme').value === 'dark'")
            await page.evaluate(choose.format("system"))
            assert await page.evaluate(background) == light
            assert await page.evaluate("Object.keys(localStorage)") == []
            page.assert_clean(cluster.url)

    in_browser(scene())


NODES = """(() => {
    const nodeOf = (id, url, state, load, used) => ({
        id, url, role: 'decode', state, reason: null, circuit: 'closed', load, model: null, version: null,
        ranks: [{rank: null, load, report: {age_ms: 1, queued_tokens: 100 * load, queued_requests: load,
            kv_pages: 2048, kv_pages_used: used}}],
    });
    return {nodes_left_out: 0, nodes: [
        nodeOf('1', 'http://h:1', 'ready', 1, 2000), nodeOf('2', 'http://h:2', 'draining', 3, 10),
        nodeOf('3', 'http://h:10', 'ready', 2, 500)]};
})()"""
"""Snapshot of three nodes."""


def cards_sorted_by(order: str) -> str:
    return f"""import('./nodes.js').then((nodes) => {{
        document.querySelector('#sort').value = '{order}';
        nodes.showNodes({NODES});
        return [...document.querySelectorAll('.node')].map((node) => node.innerText);
    }})"""


def test_nodes_are_sorted_and_labeled() -> None:
    async def scene() -> None:
        async with Browser.start() as browser:
            with contextlib.ExitStack() as stack:
                url = await asyncio.to_thread(stack.enter_context, Router.up())
                page = await browser.open(f"{url}/ui/")
                orders = {
                    "address": [1, 2, 10], "load": [2, 10, 1], "queue": [2, 10, 1], "kv": [1, 10, 2],
                    "state": [2, 1, 10],
                }  # fmt: skip
                for order, ports in orders.items():
                    # One evaluation: no snapshot of the router itself, which has no node, comes in between.
                    cards = await page.evaluate(cards_sorted_by(order))
                    assert [int(card.split("\n")[0].removeprefix("h:")) for card in cards] == ports
                draining = cards[0]
                assert "0.5 % of 2,048 pages" in draining
                assert "3 requests" in draining
                assert "300 tokens" in draining
                assert "Undrain" in draining
                page.assert_clean(url)

    in_browser(scene())


LEG = {"attempt": 1, "outcome": "ok", "why": "only", "chosen_ms": 1, "usage": None}
HANDOVER = {
    "state": "ended", "failed_attempts": [], "timeline": {"ended_ms": 200},
    "legs": [
        LEG | {"role": "prefill", "worker": "http://p", "sent_ms": 2, "first_token_ms": 40, "ended_ms": 41,
               "stages": {"queue_ms": 3}},
        LEG | {"role": "decode", "worker": "http://d", "sent_ms": 2, "first_token_ms": 100, "ended_ms": 200,
               "stages": {"queue_ms": 68, "pull": {"transport": "shm", "pages": 1, "bytes": 66_000, "pull_ms": 2}}},
    ],
}  # fmt: skip
"""Record of a request: P is done at 40 ms, D had room for it at 70 ms, and its first event came at 100 ms."""


def test_handover_shows_pull_apart_from_waiting() -> None:
    early = json.loads(json.dumps(HANDOVER))
    early["legs"][1]["first_token_ms"] = 40
    early["legs"][1]["stages"]["queue_ms"] = 5
    bar = (
        "import('./timeline.js').then((timeline) => [...timeline.stageBar({}).querySelectorAll('li')]"
        ".map((item) => item.textContent))"
    )

    async def scene() -> None:
        async with Browser.start() as browser:
            with contextlib.ExitStack() as stack:
                url = await asyncio.to_thread(stack.enter_context, Router.up())
                page = await browser.open(f"{url}/ui/")
                assert await page.evaluate(bar.format(json.dumps(HANDOVER))) == [
                    "Queue 5.0 ms",
                    "Prefill 35 ms on p",
                    "Handover 60 ms on d: queue on D 30 ms, pull 2.0 ms (shm, 66 kB), then first event 28 ms",
                    "Decode 100 ms on d",
                ]
                # A handover that took no time of its own is shown too.
                assert await page.evaluate(bar.format(json.dumps(early))) == [
                    "Queue 5.0 ms",
                    "Prefill 35 ms on p",
                    "Handover 0 ms on d: pull 2.0 ms (shm, 66 kB, 2.0 ms of it during the prefill)",
                    "Decode 160 ms on d",
                ]
                page.assert_clean(url)

    in_browser(scene())


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("is_dark", [False, True])
def test_axe_finds_no_violation(cluster: Cluster, width: int, is_dark: bool) -> None:
    source = axe_source()
    if source is None:
        pytest.skip("axe-core cannot be fetched with npm")
    cluster.complete("Baton is " * 20, max_tokens=2)

    async def scene() -> None:
        async with Browser.start() as browser:
            page = await browser.open(f"{cluster.url}/ui/", width=width, is_dark=is_dark)
            await page.until("document.querySelector('[data-chart=requests]')")
            await page.evaluate("document.querySelector('#requests a').click()")
            await page.until("document.querySelector('.timeline')")
            assert await violations(page, source) == []
            page = await chat_page(browser, cluster.url, width=width, is_dark=is_dark)
            await ask(page, QUESTION)
            await page.until(ANSWERED)
            await page.evaluate("document.querySelector('.why').open = true")
            await page.evaluate("document.querySelector('#why').click()")
            await page.until("document.querySelector('#dry-run .explanation')")
            assert await violations(page, source) == []

    in_browser(scene())


@contextlib.asynccontextmanager
async def writer_of_html() -> AsyncIterator[str]:
    """A worker of the OpenAI API whose name, model and answers are HTML."""

    async def chat(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        delta: dict[str, Any] = {
            "index": 0,
            "delta": {"role": "assistant", "content": HTML},
            "finish_reason": None,
        }
        for choice in (delta, {"index": 0, "delta": {}, "finish_reason": "stop"}):
            await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def well(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def info(request: web.Request) -> web.Response:
        return web.json_response({"served_model_name": HTML, "version": HTML})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": HTML, "object": "model"}]})

    app = web.Application()
    app.add_routes([
        web.post("/v1/chat/completions", chat), web.get("/health", well), web.get("/get_server_info", info),
        web.get("/v1/models", models),
    ])  # fmt: skip
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def ready(url: str) -> bool:
    return get(f"{url}/readyz") is not None


def test_html_of_a_model_is_shown_as_text() -> None:
    async def scene() -> None:
        async with writer_of_html() as worker, Browser.start() as browser:
            with contextlib.ExitStack() as stack:
                url = await asyncio.to_thread(
                    stack.enter_context, Router.up("--worker-urls", worker)
                )
                await asyncio.to_thread(eventually, "the worker is ready", lambda: ready(url), 30)
                page = await chat_page(browser, url)
                await ask(page, HTML)
                await page.until(ANSWERED)
                assert await page.evaluate(LAST_TEXT) == HTML
                asked = "document.querySelector('.message.user .text').textContent"
                assert await page.evaluate(asked) == HTML
                assert (
                    await page.evaluate(
                        "document.querySelectorAll('main img, main script, main b b').length"
                    )
                    == 0
                )
                await page.go(f"{url}/ui/")
                await page.until(
                    "document.querySelector('.node .panel-foot')?.textContent.includes('onerror')"
                )
                assert (
                    await page.evaluate("document.querySelectorAll('main img, main script').length")
                    == 0
                )
                page.assert_clean(url)

    in_browser(scene())


def test_keys_are_asked_for_and_open_what_they_are_for() -> None:
    async def scene() -> None:
        async with writer_of_html() as worker, Browser.start() as browser:
            keys = (
                "--api-key",
                "chat-key",
                "--control-plane-api-keys",
                "ops:Operations:admin:fleet-key",
            )
            with contextlib.ExitStack() as stack:
                url = await asyncio.to_thread(
                    stack.enter_context, Router.up("--worker-urls", worker, *keys)
                )
                await asyncio.to_thread(eventually, "the worker is ready", lambda: ready(url), 30)
                page = await browser.open(f"{url}/ui/")
                # Without a key nothing is shown, and the form opens.
                await page.until("document.querySelector('#keys[open] #control-key')")
                assert await page.evaluate("document.querySelectorAll('.node').length") == 0
                await page.tab_to("#api-key")
                await page.write("chat-key")
                await page.tab_to("#control-key")
                await page.write("fleet-key")
                await page.press("Enter")
                await page.until("document.querySelectorAll('.node').length === 1")
                assert await page.evaluate("Object.keys(localStorage).length") == 0
                await page.go(f"{url}/ui/chat.html")
                await page.until("document.querySelector('#model option')")
                await ask(page, "hi")
                await page.until(ANSWERED)
                facts = await page.evaluate("document.querySelector('.facts-line').textContent")
                assert "control-plane key" not in facts
                # The link of `baton up` brings the key, which then stands in no address.
                linked = await browser.open(f"{url}/ui/#control-key=fleet-key")
                await linked.until("document.querySelectorAll('.node').length === 1")
                assert await linked.evaluate("location.href") == f"{url}/ui/"
                # Without the key of the fleet chat works, and says what is missing.
                await page.evaluate("sessionStorage.removeItem('baton.control_key')")
                await ask(page, "hi")
                await page.until(
                    "document.querySelectorAll('.message[data-state=ended]').length === 2"
                )
                facts = await page.evaluate(
                    "[...document.querySelectorAll('.facts-line')].at(-1).textContent"
                )
                assert "stages need the control-plane key" in facts
                # With it again the worker is drained: by this router, since it knows no drain of its own.
                await page.evaluate("sessionStorage.setItem('baton.control_key', 'fleet-key')")
                await page.go(f"{url}/ui/")
                await page.until("document.querySelector('.node[data-state=ready]')")
                await page.tab_to(".node button")
                await page.press("Enter")
                await page.until("document.querySelector('#confirm').open")
                await page.tab_to("#confirm-yes")
                await page.press("Enter")
                await page.until("document.querySelectorAll('.node').length === 0")
                await page.until("document.querySelector('#events .badge.removed')")
                # Chromium logs each refused request; nothing else may be wrong.
                page.complaints = [text for text in page.complaints if "status of 401" not in text]
                page.assert_clean(url)

    in_browser(scene())
