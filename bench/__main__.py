"""``make bench``: every measurement, one after the other. Figures go to bench/results as JSON."""

import importlib
import sys
from pathlib import Path


def main() -> None:
    known = sorted(
        p.stem for p in Path(__file__).parent.glob("*.py") if p.stem not in ("__init__", "__main__", "record")
    )
    for name in sys.argv[1:] or known:
        print(f"== {name}", flush=True)
        importlib.import_module(f"bench.{name}").main()


if __name__ == "__main__":
    main()
