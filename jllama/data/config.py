"""What to train on, as data."""

import dataclasses
import functools

from jllama.errors import check_fields


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The corpus, its tokenizer and its split.

    Args:
        path: a text or ``.jsonl`` file, packed (``.gz``, ``.zst``) or not, a Parquet file, a folder or a glob of them;
            ``stdlib``, Python's own library (12 MB, on this machine), or ``tinyshakespeare`` (1 MB, downloaded once).
        text_field: the field of each ``.jsonl`` object, or the column of a Parquet file, that holds the text.
        tokenizer: ``bpe`` trains one as Llama 2's on the training split, ``bytes`` needs no training; or a path.
        vocab_size: tokens of the ``bpe`` to train.
        validation_fraction: the part of the text that is held out.
        cache_dir: for downloads, tokenizers and tokens; empty means ``$JLLAMA_CACHE`` or ``~/.cache/jllama``.
    """

    path: str = "stdlib"
    text_field: str = "text"
    tokenizer: str = "bpe"
    vocab_size: int = 4096
    validation_fraction: float = 0.1
    cache_dir: str = ""

    def __post_init__(self) -> None:
        check = functools.partial(check_fields, self, "data.")
        check("path text_field tokenizer", bool, "given, or left out for its default")
        check("vocab_size", lambda size: size >= 260, "at least 260: 3 control tokens, 256 bytes, something to learn")
        check("validation_fraction", lambda fraction: 0 < fraction < 1, "between 0 and 1, both excluded")
