"""Texts on which tokenizers differ: scripts, blanks, controls, joiners, names of special tokens."""

# ruff: noqa: RUF001 (characters that look alike are the point)

from __future__ import annotations

import random
from collections.abc import Sequence

PROSE = (
    "The relay runner hands the baton over; it must not be dropped.",
    "Isn't that what we'd call disaggregation? It costs 1234567 tokens, or 12.5%.",
    "Der Läufer übergibt den Stab — „schnell“, sagt er, während 3½ Äpfel fallen.",
    "L'été dernier, j'ai vu naïveté, cœur et Ångström; ça coûte 12 €.",
    "Бегун передаёт эстафету, не роняя её. Ёлка ѐ й и\u0306.",
    "走者把接力棒交给下一个人，不能掉。東京タワー、カタカナﾊﾝｶｸ。",
    "달리기 선수가 바통을 넘긴다. \u1112\u1161\u11ab\u1100\u1173\u11af",
    "العدّاء يسلّم العصا ٣٤٥ ﷽ لا إله",
    "धावक बैटन सौंपता है। क्षत्रिय ज़िंदगी",
    "นักวิ่งส่งไม้ผลัด ห้ามทำตก",
    "Ο δρομέας παραδίδει τη σκυτάλη. Σίσυφος ΑΣ",
    "האצן מעביר את המקל שָׁלוֹם",
)
CODE = (
    "def hand_over(baton: Baton | None) -> int:\n    return 0x1F if baton else -1  # or not\n",
    "if (a<=b && c!=d) { x[i]++; } /* ... */\r\n\tfor(;;){}\n\n\n",
    '{"key": [1, 2.5e-3, null], "url": "https://example.org/a?b=c&d=%20"}',
    "SELECT * FROM t WHERE a='it''s' -- \\n\\t\n",
    "====================  --------  ########  ////////",
)
ODD = (
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪 😀😀😀 ☺️ ‼️",
    "ﬁ ﬂ ½ ² ℌ Å Å é e\u0301 ｱ ① ㍿ Ⅷ ǆ ẞß İi ſ",
    "\u0000\u0001\u0007\u001b[0m\u007f\u0080\u009f",
    "\ufeff\u200b\u200d\u200e\u00ad\u2060\u2028\u2029\u0085\u180e",
    " \u00a0\u1680\u2003\u202f\u205f\u3000 \t\v\f\r\n",
    "\u0300\u0301x\u0302 \u20dd \ufe0f \U000e0100",
    "\ufffd\ufffe\uffff\U0010ffff\U0001f9ff\U00020000\ue000\ufdd0",
    "▁ ▁▁ a▁b ▁the <0x0A> <0xE9> Ġ Ċ âĢ",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
)
LOOKALIKES = (
    "<s>", "</s>", "<unk>", "<pad>", "[INST]", "[/INST]", "[TOOL_CALLS]", "<|im_end|>", "<|im_user|>",
    "[BOS]", "[EOS]", "<SPECIAL_30>", "<|reserved_token_5|>", "<sep>", "<s", "[INST", "|im_end|>",
)  # fmt: skip
BLANKS = ("", "", " ", "  ", "     ", "\n", "\n\n", "\t", "\r\n", " \n ", "\u00a0", "\u3000")


def odd_texts(count: int, seed: int) -> list[str]:
    """Texts of the parts above and of random characters; equal arguments give equal texts."""
    rng = random.Random(seed)
    fixed = ["", " ", "  ", "\n", *PROSE, *CODE, *ODD, *LOOKALIKES]
    return [*fixed, *(_made(rng) for _ in range(count - len(fixed)))][:count]


def _made(rng: random.Random) -> str:
    parts = [_part(rng) for _ in range(rng.randrange(1, 7))]
    return "".join(part + rng.choice(BLANKS) for part in parts)


def _part(rng: random.Random) -> str:
    kind = rng.randrange(10)
    if kind < 4:
        return _slice(rng, rng.choice((*PROSE, *CODE, *ODD)))
    if kind < 6:
        return rng.choice(LOOKALIKES)
    if kind == 6:
        return rng.choice(" aA.=-\n0é世▁\t") * rng.randrange(1, 40)
    if kind == 7:
        return "".join(rng.choice("etaoinsh rdlu") for _ in range(rng.randrange(200)))
    top = rng.choice((0x7F, 0x7FF, 0xFFFF, 0x10FFFF))
    codes = (rng.randrange(top + 1) for _ in range(rng.randrange(1, 12)))
    return "".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000)


def _slice(rng: random.Random, text: Sequence[str]) -> str:
    start = rng.randrange(len(text))
    return "".join(text[start : rng.randrange(start, len(text)) + 1])
