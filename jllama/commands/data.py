"""``jllama data``: show what a model learns from a chat file, or tokenize texts once."""

import collections
import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.text import Text

from jllama.commands.cli import parse
from jllama.commands.terminal import CONTROLS
from jllama.core import check_fields
from jllama.data.config import DataConfig
from jllama.data.tasks import write_lists, write_sums
from jllama.system.errors import no_tokenizer
from jllama.system.places import as_place
from jllama.system.progress import progress

if TYPE_CHECKING:
    from jllama.tokenizers.base import Tokenizer

_COMMON = (
    "model chat_template fields count seq_len json process data.text_field data.bad_rows "
    "data.tokenizer data.validation_fraction"
)

_TASKS = {"sums": write_sums, "lists": write_lists}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Show how training tokenizes a chat file; the tokens that a model learns from are green.

    Or write the tokens of a corpus, to train from as a stream. Or write small tasks to learn from
    rewards: the sums of docs/rewards.md as texts, or the lists of docs/speedrun.md as chats.

    Examples:
        show chat.jsonl --model smollm2/
        show chats/ --model model.gguf --seq_len 512 --json
        tokenize gs://bucket/texts gs://bucket/tokens --data.tokenizer smollm2/ --process 0/4
        sums my_sums/

    Args:
        action: show, tokenize, sums or lists.
        path: a .jsonl or Parquet file, packed or not, or a folder or a glob of such files; for
            tokenize any text; for sums and lists the folder to write.
        target: where tokenize writes: a folder or a URL. What is complete there stays.
        process: the shards that tokenize writes, as I/N: every N-th one from I on.
        data: how tokenize reads text, as options of training.
        model: the checkpoint to train, in any format. Its tokenizer and chat template are read,
            its weights are not.
        chat_template: a chat template in place of the checkpoint's own: a file, or llama2, llama3,
            chatml, mistral, phi4 or granite.
        fields: new names for fields, as data.fields of training.
        count: the number of conversations to show.
        seq_len: the tokens of a row, as training.seq_len, to count the conversations that are too
            long; 0 is the model's context.
        json: print JSON: an object for each conversation that is shown, and one with the totals.
    """

    action: Literal["show", "tokenize", "sums", "lists"]
    path: str
    target: str = ""
    process: str = "0/1"
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    model: str = ""
    chat_template: str = ""
    fields: dict[str, str] = dataclasses.field(default_factory=dict)
    count: int = 3
    seq_len: int = 0
    json: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "", "count seq_len", lambda value: value >= 0, "0 or more")
        if self.action == "show":
            check_fields(self, "", "model", bool, "the checkpoint to train")
        if self.action == "tokenize":
            check_fields(self, "", "target", bool, "the folder or URL to write")
        index, _, count = self.process.partition("/")
        is_share = index.isdigit() and count.isdigit() and int(index) < int(count)
        check_fields(self, "", "process", lambda _: is_share, "as 0/4, 1/4, 2/4 and 3/4 of four")


def main(argv: list[str], prog: str) -> int:
    """Tokenize every conversation as training does, show some, and count the tokens of all."""
    options = parse(DataOptions, argv, prog, ("action", "path", "target"), _COMMON)
    if options.action in _TASKS:
        _TASKS[options.action](Path(options.path))
        return 0
    if options.action == "tokenize":
        from jllama.data.token_shards import tokenize_shards

        config = dataclasses.replace(options.data, path=options.path)
        index, count = map(int, options.process.split("/"))
        tokenize_shards(config, as_place(options.target), index, count)
        return 0
    from jllama.data.chats import TOO_LONG_NOTE, read_records, record_tokens
    from jllama.data.corpus import Findings, corpus_files
    from jllama.formats.registry import open_checkpoint
    from jllama.system.files import cache_folder
    from jllama.templates.messages import chat_format

    # 1) Open the tokenizer and the chat template.
    checkpoint = open_checkpoint(options.model)
    tokenizer = checkpoint.tokenizer
    if tokenizer is None:
        raise no_tokenizer(options.model)
    template, stop_ids = chat_format(
        tokenizer, checkpoint.chat_template, checkpoint.stop_ids, options.chat_template
    )
    limit = (options.seq_len or checkpoint.config.max_seq_len) + 1

    # 2) Tokenize each record as training does.
    console = Console(highlight=False)
    totals = collections.Counter[str]()
    findings = Findings("refuse")
    files = corpus_files(options.path, cache_folder(), follow_links=True).values()
    with progress("conversations read", console=console) as move:
        for record in read_records(files, findings=findings, new_names=options.fields):
            conversations = []
            with findings.collect():
                conversations = record_tokens(record, tokenizer, template, stop_ids, findings.notes)
            learns = all(any(counted[1:limit]) for _, counted in conversations)
            findings.notes[TOO_LONG_NOTE] += not learns
            sides = ("",)
            if len(conversations) == 2:
                sides = record.form
                totals["pairs"] += 1

            # 3) Count its sides, and show the first ones.
            for side, (ids, counted) in zip(sides, conversations, strict=False):
                move(1)
                totals.update(
                    conversations=1,
                    tokens=len(ids),
                    counted_tokens=sum(counted),
                    too_long=len(ids) > limit,
                )
                if totals["conversations"] > options.count:
                    continue
                if options.json:
                    row = {"where": record.where, "side": side, "tokens": ids, "counted": counted}
                    print(json.dumps(row))
                else:
                    title = f"pair {totals['pairs']}, {side}, " if side else ""
                    _show(console, tokenizer, f"{title}{record.where}", ids, counted)

    # 4) Print the totals.
    notes = findings.finish()
    if options.json:
        print(json.dumps({**totals, "notes": notes} if notes else totals))
        return 0
    share = totals["counted_tokens"] / max(totals["tokens"], 1)
    pairs = f" in {totals['pairs']:,} pairs" if totals["pairs"] else ""
    summary = (
        f"{totals['conversations']:,} conversations{pairs}: "
        f"{share:.1%} of {totals['tokens']:,} tokens count, "
        f"{totals['too_long']:,} have over seq_len + 1 = {limit:,}"
    )
    print(summary, *notes, sep="\n")
    return 0


def _show(
    console: Console, tokenizer: "Tokenizer", title: str, ids: list[int], counted: Sequence[bool]
) -> None:
    """Print a conversation with its counted tokens in green, or in brackets without colors."""
    is_plain = console.color_system is None or console.no_color
    names = {id: text for text, id in tokenizer.special_tokens.items()}
    shown = Text(f"{title}: {sum(counted)} of {len(ids)} tokens count\n")
    start = 0
    # Each group is a run of equal special tokens, or of other tokens, that all count or all do not.
    tokens = zip(map(names.get, ids), counted, strict=True)
    for (name, counts), group in itertools.groupby(tokens):
        length = len([*group])
        if name:
            text = name * length
        else:
            before = tokenizer.decode(ids[:start])
            text = tokenizer.decode(ids[: start + length]).removeprefix(before)
        start += length
        text = CONTROLS.sub("", text)
        if counts and is_plain:
            text = f"⟦{text}⟧"
        shown.append(text, "bold green" if counts else None)
    # Adjacent groups that count share their brackets.
    output = shown.plain.replace("⟧⟦", "") if is_plain else shown
    console.print(output, soft_wrap=True, markup=False)
