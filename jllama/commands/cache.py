"""``jllama doctor cache``: list or remove cached files."""

import dataclasses
import shutil
from typing import Literal

from rich.filesize import decimal

from jllama.commands.cli import parse
from jllama.system.files import cache_folder
from jllama.system.remote import list_files

_HEX = "[0-9a-f]"
_KINDS = {
    "weights": f"weights*/{_HEX * 64}",
    "programs": f"programs*/{_HEX * 64}",
    "compiled": "compiled/*-cache",
    "tokens": f"tokens-{_HEX * 16}",
    "chats": f"chats-{_HEX * 16}",
    "bpe": f"bpe-{_HEX * 16}",
    "places": f"places/{_HEX * 16}",
}
"""The files or folders of each kind, as a pattern below the cache folder."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """List the files in the cache folder, or remove them; they are made again when needed.

    Examples:
        ls
        clear weights

    Args:
        action: ls lists each kind with its number of entries and size; clear removes them, too.
        kind: the only kind to list or remove; the default is all. Downloads and the history of
            chats belong to no kind and are never removed.
    """

    action: Literal["ls", "clear"]
    kind: Literal["weights", "programs", "compiled", "tokens", "chats", "bpe", "places"] | None = (
        None
    )


def main(argv: list[str], prog: str) -> int:
    """List or remove cached files."""
    options = parse(CacheOptions, argv, prog, ("action", "kind"))
    clears = options.action == "clear"
    total_bytes = 0
    for kind, pattern in _KINDS.items():
        if options.kind not in (None, kind):
            continue
        paths = [*cache_folder().glob(pattern)]
        kind_bytes = 0
        for path in paths:
            kind_bytes += sum(size for size, _ in list_files(path).values())
            if clears and path.is_dir():
                shutil.rmtree(path)
            elif clears:
                path.unlink()
        total_bytes += kind_bytes
        print(f"{kind:8} {len(paths):6} {decimal(kind_bytes):>9}")
    print(f"{decimal(total_bytes)} {'cleared from' if clears else 'in'} {cache_folder()}")
    return 0
