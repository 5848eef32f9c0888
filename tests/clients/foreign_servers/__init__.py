"""Our router in front of a server of another make: `transformers serve` with the demo model, on a CPU.

| module | subject |
|---|---|
| `chat_server` | a running server, with all of its paths or without some |
| `serve_transformers` | runs under the server's own Python |
| `ask_openai`, `ask_anthropic` | run under the Python of each library |

What version 5.24 of the server does, measured, and the tests allow for:

* It has /v1/chat/completions, /v1/completions and /v1/responses, and lacks /v1/messages.
* Its streams end without `[DONE]`; events of a response have no names.
* A response is a stream unless the request says `"stream": false`.
* A chat request with a member that OpenAI's API does not have is refused with 422.
* Errors are `{"detail": …}`, within a stream `{"error": "…"}`.
* Counts come with the last chunk, whatever `stream_options` says; no stop string is named.
"""
