"""Server-sent events, from bytes to JSON events, and the rule of what is a whole answer.

Linear in the bytes received, whatever the split: chunks may cut a UTF-8 character, the word
`data:` or a line end; lines may end in LF, CRLF or CR; a BOM, comments, other fields and several
`data:` lines an event are allowed. Decoding happens a line at a time, so no character is cut.

Does not know HTTP or chat. Source: the event-stream format of the HTML standard, own code.
"""

from __future__ import annotations

_BOM = b"\xef\xbb\xbf"


class EventStream:
    """Takes bytes as they come, gives the `data` of each finished event."""

    __slots__ = ("_buffer", "_data", "_held", "_started", "_was_cr", "pending_bytes")

    def __init__(self) -> None:
        self._buffer: list[bytes] = []  # pieces of the unfinished line
        self._data: list[str] = []
        self._held = 0  # characters in `_data`, counted as they come: a sum a chunk is quadratic
        self._started = False
        self._was_cr = False
        self.pending_bytes = 0
        """Bytes held of events that are not finished, for the caller's limit."""

    def feed(self, chunk: bytes) -> list[str]:
        """Return the data of the events that this chunk finished."""
        if not chunk:
            return []
        if self._was_cr:  # CRLF cut between its two bytes is one line end
            self._was_cr = False
            if chunk[:1] == b"\n":
                chunk = chunk[1:]
        if chunk[-1:] == b"\r":
            self._was_cr = True
        events: list[str] = []
        lines = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for line in lines[:-1]:
            self._buffer.append(line)
            self._line(b"".join(self._buffer), events)
            self._buffer.clear()
        if lines[-1]:
            self._buffer.append(lines[-1])
        self.pending_bytes = (
            self.pending_bytes + len(chunk) if len(lines) == 1 else len(lines[-1]) + self._held
        )
        return events

    def close(self) -> list[str]:
        """Return what stands in an event that the end of the stream left open.

        The standard drops it; servers forget the last empty line, so a whole `data:` line counts.
        """
        events: list[str] = []
        if self._buffer:
            self._line(b"".join(self._buffer), events)
            self._buffer.clear()
        self._line(b"", events)
        return events

    def _line(self, raw: bytes, events: list[str]) -> None:
        if not self._started:
            self._started = True
            raw = raw.removeprefix(_BOM)
        if not raw:
            if self._data:
                events.append("\n".join(self._data))
                self._data.clear()
                self._held = 0
            return
        before = len(self._data)
        if raw.startswith(b"data:"):
            self._data.append(raw[5:].removeprefix(b" ").decode("utf-8", "replace"))
        elif raw == b"data":
            self._data.append("")
        elif raw.startswith(b"error:"):  # llama.cpp's server names the field after what it is
            said = raw[6:].strip().decode("utf-8", "replace")
            self._data.append('{"error": ' + (said or '"no reason given"') + "}")
        if len(self._data) > before:
            self._held += len(self._data[-1])
