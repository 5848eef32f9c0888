"""Which rules are recursive, and simple recursion written as repetition.

`x ::= a x | b` is `a* b`, and `x ::= x a | b` is `b a*`: a rule that is not recursive may become
one lexeme, and a repetition takes no depth of llguidance's parser, which refuses chains of some
thousand rules.
"""

from __future__ import annotations

from collections.abc import Mapping

from baton.server.request.grammar.ebnf.tree import (
    EMPTY,
    EbnfNode,
    NodeChoice,
    NodeRepeat,
    NodeSequence,
    RuleRef,
    referred_rules,
)

Rules = Mapping[str, EbnfNode]


def recursive_rules(rules: Rules) -> set[str]:
    """Rules that contain themselves, or a rule that does."""
    uses = {name: referred_rules(node) for name, node in rules.items()}
    finite: set[str] = set()
    pending = True
    while pending:
        found = {name for name, used in uses.items() if name not in finite and used <= finite}
        finite |= found
        pending = bool(found)
    return set(rules) - finite


def reachable_rules(rules: Rules, root: str) -> list[str]:
    """Rules that an answer may contain, the root first."""
    found = {root: None}
    queue = [root]
    while queue:
        for name in sorted(referred_rules(rules[queue.pop()])):
            if name not in found:
                found[name] = None
                queue.append(name)
    return list(found)


def without_simple_recursion(rules: Rules) -> dict[str, EbnfNode]:
    """Equal rules, in which those that repeat only at one end of themselves are repetitions."""
    rewritten = dict(rules)
    changed = True
    while changed:
        changed = False
        for name in rewritten.keys() & recursive_rules(rewritten):
            node = as_repetition(name, rewritten)
            if node is not None and node != rewritten[name]:
                rewritten[name] = node
                changed = True
    return rewritten


def as_repetition(name: str, rules: Rules) -> EbnfNode | None:
    """The rule as a repetition; None where it is recursive in another way."""
    repeated: list[EbnfNode] = []
    others: list[EbnfNode] = []
    ends: set[bool] = set()
    for option in _options(rules[name]):
        parts = option.parts if isinstance(option, NodeSequence) else (option,)
        if option == RuleRef(name):
            continue  # x ::= x adds nothing
        if parts and parts[-1] == RuleRef(name):
            repeated.append(NodeSequence(parts[:-1]))
            ends.add(True)
        elif parts and parts[0] == RuleRef(name):
            repeated.append(NodeSequence(parts[1:]))
            ends.add(False)
        else:
            others.append(option)
    if not others or len(ends) > 1:
        return None
    if any(_reaches(part, name, rules) for part in (*repeated, *others)):
        return None
    body = _choice_of(others)
    if not repeated:
        return body
    repetition = NodeRepeat(_choice_of(repeated), 0, None)
    return NodeSequence((repetition, body) if ends == {True} else (body, repetition))


def _options(node: EbnfNode) -> tuple[EbnfNode, ...]:
    if isinstance(node, NodeChoice):
        return node.options
    if isinstance(node, NodeRepeat) and (node.least, node.most) == (0, 1):
        return (*_options(node.part), EMPTY)
    return (node,)


def _choice_of(options: list[EbnfNode]) -> EbnfNode:
    return options[0] if len(options) == 1 else NodeChoice(tuple(options))


def _reaches(node: EbnfNode, name: str, rules: Rules) -> bool:
    seen: set[str] = set()
    queue = [node]
    while queue:
        for used in referred_rules(queue.pop()) - seen:
            if used == name:
                return True
            seen.add(used)
            queue.append(rules[used])
    return False
