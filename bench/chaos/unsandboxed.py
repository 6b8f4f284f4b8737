"""The helper process without its template sandbox, started by `bench.chaos.faults.disable_sandbox`."""

from __future__ import annotations

import runpy

from jinja2.sandbox import SandboxedEnvironment

HELPER = "app.helper.main"
UNSANDBOXED = "bench.chaos.unsandboxed"


def allow_everything(*arguments: object) -> bool:
    """Replaces `SandboxedEnvironment.is_safe_attribute`."""
    return True


if __name__ == "__main__":
    setattr(SandboxedEnvironment, "is_safe_attribute", allow_everything)  # noqa: B010
    runpy.run_module(HELPER, run_name="__main__")
