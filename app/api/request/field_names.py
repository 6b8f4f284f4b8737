"""Errors that name the fields of another dialect."""

from __future__ import annotations

from collections.abc import Mapping

from core.errors import RequestError


class fields_named:
    """Give the field that a `RequestError` is about the name that the client knows, in its message too.

    `names` has our names and theirs: the first that the field begins with counts, and each that begins with a
    dot, wherever it is in the field.
    """

    __slots__ = ("_names",)

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def __enter__(self) -> None:
        """Nothing is to be done before an error."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RequestError) and error.param is not None:
            _rename(error, error.param, self._names)


def _rename(error: RequestError, old: str, names: Mapping[str, str]) -> None:
    new = old
    for ours, theirs in names.items():
        if ours.startswith("."):
            new = new.replace(ours, theirs)
        elif new == old and (old == ours or old.startswith((ours + ".", ours + "["))):
            new = theirs + old[len(ours) :]
    message = error.message.replace(f"'{old}", f"'{new}")
    if message.startswith(f"{old} "):
        message = new + message[len(old) :]
    error.param, error.message, error.args = new, message, (message,)
