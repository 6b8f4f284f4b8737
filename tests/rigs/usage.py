"""What commands say of flags that they refuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest


def usage_error(
    capsys: pytest.CaptureFixture[str], run: Callable[[Sequence[str]], object], words: Sequence[str]
) -> str:
    """The one line that `run` writes to stderr before it exits with 2."""
    with pytest.raises(SystemExit) as ended:
        run(words)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error
