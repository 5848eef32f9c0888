"""Every error the engine raises on purpose: one class, one stable code, one HTTP status.

The same codes are used by the router and listed in docs/protocol.md; a test keeps the three in
step.
"""

from __future__ import annotations

from typing import ClassVar


def counted(count: int, noun: str) -> str:
    """A number with its noun, for messages: 1 request, 2 requests, 3 processes."""
    if count == 1:
        return f"1 {noun}"
    ending = "es" if noun.endswith("s") else "s"
    return f"{count} {noun}{ending}"


class EngineError(Exception):
    """Base of all deliberate errors.

    The message says what happened, with the numbers, and what to do next.
    """

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_secs: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_secs = retry_after_secs

    def body(self) -> dict[str, object]:
        """The OpenAI error object, exactly as it goes over the wire."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


class BadRequest(EngineError):
    code = "invalid_value"
    status = 400
    type = "invalid_request_error"


class InvalidJson(BadRequest):
    code = "invalid_json"


class MissingField(BadRequest):
    code = "missing_field"


class UnsupportedParameter(BadRequest):
    code = "unsupported_parameter"


class PromptTooLong(BadRequest):
    code = "context_length_exceeded"


class InvalidApiKey(EngineError):
    code = "invalid_api_key"
    status = 401
    type = "authentication_error"


class ForeignOrigin(EngineError):
    """A page of another site has a browser send the request."""

    code = "foreign_origin"
    status = 403
    type = "permission_error"


class HostNotAllowed(EngineError):
    """A server without keys is asked by a name that may be anyone's."""

    code = "host_not_allowed"
    status = 403
    type = "permission_error"


class ModelNotFound(EngineError):
    code = "model_not_found"
    status = 404
    type = "invalid_request_error"


class NotFound(EngineError):
    code = "not_found"
    status = 404
    type = "invalid_request_error"


class MethodNotAllowed(EngineError):
    code = "method_not_allowed"
    status = 405
    type = "invalid_request_error"


class DuplicateRoom(EngineError):
    code = "duplicate_room"
    status = 409
    type = "invalid_request_error"


class WrongState(EngineError):
    code = "wrong_state"
    status = 409
    type = "invalid_request_error"


class FingerprintMismatch(EngineError):
    """The request's token ids were made for another tokenizer or checkpoint than this engine's."""

    code = "fingerprint_mismatch"
    status = 409
    type = "invalid_request_error"


class PayloadTooLarge(EngineError):
    code = "payload_too_large"
    status = 413
    type = "invalid_request_error"


class UnsupportedMediaType(EngineError):
    code = "unsupported_media_type"
    status = 415
    type = "invalid_request_error"


class RateLimited(EngineError):
    """A tenant has used up its tokens of the minute, or a client its CPU time for slow grammars."""

    code = "rate_limit_exceeded"
    status = 429
    type = "overloaded_error"


class QueueFull(EngineError):
    code = "queue_full"
    status = 503
    type = "overloaded_error"


class TenantQueueFull(QueueFull):
    """A tenant's own limit: other nodes have room, but not for this tenant (a router does not try
    them).
    """

    code = "tenant_queue_full"
    status = 429


class QueueTimeout(EngineError):
    code = "queue_timeout"
    status = 503
    type = "overloaded_error"


class Draining(EngineError):
    code = "draining"
    status = 503
    type = "overloaded_error"


class NotReady(EngineError):
    code = "not_ready"
    status = 503
    type = "overloaded_error"


class NonfiniteLogits(EngineError):
    """The model computed NaN or infinity where a request's next token was to be chosen."""

    code = "nonfinite_logits"


class GrammarFailed(EngineError):
    """The grammar of an answer could not be followed to its end."""

    code = "grammar_failed"


class EngineDead(EngineError):
    code = "engine_dead"
    status = 503


class RequestTimeout(EngineError):
    code = "timeout"
    status = 504


class DeadlineMissed(EngineError):
    """The first token did not come in the time that the client gave (--deadline-miss-action
    abort).
    """

    code = "deadline"
    status = 504


class Aborted(EngineError):
    code = "aborted"
    status = 499


class PrefillFailed(EngineError):
    code = "prefill_failed"
    status = 502


class KvTransferFailed(EngineError):
    """The prompt's KV pages did not arrive; `reason` is the transfer reason code
    (docs/protocol.md).
    """

    code = "kv_transfer_failed"
    status = 502


class KvTransferTimeout(EngineError):
    code = "kv_transfer_timeout"
    status = 504


class PairIncompatible(EngineError):
    code = "pair_incompatible"
    status = 502


class PromptMismatch(EngineError):
    """Prefill and decode node tokenized different prompts: about this request, not about the
    pair.
    """

    code = "prompt_mismatch"
    status = 502


class BootstrapUnreachable(EngineError):
    code = "bootstrap_unreachable"
    status = 502


class ConfigError(EngineError):
    """A flag or a checkpoint the engine cannot run with; ends the process with exit code 2."""

    code = "config_error"
    status = 500


def _all(cls: type[EngineError]) -> dict[str, type[EngineError]]:
    found = {cls.code: cls}
    for sub in cls.__subclasses__():
        found.update(_all(sub))
    return found


def by_code(code: str) -> type[EngineError]:
    """The class for a code that came over a process boundary; unknown codes are internal errors."""
    return _all(EngineError).get(code, EngineError)
