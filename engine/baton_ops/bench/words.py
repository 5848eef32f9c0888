"""Text of exact length for prompts: 256 common words of three letters, each with a space behind it.

Four characters each, about one token in the usual tokenizers and exactly one in a simulated
engine's.
"""

from __future__ import annotations

import hashlib

CHARS = 4
_LETTERS = (
    "act add age ago aid aim air all and ant any ape arc are ark arm art ash ask ate axe bad bag "
    "ban bar bat bay bed bee beg bet bid big bin bit bow box boy bud bug bus but buy cab can cap "
    "car cat cow cry cup cut dad dam day den did die dig dim dip dog dot dry due ear eat egg ego "
    "elf elm end era eve eye fan far fat fed fee few fig fin fit fix fly fog for fox fun fur gap "
    "gas gel gem get gin god got gum gun gut guy had ham has hat hay hen her hid him hip his hit "
    "hop hot how hub hug hut ice ill ink inn ion its ivy jam jar jaw jet job jog joy jug key kid "
    "kin kit lab lad lap law lay led leg let lid lie lip lit log lot low mad man map mat may men "
    "met mid mix mob mom mud mug nap net new nod nor not now nut oak odd off oil old one orb ore "
    "our out owl own pad pan par pat paw pay pea pen per pet pie pig pin pit pop pot put ran rat "
    "raw red rib rid rim rip rob rod row rub rug run sad saw say sea see set she shy sit six sky "
    "son spy sum sun tag tan tap tea ten the tie tin tip toe ton top toy try tub two use van vet "
    "war was way "
)
WORDS = tuple(_LETTERS.split())


def make_words(name: str, count: int) -> str:
    """`count` words, always the same for a `name`, unlike those of other names."""
    return "".join(WORDS[byte] + " " for byte in hashlib.shake_128(name.encode()).digest(count))
