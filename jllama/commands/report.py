"""``jllama report``: write a page about one or several runs, or send their metrics to a logger."""

import dataclasses
import operator
import sys
from pathlib import Path

from jllama.commands.cli import parse
from jllama.core import check_fields


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    """Write the page of a run again, or one page about several runs with their curves together.

    The page of a folder of speedrun is its report card.

    Examples:
        runs/quickstart
        runs/one runs/two --output compared.html
        runs/quickstart --logger tensorboard

    Args:
        runs: the folders of runs.
        output: the page to write; the default is report.html, in the folder of a single run, or
            in the current folder for several.
        logger: tensorboard, wandb or trackio, to send everything in metrics.jsonl to it as well.
    """

    runs: list[str]
    output: str = ""
    logger: str = ""


def main(argv: list[str], prog: str) -> int:
    """Write the page, and replay the metrics if a logger is named."""
    options = parse(ReportOptions, argv, prog, ("runs",))
    from jllama.formats.bucket import without_checkpoints
    from jllama.formats.run import read_config
    from jllama.system.files import METRICS, check_writable, errors_as, read_lines
    from jllama.system.places import as_place
    from jllama.system.remote import fetch
    from jllama.training.loggers import LOGGERS, check_logger, finite_numbers
    from jllama.training.report import REPORT, write_report

    places = [as_place(run) for run in dict.fromkeys(options.runs)]
    folders = [fetch(place, without_checkpoints) for place in places]
    if len(folders) == 1 and (folders[0] / "rewards.yaml").exists():
        from jllama.lab.report_card import write_card

        check_fields(options, "", "logger", operator.not_, "left out for a folder of speedrun")
        write_card(folders[0], Path(options.output or folders[0] / REPORT))
        return 0
    is_in_run = len(places) == 1 and isinstance(places[0], Path)
    target = Path(options.output or (folders[0] / REPORT if is_in_run else REPORT))
    check_logger(options.logger)
    check_writable(target)
    write_report(folders, target)
    print(f"wrote {target}", file=sys.stderr)
    if not options.logger:
        return 0
    for folder in folders:
        with errors_as(f"{options.logger} does not take {folder / METRICS}", Exception):
            write = LOGGERS[options.logger](folder, read_config(folder).fields, 0)
            for line in read_lines(folder / METRICS):
                write(line["step"], finite_numbers(line))
    return 0
