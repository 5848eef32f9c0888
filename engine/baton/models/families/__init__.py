"""Model families: one file each says what config.json means to it. No torch here.

| module | holds |
|---|---|
| `base` | `ModelFamily`: what all read alike |
| `mla` | `MlaFamily`: what those with latent attention read alike |
| `delta_net` | fields of those with states |
| `windows`, `experts`, `rope_config`, `longrope` | fields that several families share |
| `multimodal` | checkpoints that have other parts beside one of a family |
| the others | a family each |
"""

from baton.models.families.base import ModelFamily
from baton.models.families.deepseek_v2 import DeepseekV2Family
from baton.models.families.deepseek_v3 import DeepseekV3Family
from baton.models.families.gemma2 import Gemma2Family
from baton.models.families.gemma3 import Gemma3Family
from baton.models.families.glm4_moe import Glm4MoeFamily
from baton.models.families.glm4_moe_lite import Glm4MoeLiteFamily
from baton.models.families.gpt_oss import GptOssFamily
from baton.models.families.granite import GraniteFamily
from baton.models.families.kimi_linear import KimiLinearFamily
from baton.models.families.llama import LlamaFamily
from baton.models.families.llama4 import Llama4Family
from baton.models.families.mistral import MistralFamily
from baton.models.families.mixtral import MixtralFamily
from baton.models.families.multimodal import MULTIMODAL
from baton.models.families.olmo2 import Olmo2Family
from baton.models.families.olmo3 import Olmo3Family
from baton.models.families.phi3 import Phi3Family
from baton.models.families.phimoe import PhimoeFamily
from baton.models.families.qwen2 import Qwen2Family
from baton.models.families.qwen2_moe import Qwen2MoeFamily
from baton.models.families.qwen3 import Qwen3Family
from baton.models.families.qwen3_5 import Qwen35Family
from baton.models.families.qwen3_5_moe import Qwen35MoeFamily
from baton.models.families.qwen3_moe import Qwen3MoeFamily
from baton.models.families.qwen3_next import Qwen3NextFamily
from baton.models.families.seed_oss import SeedOssFamily
from baton.models.families.smollm3 import SmolLM3Family

_ALL: tuple[ModelFamily, ...] = (
    LlamaFamily(),
    MistralFamily(),
    Qwen2Family(),
    Qwen3Family(),
    Phi3Family(),
    SeedOssFamily(),
    Olmo2Family(),
    Olmo3Family(),
    GraniteFamily(),
    SmolLM3Family(),
    Gemma2Family(),
    Gemma3Family(),
    MixtralFamily(),
    PhimoeFamily(),
    Qwen2MoeFamily(),
    Qwen3MoeFamily(),
    Qwen3NextFamily(),
    Qwen35Family(),
    Qwen35MoeFamily(),
    Glm4MoeFamily(),
    DeepseekV2Family(),
    DeepseekV3Family(),
    Glm4MoeLiteFamily(),
    KimiLinearFamily(),
    GptOssFamily(),
    Llama4Family(),
)
FAMILIES = {family.architecture: family for family in _ALL}
"""By the name in `architectures` of config.json."""
SUPPORTED = f"supported: {', '.join((*FAMILIES, *MULTIMODAL))}"
