"""HTTP to routers and engines: answers with errors as data, and the clock of the other side."""

from __future__ import annotations

import email.utils
import http.client
import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

TIMEOUT_SECS = 10.0
AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """Answer of a host.

    With `status` 0 there was none and `problem` says why; otherwise `problem` is its error.
    """

    status: int
    text: str
    problem: str
    clock_offset_secs: float | None
    """Difference of the other side's clock, by its Date header.

    Up to half a second means nothing.
    """

    @property
    def is_ok(self) -> bool:
        return self.status == 200

    @property
    def object(self) -> dict[str, Any]:
        """The JSON object of the body; empty when it is something else."""
        try:
            value = json.loads(self.text)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


class StreamEnded(Exception):
    """A stream that did not begin, with the status of the refusal, or broke off: status 0."""

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status = status


class HttpClient:
    """Client for all hosts, without a proxy.

    `ca_file`: PEM file of authorities to trust besides the system's.
    """

    def __init__(self, ca_file: str | None = None) -> None:
        context = ssl.create_default_context()
        if ca_file is not None:
            context.load_verify_locations(ca_file)
        handlers = (urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
        self.opener = urllib.request.build_opener(*handlers)

    def get(self, url: str, key: str | None = None) -> HttpAnswer:
        return self._send_request(urllib.request.Request(url), key)

    def post(
        self, url: str, body: dict[str, Any], key: str | None = None, *, timeout_secs: float
    ) -> HttpAnswer:
        data = json.dumps(body).encode()
        return self._send_request(
            urllib.request.Request(url, data, {"content-type": "application/json"}),
            key,
            timeout_secs,
        )

    def lines(
        self,
        url: str,
        key: str | None = None,
        *,
        body: dict[str, Any] | None = None,
        timeout_secs: float = TIMEOUT_SECS,
    ) -> Generator[str, None, None]:
        """Lines of an answer that does not end, each when it comes.

        Raises StreamEnded when none comes for a while.

        With `body` it is the answer to a POST of this JSON. Closing the generator closes the
        connection.
        """
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["content-type"] = "application/json"
        request = urllib.request.Request(url, data, headers)
        try:
            with self.opener.open(request, timeout=timeout_secs) as response:
                for line in response:
                    yield line.decode(errors="replace").rstrip("\r\n")
        except urllib.error.HTTPError as err:
            with err:
                text = err.read().decode(errors="replace")
            raise StreamEnded(err.code, _error_message(text, err.code)) from err
        except (OSError, http.client.HTTPException) as err:
            raise StreamEnded(0, _describe_error(err)) from err
        raise StreamEnded(0, "the stream ended")

    def _send_request(
        self, request: urllib.request.Request, key: str | None, timeout_secs: float = TIMEOUT_SECS
    ) -> HttpAnswer:
        if key is not None:
            request.add_header("authorization", f"Bearer {key}")
        began = time.time()
        try:
            with self.opener.open(request, timeout=timeout_secs) as response:
                text = response.read().decode(errors="replace")
                return HttpAnswer(
                    response.status, text, "", _clock_offset(response.headers.get("date"), began)
                )
        except urllib.error.HTTPError as err:
            with err:
                text = err.read().decode(errors="replace")
            return HttpAnswer(
                err.code,
                text,
                _error_message(text, err.code),
                _clock_offset(err.headers.get("date"), began),
            )
        except (OSError, ValueError, http.client.HTTPException) as err:  # URLError is an OSError
            return HttpAnswer(0, "", _describe_error(err), None)


NO_HTTP = "its answer is no HTTP"


def connection_remedy(url: str, problem: str) -> str | None:
    """Advice for a URL whose scheme or certificate is at fault, by what went wrong; None: it is
    something else.
    """
    address = url.partition("://")[2]
    if "certificate" in problem:
        return "give the authority of its certificate with --ca-cert FILE, and a host that it names"
    if "ssl" in problem:
        return f"if it speaks plain HTTP, give http://{address}"
    if problem == NO_HTTP:
        return f"if it wants TLS, give https://{address}"
    return None


def _describe_error(err: Exception) -> str:
    is_cut = isinstance(err, http.client.RemoteDisconnected)
    if isinstance(err, http.client.BadStatusLine) and not is_cut:
        return NO_HTTP  # what it sent instead may be a TLS alert, which no terminal should get
    reason = getattr(err, "reason", err)
    return str(getattr(reason, "strerror", None) or str(reason) or type(err).__name__).lower()


def _clock_offset(date: str | None, began: float) -> float | None:
    """Difference of the clocks by a Date header.

    The header is cut to whole seconds, so its middle is compared with that of the exchange.
    """
    try:
        server_secs = email.utils.parsedate_to_datetime(date).timestamp()  # type: ignore[arg-type]
    except (TypeError, ValueError):  # no header, or another format
        return None
    return server_secs + 0.5 - (began + time.time()) / 2


def _error_message(text: str, status: int) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {status}" + (f": {text[:200]}" if text else "")


def in_parallel(work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(work, items))
