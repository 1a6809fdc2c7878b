"""Options of the training data."""

import dataclasses
import functools
from typing import Literal

from jllama.core import check_fields
from jllama.system.places import as_place, local_path


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The corpus, its tokenizer and its split.

    Args:
        path: a file, folder, glob or URL of text, ``.jsonl`` or Parquet, compressed or not; or
            ``stdlib``, ``tinyshakespeare`` (downloaded) or ``persona`` (chats).
        mixture: chats, or streams of text, from several paths, in place of ``path``: the share of
            each that is drawn.
        stream: read text as a stream, shard by shard, instead of tokenizing all of it first. Text
            at a URL is always read so.
        task: learn all of a ``text``, the answers of a ``chat``, or a ``preference`` between two
            answers; ``auto`` decides by the fields of the first record.
        text_field: the field of each ``.jsonl`` object, or the column of a Parquet file, that holds
            the text.
        fields: new names for fields of chats, pairs and prompts, as in ``{"question": "prompt",
            "answer": "completion"}``.
        encoding: the encoding of text files, by Python's name (``latin-1``, say); rows are UTF-8.
        bad_rows: rows and files that cannot be learned from are all named and refused
            (``refuse``), or left out and counted (``skip``).
        follow_links: read files outside a folder that links in it lead to.
        tokenizer: ``bpe`` trains one like Llama 2's, on the training split or the beginning of a
            stream, ``bytes`` needs no training; or the path of a tokenizer.
        vocab_size: the number of tokens of the ``bpe`` to train.
        validation_fraction: the part of the text that is held out.
        too_long: a conversation of more than ``training.seq_len`` + 1 tokens loses its end
            (``cut``) or is left out (``drop``).
        chat_template: the template that turns chats into text, in place of the checkpoint's own: a
            file, or ``llama2``, ``llama3``, ``chatml``, ``mistral``, ``phi4`` or ``granite``. The
            run's folder stores it as its own.
        packing: conversations share rows, each attending only to itself; if false, and for pairs,
            each has its own row.
        cache_dir: the folder for downloads, tokenizers and tokens; empty means ``$JLLAMA_CACHE``
            or ``~/.cache/jllama``.

    >>> DataConfig("stories.txt", tokenizer="bytes").validation_fraction
    0.1
    """

    path: str = "stdlib"
    mixture: dict[str, float] = dataclasses.field(default_factory=dict)
    stream: bool = False
    task: Literal["auto", "text", "chat", "preference"] = "auto"
    text_field: str = "text"
    fields: dict[str, str] = dataclasses.field(default_factory=dict)
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
        for place in (self.path, self.tokenizer, *self.mixture):
            as_place(place)
        local_path(self.cache_dir)
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
            lambda weights: all(0 < weight < 1e9 for weight in weights.values()),
            "a positive number by path",
        )
        if self.mixture:
            check(
                "path",
                lambda path: path == "stdlib",
                "left out with data.mixture, which has the paths",
            )
            check(
                "task",
                lambda task: task != "text" or self.stream,
                "chat or preference, as data.mixture is of chats unless data.stream is true",
            )
