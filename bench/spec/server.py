"""`python -m app` with simulated acceptance (`bench.spec.simulate`): `python -m bench.spec.server FLAGS`.

Requests choose their acceptance with their seed. The flags are the server's.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from app.cli import main as serve
from bench.spec import simulate
from gpu.sample import torch_kernels


def main(argv: Sequence[str] | None = None) -> None:
    """Serve. Exits as `app.cli.main` does."""
    simulate.install(torch_kernels, simulate.force)
    if find_spec("triton") is not None:
        from bench.spec import kernels  # Triton, which a CPU may not have
        from gpu.kernels.sampling import kernels as sampling

        simulate.install(sampling, kernels.force)
    serve(argv)


if __name__ == "__main__":
    main()
