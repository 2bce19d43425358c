"""Headers of JPEGs, in a form that shows if a decoder would take them (ITU-T T.81, annex B)."""

from functools import lru_cache

HUFFMAN, QUANTIZATION = 0xC4, 0xDB
FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
REMARKS = {*range(0xE0, 0xF0), 0xFE}  # APPn and COM, which no decoding depends on
_SLOTS = 4  # for tables of a kind
_DC_SYMBOLS = 16
_LENGTHS = 16  # bits of the longest code
_MOST_CODES = 256

Part = tuple[int, bytes]


def part(marker: int, segment: bytes) -> Part:
    """Return what one segment has to do with whether an image can be decoded.

    That is the same for most images of a data set: sizes and contents of tables are left out.
    `segment` is what follows its length.
    """
    if marker in (HUFFMAN, QUANTIZATION):
        return marker, _slots(marker, segment)
    if marker in FRAMES:
        return marker, segment[:1] + segment[5:]
    return marker, segment


@lru_cache(1024)  # most files have the same few
def _slots(marker: int, segment: bytes) -> bytes:
    """Return the classes and slots of a segment's tables; of a damaged one, all of it."""
    table_ids, at = bytearray(), 0
    while at < len(segment):
        kind, slot = divmod(segment[at], 16)
        size = 64 << kind if marker == QUANTIZATION else _huffman_size(segment, at + 1, kind)
        if kind > 1 or slot >= _SLOTS or not size:
            return segment
        table_ids.append(segment[at])
        at += 1 + size
    return bytes(table_ids) if at == len(segment) else segment


def _huffman_size(segment: bytes, at: int, kind: int) -> int:
    """Return the bytes of a Huffman table; 0 for one whose codes are no prefix code (annex C)."""
    counts = segment[at : at + _LENGTHS]
    code = 0
    for length, count in enumerate(counts, start=1):
        code += count
        if code > 1 << length:
            return 0
        code <<= 1
    total = sum(counts)
    symbols = segment[at + _LENGTHS : at + _LENGTHS + total]
    sound = total <= _MOST_CODES and (kind or all(symbol < _DC_SYMBOLS for symbol in symbols))
    return _LENGTHS + total if sound else 0
