"""Which lines of a task are TensorFlow's own notices: kept in the logs, left out on the screen."""

import re

CHATTER = re.compile(
    r"[IW]\d{4} [\d:.]+ +\d+ [\w.]+:\d+\] |\d{4}-\d\d-\d\d [\d:.]+: [IW] |To enable the following instructions: "
    r"|WARNING: All log messages before absl::InitializeLog"
)


def is_chatter(line: str) -> bool:
    """TensorFlow's own notices and warnings, in C++ log format: kept in the logs, left out on the screen."""
    return CHATTER.match(line) is not None


# What TensorFlow prints on the lines after a notice: a configuration in protobuf's text form, a list of tasks, a node.
CONFIG = re.compile(
    r"(device_count|gpu_options|experimental|pluggable_device_options|rpc_options|graph_options) \{"
    r"|allow_soft_placement: |(intra|inter)_op_parallelism_threads: "
    r"|isolate_session_state: |/job:\w+/replica:\d+/task:\d+|\s*\[\[\{\{node |$"
)


class Chatter:
    """Tells TensorFlow's own notices, with the lines that belong to them, from what a script prints."""

    def __init__(self) -> None:
        self._within = False  # a notice has just been, and its further lines may follow
        self._depth = 0

    def takes(self, line: str) -> bool:
        if not (is_chatter(line) or (self._within and (self._depth > 0 or CONFIG.match(line)))):
            self._within = False
            return False
        self._within = True
        self._depth = (
            max(0, self._depth + line.count("{") - line.count("}")) if not line.lstrip().startswith("[[") else 0
        )
        return True
