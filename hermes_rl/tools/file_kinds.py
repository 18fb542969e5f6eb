"""What a file that is not text is, by its first bytes."""

from __future__ import annotations

import struct
from dataclasses import dataclass

SNIFF_BYTES = 8_192
"""A NUL among so many first bytes makes a file binary."""

_KINDS: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\x89PNG\r\n\x1a\n", "PNG image"),
    (0, b"\xff\xd8\xff", "JPEG image"),
    (0, b"GIF87a", "GIF image"),
    (0, b"GIF89a", "GIF image"),
    (8, b"WEBP", "WebP image"),
    (0, b"II*\0", "TIFF image"),
    (0, b"MM\0*", "TIFF image"),
    (0, b"BM", "BMP image"),
    (0, b"%PDF-", "PDF document"),
    (0, b"\x7fELF", "ELF program or library"),
    (0, b"\x1f\x8b", "gzip data"),
    (0, b"PK\x03\x04", "zip archive (also docx, xlsx, jar, whl)"),
    (0, b"BZh", "bzip2 data"),
    (0, b"\xfd7zXZ\0", "xz data"),
    (0, b"7z\xbc\xaf\x27\x1c", "7z archive"),
    (0, b"\x28\xb5\x2f\xfd", "Zstandard data"),
    (257, b"ustar", "tar archive"),
    (0, b"SQLite format 3\0", "SQLite database"),
    (0, b"\0asm", "WebAssembly module"),
    (0, b"\x93NUMPY", "NumPy array"),
    (0, b"PAR1", "Parquet file"),
    (0, b"ARROW1", "Arrow file"),
    (0, b"\x89HDF\r\n\x1a\n", "HDF5 file"),
    (8, b"WAVE", "WAV audio"),
    (0, b"OggS", "Ogg media"),
    (0, b"fLaC", "FLAC audio"),
    (0, b"ID3", "MP3 audio"),
    (4, b"ftyp", "MP4 media"),
)
"""Offset, bytes there, name."""
_JPEG_SIZES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
"""Markers of segments that have the dimensions (SOFn of ITU T.81)."""


@dataclass(frozen=True)
class Kind:
    """What a binary file is."""

    name: str
    width: int | None = None
    """Pixels; None where they were not found."""
    height: int | None = None

    @property
    def image(self) -> bool:
        """Whether it is an image."""
        return self.name.endswith(" image")


def kind_of(data: bytes) -> Kind | None:
    """What a file is; None for text.

    Args:
        data: its beginning. The dimensions of a JPEG may be far behind it.
    """
    if b"\0" not in data[:SNIFF_BYTES] and not data.startswith(b"%PDF-"):
        return None
    for offset, magic, name in _KINDS:
        if data.startswith(magic, offset):
            return Kind(name, *_dimensions(name, data))
    return Kind("binary file")


def _dimensions(name: str, data: bytes) -> tuple[int, int] | tuple[()]:
    try:
        if name.startswith("PNG"):
            width, height = struct.unpack_from(">II", data, 16)
        elif name.startswith("GIF"):
            width, height = struct.unpack_from("<HH", data, 6)
        elif name.startswith("JPEG"):
            return _of_jpeg(data)
        elif name.startswith("WebP"):
            return _of_webp(data)
        else:
            return ()
    except struct.error:  # it is cut off
        return ()
    return width, height


def _of_jpeg(data: bytes) -> tuple[int, int] | tuple[()]:
    at = 2
    while data[at : at + 1] == b"\xff":
        marker, size = struct.unpack_from(">BH", data, at + 1)
        if marker == 0xFF:  # fill
            at += 1
            continue
        if marker in _JPEG_SIZES:
            height, width = struct.unpack_from(">HH", data, at + 5)
            return width, height
        at += 2 + size
    return ()


def _of_webp(data: bytes) -> tuple[int, int] | tuple[()]:
    form = data[12:16]
    if form == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    if form == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if form == b"VP8X" and len(data) >= 30:
        return (
            int.from_bytes(data[24:27], "little") + 1,
            int.from_bytes(data[27:30], "little") + 1,
        )
    return ()
