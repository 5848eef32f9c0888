"""Longest prompts and answers: refusals by size, before a prompt is tokenized and after."""

from __future__ import annotations

from collections.abc import Iterable

from baton.errors import BadRequest, InvalidJson, PromptTooLong, by_code
from baton.server.request.schema import RequestFields
from baton.server.text.native import native_extension
from baton.server.text.tokenizer import ContextLimit


class PromptLimits:
    """Limits of this engine. `context_length` may shrink once, when the ranks report their pool."""

    def __init__(self, context_length: int, max_chars_per_token: int) -> None:
        self.context_length = context_length
        self._max_chars_per_token = max_chars_per_token

    @property
    def max_prompt_chars(self) -> int:
        """Longest text of a prompt, whatever its tokens. Routers read it in /get_server_info."""
        return self.context_length * self._max_chars_per_token

    def refuse_oversized(self, path: str, body: bytes) -> None:
        """Raise PromptTooLong or PayloadTooLarge for JSON that is too long for any answer, by the
        router's rule.

        Raises InvalidJson for such a body that is no JSON object. Cost: about 1 ns per byte,
        without the GIL; nothing for bodies with fewer bytes than a prompt may have tokens.
        """
        if len(body) <= self.context_length:
            return
        oversized_body = native_extension().oversized_body
        try:
            refusal = oversized_body(path, body, self.context_length, self.max_prompt_chars)
        except ValueError as err:
            raise InvalidJson(str(err)) from err
        if refusal is not None:
            code, message, param = refusal
            raise by_code(code)(message, param=param)

    def limit_of_prompt(self, *, is_bounded: bool = True) -> ContextLimit:
        return ContextLimit(context_length=self.context_length, is_bounded=is_bounded)

    def limit_before_cut(self, request: RequestFields) -> ContextLimit:
        """Longest prompt of a request before it is cut."""
        if request.truncate_prompt_tokens is None:
            return self.limit_of_prompt()
        chars: int = native_extension().CUT_TEXT_CHARS
        tokens = max(self.context_length, chars // self._max_chars_per_token)
        return ContextLimit(context_length=tokens, is_bounded=False)

    def refuse_long_texts(self, texts: Iterable[str], limit: ContextLimit, param: str) -> None:
        """Raise PromptTooLong for a text that cannot fit, whatever its tokens, before it is
        tokenized.
        """
        longest = max(map(len, texts), default=0)
        if longest > limit.context_length * self._max_chars_per_token:
            least = -(-longest // self._max_chars_per_token)
            raise self._too_long(f"has {longest} characters, at least {least} tokens", param)

    def refuse_long_ids(self, count: int, param: str) -> None:
        """Raise PromptTooLong for more token ids than the context has."""
        if count > self.context_length:
            raise self._too_long(f"has {count}", param)

    def max_new_tokens(
        self, prompt_tokens: int, asked: int | None, default: int | None, param: str
    ) -> int:
        """The answer's limit. `asked` must fit; without it the default, or all that is left."""
        if prompt_tokens == 0:
            raise BadRequest(f"{param} is empty; give at least one token", param=param)
        left = self.context_length - prompt_tokens
        if left < 1 or (asked is not None and asked > left):
            if asked is None or left < 1:
                raise self._too_long(f"has {prompt_tokens}", param)
            raise self._too_long(
                f"has {prompt_tokens} and max_tokens asks for {asked} more",
                param,
                remedy=f"lower max_tokens to {left}, shorten the prompt",
            )
        if asked is not None:
            return asked
        return left if default is None else min(default, left)

    def _too_long(self, size: str, param: str, remedy: str = "shorten it") -> PromptTooLong:
        return PromptTooLong(
            # OpenAI's words first: litellm's fallbacks (seen in 1.106) know the error by them, not
            # by its code.
            f"this model's maximum context length is {self.context_length} tokens here, but the "
            f"prompt {size}; "
            f"{remedy}, or start the engine with a larger --context-length or --max-total-tokens",
            param=param,
        )
