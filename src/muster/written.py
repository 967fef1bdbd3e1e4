"""Where settings were written, so that an error can name the line."""

import re
from collections.abc import Iterator


class Source:
    """Where settings were written, so that an error can name the line."""

    def __init__(self, path: str, text: str = "") -> None:
        self.path = path
        self._lines = dict(_lines(text))

    def at(self, where: str) -> str:
        """``where`` is a key path such as ``run.ps[1]`` or ``hosts[0].address``."""
        probe = where
        while probe:
            if probe in self._lines:
                return f"{self.path}, line {self._lines[probe]}: {where}"
            probe = probe[: max(probe.rfind("."), probe.rfind("["), 0)]
        return f"{self.path}: {where}" if where else self.path


def _lines(text: str) -> Iterator[tuple[str, int]]:
    """(key path, line number) for each table and key of a TOML text: good for messages, not for parsing."""
    table, counts = "", dict[str, int]()
    last, item = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if head := re.match(r"\s*\[\[\s*([\w.\"' -]+?)\s*\]\]", line):
            name = head[1]
            table = f"{name}[{counts.get(name, 0)}]"
            counts[name] = counts.get(name, 0) + 1
            yield table, number
        elif head := re.match(r"\s*\[\s*([\w.\"' -]+?)\s*\]", line):
            table = head[1]
            yield table, number
        elif head := re.match(r"\s*([\w\"'-]+)\s*=", line):
            path = f"{table}.{head[1]}" if table else head[1]
            last, item = path, 0
            yield path, number
            for _ in re.findall(r'"[^"]*"|\'[^\']*\'', line.partition("=")[2].split("#")[0]):
                yield f"{last}[{item}]", number
                item += 1
        else:
            for _ in re.findall(r'"[^"]*"|\'[^\']*\'', line.split("#")[0]):
                if counts or table:
                    yield f"{last}[{item}]", number
                    item += 1
