"""``jllama cache``."""

import dataclasses
import shutil
from typing import Literal

from rich.filesize import decimal

from jllama.commands.cli import parse
from jllama.files import cache_folder

_HEX = "[0-9a-f]"
_KINDS = {kind: f"{kind}*/{_HEX * 64}" for kind in ("weights", "programs")} | {
    "compiled": "compiled/*-cache"
}
_KINDS |= {kind: f"{kind}-{_HEX * 16}" for kind in ("tokens", "chats", "bpe")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """Show what is kept in the cache folder so that it is made only once, or remove it.

    Examples:
        ls
        clear weights

    Args:
        action: ls shows the kinds with their sizes; clear removes them, to be made again when they are needed.
        kind: which one; without it all. Downloads and what you typed in chats are none of them, and stay.
    """

    action: Literal["ls", "clear"]
    kind: Literal["weights", "programs", "compiled", "tokens", "chats", "bpe"] | None = None


def main(argv: list[str], prog: str) -> int:
    """Show, and clear."""
    options, total = parse(CacheOptions, argv, prog, ("action", "kind")), 0
    for kind in [options.kind] if options.kind else _KINDS:
        paths = [*cache_folder().glob(_KINDS[kind])]
        files = (file for path in paths for file in (path.iterdir() if path.is_dir() else [path]))
        total += (size := sum(file.stat().st_size for file in files))
        for path in paths if options.action == "clear" else []:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        print(f"{kind:8} {len(paths):6} {decimal(size):>9}")
    print(
        f"{decimal(total)} {'cleared from' if options.action == 'clear' else 'in'} {cache_folder()}"
    )
    return 0
