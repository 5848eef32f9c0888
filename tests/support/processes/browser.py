"""Chromium without a window, driven through its DevTools protocol (flat sessions over one WebSocket).

    async with Browser.start() as browser:
        page = await browser.open(f"{url}/ui/", width=1280)
        await page.until("document.querySelector('.node')")
        page.assert_clean()

A page records every request, console error, exception and policy report, so that a test can say that there were none.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

TIMEOUT_SECS = 60.0
POLL_SECS = 0.05
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "Space": 32}
"""Keys a test presses, with their virtual key codes."""
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-default-apps",
    "--password-store=basic", "--remote-debugging-port=0",
)  # fmt: skip


def chromium() -> str | None:
    """Path of an installed Chromium or Chrome."""
    found = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
    return next((path for path in found if path), None)


class Browser:
    """A Chromium process with a profile of its own. Use `start`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse[Any]) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}

    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls) -> AsyncIterator[Browser]:
        path = chromium()
        assert path is not None, "no Chromium is installed"
        with tempfile.TemporaryDirectory(
            prefix="baton-chromium-", ignore_cleanup_errors=True
        ) as profile:
            command = [path, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
            log = Path(profile) / "chromium.log"
            with log.open("wb") as output:
                process = await asyncio.create_subprocess_exec(
                    *command, stdout=output, stderr=output
                )
            try:
                port, _, endpoint = (await _port_file(Path(profile), process, log)).partition("\n")
                async with (
                    aiohttp.ClientSession() as session,
                    session.ws_connect(
                        f"ws://127.0.0.1:{port}{endpoint.strip()}", max_msg_size=0
                    ) as socket,
                ):
                    browser = cls(socket)
                    reader = asyncio.create_task(browser._read())
                    try:
                        yield browser
                    finally:
                        reader.cancel()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    async def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params}
        await self._socket.send_json(
            message if session is None else message | {"sessionId": session}
        )
        return await asyncio.wait_for(answer, TIMEOUT_SECS)

    async def _read(self) -> None:
        async for raw in self._socket:
            message = raw.json()
            if (answer := self._answers.pop(message.get("id", 0), None)) is not None:
                if "error" in message:
                    answer.set_exception(AssertionError(f"DevTools: {message['error']}"))
                else:
                    answer.set_result(message["result"])
            elif (page := self._pages.get(message.get("sessionId", ""))) is not None:
                page.note(message["method"], message["params"])

    async def open(
        self, url: str, *, width: int = 1280, height: int = 900, is_dark: bool = False
    ) -> Page:
        """Open a tab of this size and wait until `url` is loaded."""
        target = (await self.send("Target.createTarget", url="about:blank"))["targetId"]
        session = (await self.send("Target.attachToTarget", targetId=target, flatten=True))[
            "sessionId"
        ]
        page = self._pages[session] = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Network", "Audits"):
            await page.send(f"{domain}.enable")
        await page.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        await page.send("Emulation.setEmulatedMedia", features=[scheme])
        await page.go(url)
        return page


async def _port_file(profile: Path, process: asyncio.subprocess.Process, log: Path) -> str:
    """Port and path of the DevTools socket, once Chromium has written them."""
    for _ in range(int(TIMEOUT_SECS / POLL_SECS)):
        with contextlib.suppress(FileNotFoundError):
            if "\n" in (text := (profile / "DevToolsActivePort").read_text()):
                return text
        assert process.returncode is None, (
            f"Chromium ended: {log.read_text(errors='replace')[-2000:]}"
        )
        await asyncio.sleep(POLL_SECS)
    raise AssertionError(
        f"Chromium opened no DevTools port: {log.read_text(errors='replace')[-2000:]}"
    )


class Page:
    """A tab."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser = browser
        self._session = session
        self.target = target
        self.requests: list[str] = []
        """URLs asked for, data: URLs included."""
        self.complaints: list[str] = []
        """Console errors, uncaught exceptions, failed loads, policy reports."""
        self.dialogs: list[str] = []
        """alert() and the like: what injected script would open."""

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        return await self._browser.send(method, self._session, **params)

    def note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(f"exception: {params['exceptionDetails']}")
        elif method == "Runtime.consoleAPICalled" and params["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.complaints.append(f"console: {params['args']}")
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            entry = params["entry"]
            self.complaints.append(f"log: {entry['text']} {entry.get('url', '')}")
        elif (
            method == "Audits.issueAdded"
            and params["issue"]["code"] == "ContentSecurityPolicyIssue"
        ):
            self.complaints.append(f"policy: {params['issue']['details']}")
        elif method == "Page.javascriptDialogOpening":
            self.dialogs.append(params["message"])

    def assert_clean(self, origin: str) -> None:
        """No request left `origin`, no error was logged, no policy was violated, no dialog opened."""
        elsewhere = [url for url in self.requests if not url.startswith((f"{origin}/", "about:"))]
        assert (elsewhere, self.complaints, self.dialogs) == ([], [], [])

    async def go(self, url: str) -> None:
        await self.send("Page.navigate", url=url)
        await self.until(f"location.href.startsWith({url!r}) && document.readyState === 'complete'")

    async def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.send("Emulation.setDeviceMetricsOverride", **size)

    async def evaluate(self, script: str) -> Any:
        """Value of an expression in the page."""
        answer = await self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, script: str, secs: float = TIMEOUT_SECS) -> Any:
        """Evaluate again and again until the value is true, and return it; an element counts as true."""
        script = f"((value) => value instanceof Node || value)({script})"
        value = None
        for _ in range(int(secs / POLL_SECS)):
            if value := await self.evaluate(script):
                return value
            await asyncio.sleep(POLL_SECS)
        text = await self.evaluate("document.body.innerText")
        raise AssertionError(
            f"after {secs:g} s still {value!r}: {script}\ncomplaints: {self.complaints}\n{text}"
        )

    async def press(self, key: str, *, shift: bool = False) -> None:
        code = KEYS[key]
        text = {"Enter": "\r", "Space": " "}.get(key)
        params: dict[str, Any] = {
            "windowsVirtualKeyCode": code,
            "code": key,
            "modifiers": 8 if shift else 0,
        }
        params["key"] = " " if key == "Space" else key
        await self.send(
            "Input.dispatchKeyEvent", type="keyDown", **params, **({"text": text} if text else {})
        )
        await self.send("Input.dispatchKeyEvent", type="keyUp", **params)

    async def write(self, text: str) -> None:
        """Type into the element with the focus."""
        await self.send("Input.insertText", text=text)

    async def tab_to(self, selector: str, most: int = 80) -> None:
        """Press Tab until the focus is on an element that matches."""
        for _ in range(most):
            if await self.evaluate(f"document.activeElement?.matches({selector!r}) ?? false"):
                return
            await self.press("Tab")
        focus = await self.evaluate("document.activeElement?.outerHTML.slice(0, 200)")
        raise AssertionError(f"{most} times Tab did not reach {selector}; the focus is on {focus}")

    async def screenshot(self, path: Path) -> None:
        """The whole page as PNG."""
        shot = await self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))
