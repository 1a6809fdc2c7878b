"""What to train on, as data."""

import dataclasses
import functools
from typing import Literal

from jllama.errors import check_fields


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The corpus, its tokenizer and its split.

    Args:
        path: a file, folder or glob of text, ``.jsonl`` or Parquet, packed or not; or ``stdlib`` (Python's own),
            ``tinyshakespeare`` (downloaded) or ``persona`` (chats).
        mixture: chats in place of ``path``: several such paths, each with its share of what is drawn.
        task: learn all of a ``text``, the answers of a ``chat``, or a ``preference`` between two answers; ``auto``
            goes by the fields of the first record.
        text_field: the field of each ``.jsonl`` object, or the column of a Parquet file, that holds the text.
        encoding: of text files, by Python's name (``latin-1``, say); rows are UTF-8.
        bad_rows: rows and files that cannot be learned from are all named and refused (``refuse``), or left out and
            counted (``skip``).
        follow_links: read files that links in a folder lead to outside it.
        tokenizer: ``bpe`` trains one as Llama 2's on the training split, ``bytes`` needs no training; or a path.
        vocab_size: tokens of the ``bpe`` to train.
        validation_fraction: the part of the text that is held out.
        too_long: a conversation of more than ``training.seq_len`` + 1 tokens loses its end (``cut``) or is left out
            (``drop``).
        chat_template: what turns chats into text in place of the checkpoint's own template: a file, or ``llama2``,
            ``llama3`` or ``chatml``. The run's folder keeps it as its own.
        packing: conversations share rows, each attending to itself alone; without, and for pairs, each has its own.
        cache_dir: for downloads, tokenizers and tokens; empty means ``$JLLAMA_CACHE`` or ``~/.cache/jllama``.
    """

    path: str = "stdlib"
    mixture: dict[str, float] = dataclasses.field(default_factory=dict)
    task: Literal["auto", "text", "chat", "preference"] = "auto"
    text_field: str = "text"
    encoding: str = "utf-8"
    bad_rows: Literal["refuse", "skip"] = "refuse"
    follow_links: bool = False
    tokenizer: str = "bpe"
    vocab_size: int = 4096
    validation_fraction: float = 0.1
    too_long: Literal["cut", "drop"] = "cut"
    chat_template: str = ""
    packing: bool = True
    cache_dir: str = ""

    def __post_init__(self) -> None:
        check = functools.partial(check_fields, self, "data.")
        check("path text_field tokenizer encoding", bool, "given, or left out for its default")
        check(
            "vocab_size",
            lambda size: size >= 260,
            "at least 260: 3 control tokens, 256 bytes, something to learn",
        )
        check(
            "validation_fraction",
            lambda fraction: 0 < fraction < 1,
            "between 0 and 1, both excluded",
        )
        check(
            "mixture",
            lambda weights: all(0 < each < 1e9 for each in weights.values()),
            "a positive number by path",
        )
        if self.mixture:
            check("path", "stdlib".__eq__, "left out with data.mixture, which has the paths")
            check(
                "task",
                lambda task: task != "text",
                "chat or preference, as data.mixture is of chats",
            )
