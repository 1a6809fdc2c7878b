"""``python -m jllama data show``: what is shown of a file of chats, and what is wrong with one."""

import gzip
import itertools
import json

import jax
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from helpers import run_command, trained_smollm

import jllama
from jllama.commands import cli
from jllama.config import LlamaConfig
from jllama.model import initial_params
from jllama.templates.messages import TEMPLATES, conversation_tokens

TOKENIZER = trained_smollm(
    ["the goats live in a lighthouse with the keeper, don't they? 12 héllo\n" * 20], 350
)
TURNS = (
    "{% for m in messages %}{% if loop.index0 % 2 != (m.role == 'assistant') %}{{ "
    "raise_exception('take turns') }}"
)
TURNS += "{% endif %}{{ '<|im_start|>' + m.content + '<|im_end|>' }}{% endfor %}"


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


CHATS = [
    {
        "messages": [
            user("Who?"),
            assistant("The keeper é."),
            user("And?"),
            assistant("<|im_end|> Two goats \x1b[2J."),
        ]
    },
    {"prompt": "Where?", "completion": "In a lighthouse."},
    {"text": "the goats"},
    {"messages": [{"role": "system", "content": "Be brief."}, user("Why?"), assistant("12 " * 40)]},
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model, one whose template refuses, one without a tokenizer, and a file of chats."""
    folder = tmp_path_factory.mktemp("data")
    config = LlamaConfig(
        vocab_size=TOKENIZER.vocab_size, num_layers=1, embed_dim=32, mlp_dim=32, num_heads=2
    )
    shapes = jax.eval_shape(lambda key: initial_params(key, config), jax.random.key(0))
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    for name, tokenizer, template in [
        ("model", TOKENIZER, TEMPLATES["chatml"]),
        ("turns", TOKENIZER, TURNS),
    ]:
        jllama.save(jllama.LanguageModel(config, params, tokenizer, template), folder / name, "hf")
    jllama.save(jllama.LanguageModel(config, params), folder / "mute", "hf")
    write(folder / "chat.jsonl", CHATS)
    return folder


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def show(*arguments):
    """What the command gives: exit code, stdout and stderr."""
    done = run_command("data", "show", *arguments)
    assert "Traceback" not in done.err
    return done


def test_what_counts_is_marked(place):
    code, out, err = show(place / "chat.jsonl", "--model", place / "model")
    ids, counted = conversation_tokens(TOKENIZER, TEMPLATES["chatml"], CHATS[0]["messages"], [2])
    expected = f"""\
{place}/chat.jsonl line 1: {sum(counted)} of {len(ids)} tokens count
<|im_start|>user
Who?<|im_end|>
<|im_start|>assistant
⟦The keeper é.<|im_end|>⟧
<|im_start|>user
And?<|im_end|>
<|im_start|>assistant
⟦<|im_end|> Two goats [2J.<|im_end|>⟧
"""
    first, second, third = out.split(f"\n{place}/")
    *third, last = third.splitlines()
    assert (code, err) == (0, "")
    assert f"{first}\n" == f"{expected}\n"
    assert second.endswith("assistant\n⟦In a lighthouse.<|im_end|>⟧\n")
    assert third == ["chat.jsonl line 3: 3 of 4 tokens count", "<|im_start|>⟦the goats<|im_end|>⟧"]
    assert last.startswith("4 conversations: ")
    assert last.endswith(" tokens count, 0 have over seq_len + 1 = 257")


def test_json_is_what_training_gets(place):
    code, out, err = show(
        place / "chat.jsonl", "--model", place / "model", "--json", "--count", 9, "--seq_len", 80
    )
    *shown, sums = map(json.loads, out.splitlines())
    assert (code, err) == (0, "")
    assert [each["where"] for each in shown] == [
        f"{place}/chat.jsonl line {number}" for number in (1, 2, 3, 4)
    ]
    found = conversation_tokens(TOKENIZER, TEMPLATES["chatml"], CHATS[3]["messages"], [2])
    assert (shown[3]["tokens"], shown[3]["counted"]) == found
    assert sums == {
        "conversations": 4,
        "tokens": sum(len(each["tokens"]) for each in shown),
        "counted_tokens": sum(sum(each["counted"]) for each in shown),
        "too_long": 1,
    }


def test_at_a_terminal_there_is_color(place, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert (
        cli.run(
            "data",
            ["show", str(place / "chat.jsonl"), "--model", str(place / "model"), "--count", "1"],
        )
        == 0
    )
    out = capsys.readouterr().out
    assert (
        "\x1b[1;32mThe keeper "
        "é.\x1b[0m\x1b[1;32m<|im_end|>\x1b[0m\n<|im_start|>user\nAnd?<|im_end|>\n" in out
    )
    assert "\x1b[2J" not in out
    assert "⟦" not in out


def test_another_template_than_the_checkpoints(place, tmp_path, capsys):
    (tmp_path / "mine.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    )
    arguments = [
        "show",
        str(place / "chat.jsonl"),
        "--model",
        str(place / "model"),
        "--count",
        "2",
        "--chat_template",
    ]
    assert cli.run("data", [*arguments, str(tmp_path / "mine.jinja")]) == 0
    assert "user: Where?assistant: ⟦In a lighthouse.⟧" in capsys.readouterr().out
    assert cli.run("data", [*arguments, "chatml"]) == 0
    assert "<|im_start|>user\nWhere?<|im_end|>" in capsys.readouterr().out
    assert cli.run("data", [*arguments, "nowhere.jinja"]) == 1
    assert (
        "the template 'nowhere.jinja' cannot be read: give a file or one of chatml, "
        in capsys.readouterr().err
    )


def answer(shown):
    """The text that counts."""
    return TOKENIZER.decode(list(itertools.compress(shown["tokens"], shown["counted"])))


def test_every_kind_of_file_and_pairs(place, tmp_path, capsys):
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(json.dumps(CHATS[0]) + "\n")
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"messages": CHATS[0]["messages"]}]), tmp_path / "b.parquet"
    )
    write(
        tmp_path / "c.jsonl", [{"prompt": "Who?", "chosen": "The keeper.", "rejected": "Nobody."}]
    )
    assert (
        cli.run(
            "data",
            ["show", str(tmp_path), "--model", str(place / "model"), "--json", "--count", "9"],
        )
        == 0
    )
    first, second, chosen, rejected, sums = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["tokens"] == second["tokens"]
    assert second["where"] == f"{tmp_path}/b.parquet row 1"
    assert [answer(each) for each in (chosen, rejected)] == [
        "The keeper.",
        "Nobody.",
    ]
    assert sums["conversations"] == 4


def test_pairs_are_numbered_and_what_may_not_be_meant_is_said(place, tmp_path, capsys):
    pairs = [{"prompt": "Who?", "chosen": "The keeper.", "rejected": "Nobody."}]
    pairs += [
        {"prompt": "Why " * 50, "chosen": "", "rejected": "12"},
        {"prompt": "q", "chosen": "a", "rejected": "a"},
    ]
    pairs[1]["chosen"] = [assistant("")]
    path = write(tmp_path / "c.jsonl", pairs)
    arguments = [
        "show",
        str(path),
        "--model",
        str(place / "model"),
        "--count",
        "3",
        "--seq_len",
        "40",
    ]
    assert cli.run("data", arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0] for line in lines if line.endswith("tokens count")] == [
        f"pair 1, chosen, {path} line 1",
        f"pair 1, rejected, {path} line 1",
        f"pair 2, chosen, {path} line 2",
    ]
    said = lines.index(
        next(line for line in lines if line.startswith("6 conversations in 3 pairs: "))
    )
    assert sorted(lines[said + 1 :]) == [
        "answers that are empty: 1",
        "left out, as no token to learn is among the first training.seq_len + 1: 1",
        "pairs of two equal answers: 1",
    ]
    assert cli.run("data", [*arguments, "--json"]) == 0
    chosen, rejected, _, sums = map(json.loads, capsys.readouterr().out.splitlines())
    assert (chosen["side"], rejected["side"], sums["pairs"]) == ("chosen", "rejected", 3)
    assert "pairs of two equal answers: 1" in sums["notes"]


def test_all_bad_rows_are_named(place, tmp_path, capsys):
    deep = {"messages": CHATS[0]["messages"], "tools": "[" * 100_000}
    path = write(tmp_path / "bad.jsonl", [{"messages": [user("a")]}, CHATS[0], deep])
    assert (
        cli.run("data", ["show", str(path), "--model", str(place / "model"), "--count", "0"]) == 1
    )
    out, err = capsys.readouterr()
    assert out == ""
    first, *named = err.splitlines()
    assert first.startswith("error: 2 rows or files cannot be learned from: data.bad_rows skip")
    assert [line.removeprefix(f"{path} ")[:8] for line in named] == ["line 1: ", "line 3: "]


@pytest.mark.parametrize(
    ("records", "line", "said"),
    [
        (
            [CHATS[0], {"messages": [user("a")]}],
            2,
            "no message is the assistant's, so there is nothing to learn",
        ),
        (
            [{"messages": [{"role": "robot", "content": "a"}]}],
            1,
            "message 0 has the role 'robot'; it must be one of",
        ),
        (
            [{"messages": [user("a"), assistant(["a"])]}],
            1,
            "message 1 has a part that is not text: leave out images",
        ),
        (
            [{"messages": [user("a"), {"role": "assistant"}]}],
            1,
            "message 1 has 'role'; it must have just 'role' and",
        ),
        ([{"messages": []}], 1, "there are no messages: a conversation needs at least one"),
        ([{"message": "a"}], 1, "has message, where "),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else None,
)  # fmt: skip
def test_what_is_no_conversation_is_refused_by_its_line(
    place, tmp_path, capsys, records, line, said
):
    path = write(tmp_path / "bad.jsonl", records)
    assert (
        cli.run("data", ["show", str(path), "--model", str(place / "model"), "--count", "0"]) == 1
    )
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {path} line {line}")
    assert said in err
    assert err.count("\n") == 1


def test_lines_that_are_refused_as_users_see_it(place, tmp_path):
    """A line that is not JSON, and a template's own words."""
    (path := tmp_path / "bad.jsonl").write_text(json.dumps(CHATS[1]) + "\n\n{'messages': 1}\n")
    code, out, err = show(path, "--model", place / "model")
    assert (code, out.count("line 1"), err.count("\n")) == (1, 1, 1)
    assert err.startswith(f"error: {path} line 3 is not a JSON object: ")
    path = write(tmp_path / "turns.jsonl", [{"messages": [user("a"), user("b"), assistant("c")]}])
    code, out, err = show(path, "--model", place / "turns")
    assert (code, out) == (1, "")
    assert err == f"error: {path} line 1: the chat template refuses these messages: take turns\n"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["shw", "chat.jsonl", "--model", "model"], 2, "action is 'shw'; it must be one of show"),
        (["show", "chat.jsonl"], 2, "model is empty; it must be the checkpoint to train"),
        (
            ["show", "chat.jsonl", "--model", "model", "--count", "-1"],
            2,
            "count is -1; it must be 0 or more",
        ),
        (
            ["show", "chat.jsonl", "--model", "model", "--columns", "3"],
            2,
            "there is no option columns",
        ),
        (["show", "chat.jsonl", "--model", "nowhere"], 1, "there is no checkpoint at nowhere"),
        (["show", "chat.jsonl", "--model", "mute"], 1, "mute has no tokenizer"),
        (["show", "none.jsonl", "--model", "model"], 1, "'none.jsonl' has no files"),
        (["show", "plain.parquet", "--model", "model"], 1, "plain.parquet has title, where "),
    ],
)
def test_mistakes(place, monkeypatch, capsys, arguments, code, said):
    monkeypatch.chdir(place)
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"title": "a"}]), place / "plain.parquet"
    )
    assert cli.run("data", arguments) == code
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


def test_sums_are_written_for_a_base_and_for_rewards(tmp_path):
    assert cli.run("data", ["sums", str(tmp_path / "sums")]) == 0
    prompts, texts = (
        [json.loads(line) for line in (tmp_path / "sums" / name).read_text().splitlines()]
        for name in ("prompts.jsonl", "texts.jsonl")
    )
    right = {row["prompt"]: row["answer"] for row in prompts}
    assert all(f"<{sum(map(int, text[:-1].split('+')))}>" == right[text] for text in right)
    seen = [row["text"].partition("=")[0] + "=" for row in texts]
    assert len(right) == 500
    assert not right.keys() & {*seen}
    num_right = 0
    for row in texts:
        question, _, answer = row["text"].partition("=")
        num_right += answer == f"<{sum(map(int, question.split('+')))}>"
    assert 0.21 < num_right / len(texts) < 0.235  # two of nine
