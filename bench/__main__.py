"""``make bench``: every measurement, one after the other. Figures go to bench/results as JSON.

python -m bench                       all, and then the table of docs/reference/performance.md
python -m bench engines --only W1     one of them, with flags of its own
"""

import subprocess
import sys
from pathlib import Path


def main() -> None:
    known = sorted(
        p.stem for p in Path(__file__).parent.glob("*.py") if p.stem not in ("__init__", "__main__", "record", "table")
    )
    named = [word for word in sys.argv[1:] if word in [*known, "table"]]
    flags = [word for word in sys.argv[1:] if word not in named]
    for name in named or [*known, "table"]:
        print(f"== {name}", flush=True)
        # In a process of its own: one leaves settings, sockets and caches behind that another would measure.
        done = subprocess.run([sys.executable, "-m", f"bench.{name}", *flags], check=False)
        if done.returncode:
            sys.exit(f"{name} ended with exit {done.returncode}")


if __name__ == "__main__":
    main()
