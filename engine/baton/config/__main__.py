"""`python -m baton.config`: the table of engine flags in docs/flags.md."""

from baton.config.engine import EngineConfig
from baton.config.flags import flags_table

print(flags_table(EngineConfig))
