"""Configuration of an engine: the bottom package, which imports only `baton.errors`.

| module | holds |
|---|---|
| `engine` | `EngineConfig`: all flags, and what follows from several of them |
| `groups` | every flag with its default, bounds and help, a class per heading |
| `rules` | rules between flags |
| `parsing` | `parse_config` and `build_config`: flags or values to a checked config |
| `flags` | `opt` and `FlagParser`: flags made of the fields of a dataclass |
| `classes` | `--priority-classes` |
| `tenants` | `--tenant-config` |
| `kv_events` | `--kv-events-config` |
| `simulated` | `--simulate`: step-time models and their presets |
| `unsupported_flags` | flags of SGLang and vLLM that are refused, and what to use instead |
"""

from baton.config.engine import *  # noqa: F403
from baton.config.flags import *  # noqa: F403
from baton.config.groups.disaggregation import KV_TRANSPORTS as KV_TRANSPORTS
from baton.config.groups.ranks import MEM_FRACTION as MEM_FRACTION
from baton.config.parsing import *  # noqa: F403
