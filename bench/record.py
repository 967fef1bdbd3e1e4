"""Keeps every raw value of a measurement, and says its median and spread."""

import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


class Record:
    """Rows of one measurement. ``write`` prints the figures and stores all rows as JSON."""

    def __init__(self, name: str, what: str) -> None:
        self.name, self.what = name, what
        self.rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        print(
            "  " + "  ".join(f"{k} {v:,.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()),
            flush=True,
        )

    def figures(self, column: str) -> dict[str, float]:
        values = sorted(row[column] for row in self.rows if column in row)
        return {"median": statistics.median(values), "low": values[0], "high": values[-1], "runs": len(values)}

    def write(self, *columns: str) -> None:
        told = {column: self.figures(column) for column in columns}
        print(
            f"{self.what}: "
            + "; ".join(f"{c} {f['median']:,.3g} ({f['low']:,.3g} to {f['high']:,.3g})" for c, f in told.items())
        )
        RESULTS.mkdir(exist_ok=True)
        machine = {"cores": os.cpu_count(), "python": platform.python_version(), "when": time.strftime("%Y-%m-%d")}
        kept = {"what": self.what, "machine": machine, "figures": told, "rows": self.rows}
        (RESULTS / f"{self.name}.json").write_text(json.dumps(kept, indent=1) + "\n")
