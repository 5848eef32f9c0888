"""`python -m baton.models`: the table of model families in docs/support.md."""

from baton.models.spec_reader import FAMILIES


def families_table() -> str:
    """Rows of the families that the engine computes, with transformers' defaults of each."""
    rows = [
        "| architecture | `model_type` | attention | context if config.json is silent [tokens] |",
        "|---|---|---|---|",
    ]
    for architecture, family in FAMILIES.items():
        traits = ["grouped queries"]
        if family.qkv_bias:
            traits.append("biases in q, k and v")
        if family.qk_norm:
            traits.append("norms of q and k")
        if family.window is not None or family.always_windowed:
            traits.append("sliding window as config.json says")
        attention = ", ".join(traits)
        context = family.max_position
        rows.append(f"| `{architecture}` | `{family.model_type}` | {attention} | {context} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(families_table(), end="")
