"""Request bytes to a JSON object that is safe to walk: real UTF-8, finite numbers, bounded nesting, no name twice.

A fast parser reads good bodies. What it refuses is read again by a slow one that says what is wrong: there bad bytes become
lone surrogates first, so that one walk finds them and names the field they stand in.
"""

import json
from typing import Any, NoReturn

import jiter

from gateway.errors import BadRequest


def _constant(name: str) -> NoReturn:
    raise BadRequest(f"{name} is not a JSON number", code="invalid_json")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                shown = name.encode("utf-8", "replace").decode()[:100]
                raise BadRequest(f"The name {shown!r} occurs twice in one object", shown, "invalid_json")
            seen.add(name)
    return found


def _check_text(text: str, path: str) -> None:
    if text.isascii():
        if "\0" in text:
            raise BadRequest(f"{path} contains a NUL character", path, "invalid_text")
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"{path} is not valid Unicode: bad UTF-8 or a lone surrogate at character {error.start}", path, "invalid_text"
        ) from None
    if "\0" in text:
        raise BadRequest(f"{path} contains a NUL character", path, "invalid_text")


def check(value: Any, max_depth: int, path: str = "") -> None:
    """Walk every container once. BadRequest names the field that nests too deep or holds text that is none.

    path: the name of the value itself; empty: it is the body.
    """
    todo: list[tuple[Any, str, int]] = [(value, path, 1)]
    while todo:
        item, path, depth = todo.pop()
        if type(item) is str:
            _check_text(item, path)
        elif type(item) in (list, dict):
            if depth > max_depth:
                raise BadRequest(f"The body nests deeper than {max_depth} levels", path[:200], "nesting_too_deep")
            if type(item) is dict:
                for name, inner in item.items():
                    shown = name.encode("utf-8", "replace").decode()
                    where = f"{path}.{shown}" if path else shown
                    _check_text(name, where)
                    if type(inner) in (str, list, dict):
                        todo.append((inner, where, depth + 1))
            elif not set(map(type, item)) <= {int, float, bool}:
                todo.extend((inner, f"{path}[{at}]", depth + 1) for at, inner in enumerate(item))


def decode(raw: bytes, max_depth: int) -> dict[str, Any]:
    """Parse a request body; BadRequest when it is not one JSON object that passes check()."""
    try:
        value = jiter.from_json(raw, allow_inf_nan=False, cache_mode="keys", catch_duplicate_keys=True)
        # Good Unicode, and with so few brackets no nesting: nothing is left that check() could find.
        is_checked = b"\\u0000" not in raw and raw.count(b"[") + raw.count(b"{") <= max_depth
    except ValueError:
        value, is_checked = _explain(raw, max_depth), False
    if type(value) is not dict:
        raise BadRequest("The body must be a JSON object", code="invalid_json")
    if not is_checked:
        check(value, max_depth)
    return value


def _explain(raw: bytes, max_depth: int) -> Any:
    """Parse what the fast parser refused; mostly a BadRequest that says why."""
    try:
        return json.loads(raw.decode("utf-8", "surrogateescape"), parse_constant=_constant, object_pairs_hook=_object)
    except RecursionError:
        raise BadRequest(f"The body nests deeper than {max_depth} levels", code="nesting_too_deep") from None
    except ValueError as error:
        if "integer string conversion" in str(error):
            raise BadRequest("The body holds an integer of more digits than any field takes", code="invalid_json") from None
        raise BadRequest(
            f"The body is not valid JSON: {error}".encode(errors="replace").decode(), code="invalid_json"
        ) from None
