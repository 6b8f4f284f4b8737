"""Errors that name the fields of another dialect."""

from __future__ import annotations

from core.errors import RequestError


def rename_fields(
    error: RequestError, names: tuple[tuple[str, str], ...], inner: tuple[tuple[str, str], ...]
) -> None:
    """Give the field that an error is about, in its message too, another name: by the first of `names`
    that it begins with, and by each of `inner` that is in it."""
    if (old := error.param) is None:
        return
    new = old
    for of_chat, ours in names:
        if old == of_chat or old.startswith((of_chat + ".", of_chat + "[")):
            new = ours + old[len(of_chat) :]
            break
    for of_chat, ours in inner:
        new = new.replace(of_chat, ours)
    message = error.message.replace(f"'{old}", f"'{new}")
    if message.startswith(f"{old} "):
        message = new + message[len(old) :]
    error.param, error.message, error.args = new, message, (message,)
