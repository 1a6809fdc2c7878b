"""``jllama data``."""

import collections
import dataclasses
import itertools
import json
from typing import Literal

from rich.console import Console
from rich.text import Text

from jllama.commands.cli import parse
from jllama.commands.terminal import CONTROLS
from jllama.errors import check_fields, no_tokenizer
from jllama.progress import progress


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Show what a model learns from a file of chats: the tokens and, in color, those that count.

    Examples:
        show chat.jsonl --model smollm2/
        show chats/ --model model.gguf --seq_len 512 --json

    Args:
        action: show.
        path: a .jsonl or Parquet file, packed or not, a folder or a glob of them.
        model: the checkpoint to train, in any format; its tokenizer and chat template are read, not its weights.
        chat_template: a template in place of the checkpoint's own: a file, or llama2, llama3 or chatml.
        count: how many conversations are shown.
        seq_len: as training.seq_len, to say how many are too long; 0 is the model's context.
        json: print JSON, an object for each conversation that is shown and one for all together.
    """

    action: Literal["show"]
    path: str
    model: str
    chat_template: str = ""
    count: int = 3
    seq_len: int = 0
    json: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "", "count seq_len", lambda value: value >= 0, "0 or more")


def main(argv: list[str], prog: str) -> int:
    """Tokenize every conversation as training does, show some, and say how much of all counts."""
    options = parse(DataOptions, argv, prog, ("action", "path"))
    from jllama.checkpoints.registry import open_checkpoint
    from jllama.data.chats import LOST, read_records, record_tokens
    from jllama.data.corpus import Findings, corpus_files
    from jllama.files import cache_folder
    from jllama.templates.messages import conversing

    checkpoint, console = open_checkpoint(options.model), Console(highlight=False)
    sums, findings = collections.Counter[str](), Findings("refuse")
    if (tokenizer := checkpoint.tokenizer) is None:
        raise no_tokenizer(options.model)
    template, stop_ids = conversing(
        tokenizer, checkpoint.chat_template, checkpoint.stop_ids, options.chat_template
    )
    names, seq_len = (
        {id: text for text, id in tokenizer.special_tokens.items()},
        checkpoint.config.max_seq_len,
    )
    is_plain, limit = (
        console.color_system is None or console.no_color,
        (options.seq_len or seq_len) + 1,
    )
    with progress("conversations read", console=console) as move:
        for record in read_records(
            corpus_files(options.path, cache_folder(), follow_links=True).values(),
            findings=findings,
        ):
            found = []
            with findings.noted():
                found = record_tokens(record, tokenizer, template, stop_ids, findings.notes)
            findings.notes[LOST] += not all(any(counted[1:limit]) for _, counted in found)
            sides = record.form if len(found) == 2 else ("",)
            if len(found) == 2:
                sums["pairs"] += 1
            for side, (ids, counted) in zip(sides, found, strict=False):
                move(1)
                sums.update(
                    conversations=1,
                    tokens=len(ids),
                    counted_tokens=sum(counted),
                    too_long=len(ids) > limit,
                )
                if sums["conversations"] <= options.count and options.json:
                    print(
                        json.dumps(
                            {"where": record.where, "side": side, "tokens": ids, "counted": counted}
                        )
                    )
                elif sums["conversations"] <= options.count:
                    title = (
                        f"pair {sums['pairs']}, {side}, {record.where}" if side else record.where
                    )
                    shown, end = Text(f"{title}: {sum(counted)} of {len(ids)} tokens count\n"), 0
                    for (name, counts), run in itertools.groupby(
                        zip(map(names.get, ids), counted, strict=True)
                    ):
                        start, end = end, end + len([*run])
                        before, until = tokenizer.decode(ids[:start]), tokenizer.decode(ids[:end])
                        text = CONTROLS.sub(
                            "", (name or "") * (end - start) or until.removeprefix(before)
                        )
                        shown.append(
                            f"⟦{text}⟧" if counts and is_plain else text,
                            "bold green" if counts else None,
                        )
                    console.print(
                        shown.plain.replace("⟧⟦", "") if is_plain else shown,
                        soft_wrap=True,
                        markup=False,
                    )
    notes = findings.finish()
    share = (
        f"{sums['counted_tokens'] / max(sums['tokens'], 1):.1%} of {sums['tokens']:,} tokens count"
    )
    pairs = f" in {sums['pairs']:,} pairs" if sums["pairs"] else ""
    lengths = f"{sums['too_long']:,} have over seq_len + 1 = {limit:,}"
    if options.json:
        print(json.dumps({**sums, "notes": notes} if notes else sums))
    else:
        print(
            "\n".join(
                [f"{sums['conversations']:,} conversations{pairs}: {share}, {lengths}", *notes]
            )
        )
    return 0
