"""Every path of an engine, and what answers it.

| module | holds |
|---|---|
| `route` | a path with its methods, handler, key and description |
| `bodies` | forms of bodies that the text layer or a router reads |
| `answers` | forms of answers |
| `generation` | handlers: generation and tokens |
| `admin` | handlers: health, metrics, drain, abort, suspend |
| `kv` | handlers: load, prefix cache, ledger, transfers |
| `docs` | handlers: models, configuration, description of the API |
| `fleet` | rows of the paths that only routers have |
| `table` | ROUTES, which makes the application, the OpenAPI document and the lists of paths |

A handler takes its context from the application, under a key of its module (aiohttp's AppKey).
"""
