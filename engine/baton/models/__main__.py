"""`python -m baton.models`: the table of model families in docs/support.md."""

from baton.models.families import FAMILIES


def families_table() -> str:
    """Rows of the families that the engine computes, with transformers' defaults of each."""
    rows = [
        "| architecture | `model_type` | attention | feed-forward | context if config.json is silent [tokens] |",
        "|---|---|---|---|---|",
    ]
    for architecture, family in FAMILIES.items():
        cells = (
            f"`{architecture}`",
            f"`{family.model_type}`",
            family.attention,
            family.feed_forward,
        )
        rows.append(f"| {' | '.join(cells)} | {family.max_position} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(families_table(), end="")
