"""Our nodes behind other routers.

What is compared is always the same: the answer of one engine that does both phases, asked directly. That engine
(regular mode) and a prefill and a decode node (P/D mode) stand behind sglang-router 0.3.2 and smg 1.13.0.

What these versions change on the way (measured), and the tests allow for:

* Both: `/generate` takes a batch as `input_ids` only (`text` must be one string); a completion's `prompt` may not be
  token ids (422 and 400). Mistakes they find themselves are answered by them: sglang-router with 422 and plain text,
  smg with 400 and OpenAI's form but codes of its own.
* Both, P/D: one bootstrap room per prompt whatever `n` is (answer i then meets in room + i). A worker's 4xx keeps
  status and message and loses code and `param`; D's to a stream comes as `data: {'error': …}`, which is no JSON.
  smg quotes P's whole body in its message when P answers first.
* Both: in front of engines with `--api-key` they need the same `--api-key`; smg finds no worker otherwise.
* sglang-router, regular: its circuit breaker counts 4xx; ten mistakes of one client shut everybody out for a minute.
  P/D with `--dp-aware`: serves nothing (the rank gets into the URL it connects to).
* smg adds `"model": "unknown"` to a `/generate` without model; another model's name reaches no worker (404, P/D 503).
"""
