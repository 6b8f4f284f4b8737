"""The helper process with its sandbox open: what `bench.chaos.faults.open_sandbox` starts in its place."""

from __future__ import annotations

import runpy

from jinja2.sandbox import SandboxedEnvironment

HELPER = "app.helper.main"
OPENED = "bench.chaos.opened"


def everything(*arguments: object) -> bool:
    """In the place of `SandboxedEnvironment.is_safe_attribute`."""
    return True


if __name__ == "__main__":
    setattr(SandboxedEnvironment, "is_safe_attribute", everything)  # noqa: B010
    runpy.run_module(HELPER, run_name="__main__")
