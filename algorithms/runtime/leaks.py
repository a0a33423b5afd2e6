"""Whether an actor has grown so much that another one should take its place: some environments leak."""

from utils import descriptors
from utils.memory import held_bytes

MIB = 1 << 20


class LeakWatch:
    """Compares what a process holds with what it held when it was first looked at.

    Args:
        most_bytes: by which it may grow, its children included.
        flag: that says so, in the message.
    """

    def __init__(self, most_bytes: int, flag: str) -> None:
        self.most_bytes, self.flag = most_bytes, flag
        self._bytes_before: int | None = None

    def reason(self) -> str | None:
        """Why it should be replaced, or None."""
        held = held_bytes()
        if self._bytes_before is None:
            self._bytes_before = held
        grown = held - self._bytes_before
        if grown > self.most_bytes:
            return f"its memory has grown by {grown // MIB} MiB ({self.flag})"
        open_files, limit = descriptors.num_open(), descriptors.limit()
        if limit is not None and 2 * open_files > limit:
            return f"it has {open_files} open files of {limit}"
        return None
