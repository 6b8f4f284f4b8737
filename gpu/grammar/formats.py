"""JSON Schema formats that llguidance accepts too much for, or does not know, as patterns or formats it has.

The replacement accepts a subset: an IRI is restricted to a URI, and no label of a host name begins with
"xn--", which would need the tables of IDNA.
"""

from __future__ import annotations

from gpu.grammar.schema import Json, objects

_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29"
_LONG = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
_SHORT = "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_DATE = f"(?:{_LEAP}|[0-9]{{4}}-(?:{_LONG}|{_SHORT}|02-(?:0[1-9]|1[0-9]|2[0-8])))"
# No second 60: which minutes have had one is in a table that grows.
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]+)?(?:[Zz]|[+-]{_CLOCK})"
_POINTER = "(?:/(?:[^/~]|~[01])*)*"
_ALNUM, _ANY = "[0-9A-Za-z]", "[0-9A-Za-z-]*"
_LABEL = f"{_ALNUM}(?:[0-9A-Za-z-](?:{_ALNUM}{_ANY}|-(?:{_ALNUM}{_ANY})?)?)?"
"""Without hyphens in its third and fourth place."""
_HOST = rf"^{_LABEL}(?:\.{_LABEL})*$"

_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[Tt]{_TIME}$",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$",
}
_SUBSETS = {"iri": "uri", "idn-email": "email", "idn-hostname": "hostname"}


def rewrite_formats(root: Json) -> None:
    """Replace such formats in place."""
    for schema, _ in list(objects(root)):
        name = schema.get("format")
        if not isinstance(name, str):
            continue
        if name in _SUBSETS:
            schema["format"] = name = _SUBSETS[name]
        if name == "hostname" and isinstance(branches := schema.setdefault("allOf", []), list):
            branches.append({"pattern": _HOST, "maxLength": 253})
        elif name in _PATTERNS and "pattern" not in schema:
            del schema["format"]
            schema["pattern"] = _PATTERNS[name]
        elif name in _PATTERNS and isinstance(branches := schema.setdefault("allOf", []), list):
            del schema["format"]
            branches.append({"pattern": _PATTERNS[name]})
