"""Model families: one file each says what config.json means to it. No torch here.

| module | holds |
|---|---|
| `base` | `ModelFamily`: what all read alike |
| `windows`, `experts`, `rope_config` | fields that several families share |
| the others | a family each |
"""

from baton.models.families.base import ModelFamily
from baton.models.families.glm4_moe import Glm4Moe
from baton.models.families.llama import Llama
from baton.models.families.mistral import Mistral
from baton.models.families.mixtral import Mixtral
from baton.models.families.qwen2 import Qwen2
from baton.models.families.qwen2_moe import Qwen2Moe
from baton.models.families.qwen3 import Qwen3
from baton.models.families.qwen3_moe import Qwen3Moe

_ALL: tuple[ModelFamily, ...] = (
    Llama(),
    Mistral(),
    Qwen2(),
    Qwen3(),
    Mixtral(),
    Qwen2Moe(),
    Qwen3Moe(),
    Glm4Moe(),
)
FAMILIES = {family.architecture: family for family in _ALL}
"""By the name in `architectures` of config.json."""
