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

from tests.support.browser import Browser, Page, chromium
from tests.support.cluster import Cluster, eventually, family, get, metric
from tests.support.router import Router

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


def test_a_killed_decode_node_shows_as_failover_and_the_text_is_that_of_an_undisturbed_answer(
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
            cluster.kill("decode", busy)
            await page.until(ANSWERED, secs=120)
            assert await page.evaluate(LAST_TEXT) == undisturbed
            legend = await page.until(
                "document.querySelector('.legend li[data-stage=failover]')?.textContent"
            )
            assert "Failover after" in legend
            assert await page.evaluate("document.querySelectorAll('.bar .mark').length") == 1
            page.assert_clean(cluster.url)
            # The cluster view tells of it, and of the node that is back.
            await page.go(f"{cluster.url}/ui/")
            await page.until("document.querySelector('#events .badge.failover')")
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


def test_the_feed_stops_while_the_tab_is_hidden(cluster: Cluster) -> None:
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
            assert "policy" in await page.evaluate("document.querySelector('#dry-run').textContent")
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

    async def scene() -> None:
        async with Browser.start() as browser:
            page = await browser.open(f"{cluster.url}/ui/", width=width, is_dark=is_dark)
            await page.until("document.querySelector('#requests a')")
            await page.screenshot(tmp_path / "cluster.png")
            assert await page.evaluate(fits)
            await page.evaluate("document.querySelector('#requests a').click()")
            await page.until("document.querySelector('.timeline')")
            await page.screenshot(tmp_path / "request.png")
            assert await page.evaluate(fits)
            page.assert_clean(cluster.url)
            page = await chat_page(browser, cluster.url, width=width, is_dark=is_dark)
            await ask(page, QUESTION)
            await page.until(ANSWERED)
            await page.evaluate("document.querySelector('.why').open = true")
            await page.screenshot(tmp_path / "chat.png")
            assert await page.evaluate(fits)
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
