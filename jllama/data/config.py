"""What to train on, as data."""

from __future__ import annotations

import dataclasses

from jllama.errors import UsageError, check_fields


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The corpus, its tokenizer and its split.

    Args:
        path: a text file, a ``.jsonl`` file, either of them packed (``.gz``, ``.zst``), a Parquet file, a folder or a
            glob of them; or ``stdlib``, the source of Python's own standard library (12 MB, already on this machine),
            or ``tinyshakespeare`` (1 MB, downloaded once).
        text_field: the field of each ``.jsonl`` object, or the column of a Parquet file, that holds the text.
        tokenizer: ``bpe`` trains one as Llama 2's on the training split, ``bytes`` needs no training, and anything
            else is the path of one to load.
        vocab_size: tokens of the ``bpe`` to train.
        validation_fraction: the part of the text that is held out.
        cache_dir: where downloads, tokenizers and tokens are kept; empty means ``$JLLAMA_CACHE`` or
            ``~/.cache/jllama``.
    """

    path: str = "stdlib"
    text_field: str = "text"
    tokenizer: str = "bpe"
    vocab_size: int = 4096
    validation_fraction: float = 0.1
    cache_dir: str = ""

    def __post_init__(self) -> None:
        for name in ("path", "text_field", "tokenizer"):
            if not getattr(self, name):
                raise UsageError(f"data.{name} is empty: leave it out for its default, or give it a value")
        least = "at least 260, for 3 control tokens, 256 bytes and something to learn"
        check_fields(self, "data.", "vocab_size", lambda size: size >= 260, least)
        between = "between 0 and 1, both excluded"
        check_fields(self, "data.", "validation_fraction", lambda fraction: 0 < fraction < 1, between)
