"""Parts of a grammar that derive no text: each of their texts would contain another one.

The matcher would write such a part without end, or fail where its characters run out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from baton.server.request.grammar.ebnf.tree import (
    EMPTY,
    CharSet,
    EbnfNode,
    NodeChoice,
    NodeRepeat,
    NodeSequence,
    RuleRef,
    referred_rules,
)

Rules = Mapping[str, EbnfNode]


def productive_rules(rules: Rules) -> set[str]:
    """Rules that derive a text: the least fixed point. Cost: each rule once per rule that it refers
    to.
    """
    users = defaultdict[str, list[str]](list)
    for name, node in rules.items():
        for used in referred_rules(node):
            users[used].append(name)
    found: set[str] = set()
    queue = list(rules)
    while queue:
        name = queue.pop()
        if name not in found and is_productive(rules[name], found):
            found.add(name)
            queue += users[name]
    return found


def is_productive(node: EbnfNode, productive: set[str]) -> bool:
    if isinstance(node, RuleRef):
        return node.name in productive
    if isinstance(node, NodeSequence):
        return all(is_productive(part, productive) for part in node.parts)
    if isinstance(node, NodeChoice):
        return any(is_productive(option, productive) for option in node.options)
    if isinstance(node, NodeRepeat):
        return node.least == 0 or is_productive(node.part, productive)
    return True


def without_unproductive_parts(rules: Rules) -> dict[str, EbnfNode]:
    """Equal rules in which every part derives a text; rules that derive none are left out."""
    productive = productive_rules(rules)
    if len(productive) == len(rules):
        return dict(rules)
    return {
        name: _live_part(node, productive) for name, node in rules.items() if name in productive
    }


def _live_part(node: EbnfNode, productive: set[str]) -> EbnfNode:
    """A part that is productive, without those in it that are not."""
    if isinstance(node, (CharSet, RuleRef)):
        return node
    if isinstance(node, NodeSequence):
        return NodeSequence(tuple(_live_part(part, productive) for part in node.parts))
    if isinstance(node, NodeRepeat):
        if not is_productive(node.part, productive):
            return EMPTY
        return NodeRepeat(_live_part(node.part, productive), node.least, node.most)
    options = [option for option in node.options if is_productive(option, productive)]
    live = tuple(_live_part(option, productive) for option in options)
    return live[0] if len(live) == 1 else NodeChoice(live)
