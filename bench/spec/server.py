"""`python -m app` with simulated acceptance (`bench.spec.simulate`): `python -m bench.spec.server FLAGS`.

Requests choose their acceptance with their seed. The flags are the server's, and `--always-draft`: without
the cost model, as many drafts as there may be, where drafting does not pay (a tiny model on a CPU).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

from app.cli import main as serve
from bench.spec import simulate
from gpu.draft import stage
from gpu.sample import torch_kernels

ALWAYS = "--always-draft"


def main(argv: Sequence[str] | None = None) -> None:
    """Serve. Exits as `app.cli.main` does."""
    flags = list(sys.argv[1:] if argv is None else argv)
    if ALWAYS in flags:
        flags.remove(ALWAYS)
        vars(stage)["measure_costs"] = lambda *given: None
    simulate.install(torch_kernels, simulate.force)
    if find_spec("triton") is not None:
        from bench.spec import kernels  # Triton, which a CPU may not have
        from gpu.kernels.sampling import kernels as sampling

        simulate.install(sampling, kernels.force)
    serve(flags)


if __name__ == "__main__":
    main()
