"""`python -m baton.config`: the table of engine flags in docs/flags.md."""

from baton.config.engine import EngineConfig
from baton.config.flags import markdown

print(markdown(EngineConfig))
