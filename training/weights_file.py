"""What a file of weights or a checkpoint is, by its first and last bytes.

Read without torch: the check of a task reads files on the launcher's machine.
"""

import json
from contextlib import suppress
from pathlib import Path
from zipfile import BadZipFile, ZipFile

ZIP = b"PK\3\4"
PICKLE = b"\x80"
MOST_HEADER_BYTES = 1 << 27  # of safetensors, which allow 100 MB


def why_no_weights(path: Path) -> str:
    """Return why no weights can be read from a file; empty if they may be, as far as is seen."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(512)
        if head[8:9] == b"{":
            length = int.from_bytes(head[:8], "little")
            file.seek(8)
            header = file.read(min(length, MOST_HEADER_BYTES))
            return "" if size == 8 + length + _tensor_bytes(header) else "not whole, as safetensors"
    if not head.startswith((ZIP, PICKLE)):
        return f"not a file of weights and plain data: {kind_of(head)}"
    if head.startswith(ZIP):
        try:
            with ZipFile(path) as entries:
                names = entries.namelist()
        except (BadZipFile, ValueError):
            return "not whole, as torch.save writes files; download or save it again"
        if not any(name.endswith("/data.pkl") for name in names):
            return "not a file of weights and plain data: torch.save did not write it"
    return ""


def _tensor_bytes(header: bytes) -> int:
    # Of all tensors that a header of safetensors describes; -1 for no header.
    with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
        tensors = json.loads(header)
        ends = [each["data_offsets"][1] for name, each in tensors.items() if name != "__metadata__"]
        return max(map(int, ends), default=0)
    return -1


def kind_of(data: bytes, refused: str = "") -> str:
    """Return what kind of file torch refused, because of what, and what would be accepted."""
    if not data:
        return "it is empty"
    if data.startswith(b"GGUF"):
        return "GGUF; files of torch.save and safetensors are read"
    if data.startswith(b"version https://git-lfs."):
        return "a pointer of Git LFS; type git lfs pull"
    if data.lstrip()[:1] == b"<":
        return "a web page; download the file that the page links to"
    if not data.startswith((ZIP, PICKLE)):
        return "torch.save did not write it, nor safetensors; download or save it again"
    holds = f"it holds {refused}" if refused else "it is damaged, or holds more than that"
    return f"{holds}, which could be code and is not run; save the state_dict() alone"
