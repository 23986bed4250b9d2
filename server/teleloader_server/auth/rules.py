"""Rules that map the claims of a JWT or a client certificate to scopes. Pure functions, without I/O or clocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from teleloader_server.auth.tokens import GRANT_KEYS, Grant, parse_grant, shown
from teleloader_server.config import ConfigError, check_keys

MAX_RULES: Final = 1000
"""Maximum number of rules of an issuer: all of them are compared with the claims of a token that no rule matches."""
MAX_DEPTH: Final = 8
"""Maximum nesting of the tables in ``match``."""

Pattern = str | bool | int
"""Expected value: a string with at most one ``*``, which stands for any characters, or a boolean or integer."""


class Condition(NamedTuple):
    """Condition on one claim."""

    path: tuple[str, ...]
    """Names of the claim and, for a member of an object, of the object's members."""
    patterns: tuple[Pattern, ...]
    """Expected values; one of them must match."""


class Rule(NamedTuple):
    """Rule of an identity file: conditions that must all hold, and the permissions of clients that meet them."""

    conditions: tuple[Condition, ...]
    grant: Grant
    """Permissions; without scopes, the rule refuses the clients."""


def parse_rules(tables: object, at: str) -> tuple[Rule, ...]:
    """Parse the array ``rules`` of an issuer or of ``[certificates]``.

    Args:
        tables: Value of the key ``rules``.
        at: Place in the file, for error messages.

    Raises:
        ConfigError: If a rule is invalid, or there are none.
    """
    if not isinstance(tables, list) or not 0 < len(tables) <= MAX_RULES:
        raise ConfigError(
            f"{at}: expected 1 to {MAX_RULES:,} rules. Add [[...rules]] with match = {{ CLAIM = VALUE }} and "
            'scopes = ["read"], for example'
        )
    return tuple(_rule(table, f"{at}, rule {number}") for number, table in enumerate(tables, 1))


def first_match(rules: Sequence[Rule], claims: Mapping[str, Any]) -> Rule | None:
    """Return the first rule whose conditions hold for the claims, or None."""
    return next((rule for rule in rules if all(_holds(condition, claims) for condition in rule.conditions)), None)


def _rule(table: object, at: str) -> Rule:
    if not isinstance(table, dict):
        raise ConfigError(f"{at}: expected a table, got {shown(table)}")
    check_keys(at.removeprefix("invalid entry "), table, ("match", *GRANT_KEYS))
    match = table.get("match")
    if not isinstance(match, dict) or not match:
        raise ConfigError(
            f'{at}: expected match = {{ CLAIM = VALUE }}. To match all clients, use match = {{ sub = "*" }} for '
            'tokens, and match = { cn = "*" } for certificates'
        )
    return Rule(tuple(_conditions(match, (), at)), parse_grant(table, at, may_refuse=True))


def _conditions(match: Mapping[str, object], path: tuple[str, ...], at: str) -> list[Condition]:
    if len(path) == MAX_DEPTH:
        raise ConfigError(f"{at}: match has more than {MAX_DEPTH} levels of tables. Remove some")
    found = []
    for name, expected in match.items():
        where = (*path, name)
        if isinstance(expected, dict) and expected:
            found += _conditions(expected, where, at)
        else:
            patterns = expected if isinstance(expected, list) else [expected]
            found.append(Condition(where, tuple(_pattern(pattern, where, at) for pattern in patterns)))
            if not patterns:
                raise ConfigError(f"{at}: the list of values of {'.'.join(where)!r} is empty. Add a value")
    return found


def _pattern(pattern: object, path: tuple[str, ...], at: str) -> Pattern:
    if not isinstance(pattern, str | bool | int):
        raise ConfigError(
            f"{at}: invalid value of {'.'.join(path)!r}: expected a string, boolean or integer, or a list of them, got "
            f"{shown(pattern)}"
        )
    if isinstance(pattern, str) and pattern.count("*") > 1:
        raise ConfigError(f"{at}: the value {shown(pattern)} has more than one '*'. Use one, or a list of values")
    return pattern


def _holds(condition: Condition, claims: Mapping[str, Any]) -> bool:
    value: Any = claims
    for name in condition.path:
        if not isinstance(value, Mapping) or name not in value:
            return False
        value = value[name]
    if condition.path == ("scope",) and isinstance(value, str):
        value = value.split()  # RFC 8693, 4.2: scopes are separated by spaces
    values = value if isinstance(value, list) else [value]
    return any(_matches(pattern, each) for pattern in condition.patterns for each in values)


def _matches(pattern: Pattern, value: object) -> bool:
    if isinstance(pattern, bool) or not isinstance(pattern, str):
        return type(value) is type(pattern) and value == pattern
    if not isinstance(value, str):
        return False
    before, star, after = pattern.partition("*")
    if not star:
        return value == pattern
    return len(value) >= len(before) + len(after) and value.startswith(before) and value.endswith(after)
