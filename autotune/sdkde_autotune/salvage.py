"""Reads what is left in a damaged database.

SQLite stops at the first page that is bad. Here every page of the file and of its -wal is read by itself: if it is a
leaf of a table, its rows are there. A row may be there several times; none is ever deleted, so the latest counts.
The format: https://sqlite.org/fileformat2.html
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["rows"]

Value = int | float | str | bytes | None


def rows(path: Path) -> Iterator[tuple[Value, ...]]:
    """Yield the values of every row that can be read, of all tables, in no order; some more than once."""
    data = path.read_bytes()
    size = int.from_bytes(data[16:18])
    size = 65536 if size == 1 else size if size in [1 << bits for bits in range(9, 16)] else 4096
    pages = {start // size + 1: data[start : start + size] for start in range(0, len(data), size)}
    frames, wal = [], b""
    with suppress(OSError):
        wal = Path(f"{path}-wal").read_bytes()
    for start in range(32, len(wal) - 24, size + 24):  # a header of the file, and one of each page
        page = wal[start + 24 : start + 24 + size]
        pages[int.from_bytes(wal[start : start + 4])] = page
        frames.append(page)
    main = [data[start : start + size] for start in range(0, len(data), size)]
    for page in (*main, *frames):
        head = 100 if page.startswith(b"SQLite format 3") else 0
        if page[head : head + 1] == b"\x0d":  # a leaf of a table
            for cell in range(int.from_bytes(page[head + 3 : head + 5])):
                with suppress(IndexError, ValueError):
                    at = head + 8 + 2 * cell
                    yield _values(_payload(page, int.from_bytes(page[at : at + 2]), pages, size))


def _payload(page: bytes, at: int, pages: dict[int, bytes], size: int) -> bytes:
    """Return the bytes of a row; a long row has a part on other pages."""
    length, at = _varint(page, at)
    _, at = _varint(page, at)  # the rowid
    local, most = length, size - 35
    if length > most:
        least = (size - 12) * 32 // 255 - 23
        local = least + (length - least) % (size - 4)
        local = local if local <= most else least
    found = [page[at : at + local]]
    number, left = int.from_bytes(page[at + local : at + local + 4]), length - local
    for _ in range(len(pages)):  # at most, as a damaged chain may be a loop
        if left <= 0:
            break
        other = pages.get(number, b"")
        found.append(other[4 : 4 + left])
        number, left = int.from_bytes(other[:4]), left - len(other[4:])
    return b"".join(found)


def _values(row: bytes) -> tuple[Value, ...]:
    end, at = _varint(row, 0)
    body, found = end, []
    while at < end:
        kind, at = _varint(row, at)
        size = (0, 1, 2, 3, 4, 6, 8, 8, 0, 0, 0, 0)[kind] if kind < 12 else (kind - 12) // 2
        part, body = row[body : body + size], body + size
        if len(part) < size:
            raise ValueError("the row is cut off")
        found.append(_value(kind, part))
    return tuple(found)


def _value(kind: int, part: bytes) -> Value:
    if kind == 0:
        return None
    if kind == 7:
        return float(struct.unpack(">d", part)[0])
    if kind < 10:
        return kind - 8 if kind > 7 else int.from_bytes(part, signed=True)
    return part.decode() if kind % 2 else part


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the integer at a place, seven bits in a byte, and the place after it."""
    value = 0
    for at in range(at, at + 9):  # noqa: B020
        value = value << 7 | data[at] & 0x7F
        if data[at] < 0x80:
            break
    return value, at + 1
