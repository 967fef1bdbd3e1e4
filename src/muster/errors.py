"""One family of errors. Each says what is wrong, at which host or file, because of what, and what to try."""


class MusterError(Exception):
    """A request that cannot be met, told in four rows.

    ``what`` is one sentence; ``at`` names the file (and line), key or host; ``because`` is the evidence;
    ``try_`` is what the reader can do next. Shown to users as it is, never with a traceback.
    """

    exit_code = 2

    def __init__(self, what: str, *, at: str = "", because: str = "", try_: str = "") -> None:
        super().__init__(what)
        self.what, self.at, self.because, self.try_ = what, at, because, try_

    def __str__(self) -> str:
        rows = [("at", self.at), ("because", self.because), ("try", self.try_)]
        return "\n".join([self.what, *(_row(label, text) for label, text in rows if text)])

    def as_json(self) -> dict[str, object]:
        """The same for a program, under the names that the result of a run has."""
        rows = {"cause": self.what, "at": self.at, "because": self.because, "try": self.try_}
        return {
            "ok": False,
            "result": "refused" if self.exit_code == 2 else "failed",
            **rows,
            "exit_code": self.exit_code,
        }

    def __reduce__(self) -> tuple[object, ...]:
        return (_again, (type(self), self.what, self.at, self.because, self.try_))


class Refused(MusterError):
    """Bad input: found before anything was started, so nothing was lost."""


class RunFailed(MusterError):
    """Something that had been started went wrong."""

    exit_code = 1


def _row(label: str, text: str) -> str:
    first, *more = text.splitlines()
    return "\n".join([f"  {label:<8}  {first}", *(" " * 12 + line for line in more)])


def _again(kind: type[MusterError], what: str, at: str, because: str, try_: str) -> MusterError:
    return kind(what, at=at, because=because, try_=try_)


def nearest(word: str, known: "list[str] | tuple[str, ...]") -> str:
    """The known word that a slip of the finger most likely meant, or an empty string."""
    import difflib

    lowered = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), list(lowered), n=1, cutoff=0.6)
    if found:
        return lowered[found[0]]
    prefixes = [name for low, name in lowered.items() if word.lower().startswith(low) or low.startswith(word.lower())]
    return prefixes[0] if word and prefixes else ""
