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
from jllama.core.config import LlamaConfig
from jllama.core.model import initial_params
from jllama.templates.messages import TEMPLATES, conversation_tokens

TOKENIZER = trained_smollm(
    ["the goats live in a lighthouse with the keeper, don't they? 12 héllo\n" * 20], 350
)
TURNS = """\
{% for m in messages %}\
{% if loop.index0 % 2 != (m.role == 'assistant') %}{{ raise_exception('take turns') }}{% endif %}\
{{ '<|im_start|>' + m.content + '<|im_end|>' }}\
{% endfor %}"""


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


TWO_ANSWERS = [
    *(user("Who?"), assistant("The keeper é.")),
    *(user("And?"), assistant("<|im_end|> Two goats \x1b[2J.")),
]
CHATS = [
    {"messages": TWO_ANSWERS},
    {"prompt": "Where?", "completion": "In a lighthouse."},
    {"text": "the goats"},
    {"messages": [{"role": "system", "content": "Be brief."}, user("Why?"), assistant("12 " * 40)]},
]
PAIR = {"prompt": "Who?", "chosen": "The keeper.", "rejected": "Nobody."}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model, one whose template refuses, one without a tokenizer, and a file of chats."""
    folder = tmp_path_factory.mktemp("data")
    config = LlamaConfig(
        vocab_size=TOKENIZER.vocab_size, num_layers=1, embed_dim=32, mlp_dim=32, num_heads=2
    )
    shapes = jax.eval_shape(lambda key: initial_params(key, config), jax.random.key(0))
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    for name, template in (("model", TEMPLATES["chatml"]), ("turns", TURNS)):
        model = jllama.LanguageModel(config, params, TOKENIZER, template)
        jllama.save(model, folder / name, "hf")
    jllama.save(jllama.LanguageModel(config, params), folder / "mute", "hf")
    write(folder / "chat.jsonl", CHATS)
    return folder


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def show(place):
    """What the command gives for a file and a model: exit code, stdout and stderr."""

    def run(path, *arguments, model="model"):
        done = run_command("data", "show", path, "--model", place / model, *arguments)
        assert "Traceback" not in done.err
        return done

    return run


def test_what_counts_is_marked(place, show):
    code, out, err = show(place / "chat.jsonl")
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


def test_json_is_what_training_gets(place, show):
    """A conversation that just fits is not too long."""
    path = place / "chat.jsonl"
    longest, counted = conversation_tokens(
        TOKENIZER, TEMPLATES["chatml"], CHATS[3]["messages"], [2]
    )
    for seq_len, num_long in ((len(longest) - 1, 0), (len(longest) - 2, 1)):
        code, out, err = show(path, "--json", "--count", 9, "--seq_len", seq_len)
        *shown, sums = map(json.loads, out.splitlines())
        assert (code, err) == (0, "")
        assert sums == {
            "conversations": 4,
            "tokens": sum(len(chat["tokens"]) for chat in shown),
            "counted_tokens": sum(sum(chat["counted"]) for chat in shown),
            "too_long": num_long,
        }
    assert [chat["where"] for chat in shown] == [f"{path} line {line}" for line in (1, 2, 3, 4)]
    assert (shown[3]["tokens"], shown[3]["counted"]) == (longest, counted)


def test_at_a_terminal_there_is_color(place, show, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    code, out, _ = show(place / "chat.jsonl", "--count", 1)
    assert code == 0
    green = "\x1b[1;32m"
    answer = f"{green}The keeper é.\x1b[0m{green}<|im_end|>\x1b[0m\n"
    assert f"{answer}<|im_start|>user\nAnd?<|im_end|>\n" in out
    assert "\x1b[2J" not in out
    assert "⟦" not in out


def test_another_template_than_the_checkpoints(place, show, tmp_path):
    own = tmp_path / "mine.jinja"
    own.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}")
    arguments = (place / "chat.jsonl", "--count", 2, "--chat_template")
    assert "user: Where?assistant: ⟦In a lighthouse.⟧" in show(*arguments, own).out
    assert "<|im_start|>user\nWhere?<|im_end|>" in show(*arguments, "chatml").out
    code, _, err = show(*arguments, "nowhere.jinja")
    problem = "the template 'nowhere.jinja' cannot be read: give a file or one of chatml, "
    assert (code, problem in err) == (1, True)


def answer(shown):
    """The text that counts."""
    return TOKENIZER.decode(list(itertools.compress(shown["tokens"], shown["counted"])))


def test_every_kind_of_file_and_pairs(show, tmp_path):
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(json.dumps(CHATS[0]) + "\n")
    table = pyarrow.Table.from_pylist([{"messages": TWO_ANSWERS}])
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    write(tmp_path / "c.jsonl", [PAIR])
    code, out, _ = show(tmp_path, "--json", "--count", 9)
    assert code == 0
    first, second, chosen, rejected, sums = map(json.loads, out.splitlines())
    assert first["tokens"] == second["tokens"]
    assert second["where"] == f"{tmp_path}/b.parquet row 1"
    assert [answer(side) for side in (chosen, rejected)] == ["The keeper.", "Nobody."]
    assert sums["conversations"] == 4


def test_pairs_are_numbered_and_what_may_not_be_meant_is_said(show, tmp_path):
    empty = {"prompt": "Why " * 50, "chosen": [assistant("")], "rejected": "12"}
    equal = {"prompt": "q", "chosen": "a", "rejected": "a"}
    path = write(tmp_path / "c.jsonl", [PAIR, empty, equal])
    arguments = (path, "--count", 3, "--seq_len", 40)
    code, out, _ = show(*arguments)
    assert code == 0
    lines = out.splitlines()
    assert [line.partition(": ")[0] for line in lines if line.endswith("tokens count")] == [
        f"pair 1, chosen, {path} line 1",
        f"pair 1, rejected, {path} line 1",
        f"pair 2, chosen, {path} line 2",
    ]
    sums, *notes = out.rpartition("6 conversations in 3 pairs: ")[2].splitlines()
    assert sums.endswith("have over seq_len + 1 = 41")
    assert sorted(notes) == [
        "answers that are empty: 1",
        "left out, as no token to learn is among the first training.seq_len + 1: 1",
        "pairs of two equal answers: 1",
    ]
    code, out, _ = show(*arguments, "--json")
    assert code == 0
    chosen, rejected, _, sums = map(json.loads, out.splitlines())
    assert (chosen["side"], rejected["side"], sums["pairs"]) == ("chosen", "rejected", 3)
    assert "pairs of two equal answers: 1" in sums["notes"]


def test_all_bad_rows_are_named(show, tmp_path):
    deep = {"messages": TWO_ANSWERS, "tools": "[" * 100_000}
    path = write(tmp_path / "bad.jsonl", [{"messages": [user("a")]}, CHATS[0], deep])
    code, out, err = show(path, "--count", 0)
    assert (code, out) == (1, "")
    first, *named = err.splitlines()
    assert first.startswith("error: 2 rows or files cannot be learned from: data.bad_rows skip")
    assert [line.removeprefix(f"{path} ")[:8] for line in named] == ["line 1: ", "line 3: "]


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([user("a")], "no message is the assistant's, so there is nothing to learn"),
        ([{"role": "robot", "content": "a"}], "0 has the role 'robot'; it must be one of"),
        ([user("a"), assistant(["a"])], "message 1 has a part that is not text: leave out images"),
        ([user("a"), {"role": "assistant"}], "message 1 has 'role'; it must have just 'role' and"),
        ([], "there are no messages: a conversation needs at least one"),
    ],
)
def test_what_is_no_conversation_is_refused_by_its_line(show, tmp_path, messages, problem):
    path = write(tmp_path / "bad.jsonl", [CHATS[0], {"messages": messages}])
    code, out, err = show(path, "--count", 0)
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {path} line 2")
    assert problem in err
    assert err.count("\n") == 1


def test_lines_that_are_refused_as_users_see_it(show, tmp_path):
    """A line that is not JSON, and a template's own words."""
    (path := tmp_path / "bad.jsonl").write_text(json.dumps(CHATS[1]) + "\n\n{'messages': 1}\n")
    code, out, err = show(path)
    assert (code, out.count("line 1"), err.count("\n")) == (1, 1, 1)
    assert err.startswith(f"error: {path} line 3 is not a JSON object: ")
    path = write(tmp_path / "turns.jsonl", [{"messages": [user("a"), user("b"), assistant("c")]}])
    code, out, err = show(path, model="turns")
    assert (code, out) == (1, "")
    assert err == f"error: {path} line 1: the chat template refuses these messages: take turns\n"


MISTAKES = """
2 shw chat.jsonl --model model -> action is 'shw'; it must be one of show
2 show chat.jsonl -> model is empty; it must be the checkpoint to train
2 show chat.jsonl --model model --count -1 -> count is -1; it must be 0 or more
2 show chat.jsonl --model model --columns 3 -> there is no option columns
1 show chat.jsonl --model nowhere -> there is no checkpoint at nowhere
1 show chat.jsonl --model mute -> mute has no tokenizer
1 show none.jsonl --model model -> 'none.jsonl' has no files
1 show plain.parquet --model model -> plain.parquet has title, where
"""


@pytest.mark.parametrize("line", MISTAKES.strip().splitlines())
def test_mistakes(place, line):
    table = pyarrow.Table.from_pylist([{"title": "a"}])
    pyarrow.parquet.write_table(table, place / "plain.parquet")
    words, problem = line.split(" -> ")
    code, *arguments = words.split()
    done = run_command("data", *arguments, place=place)
    assert (done.code, done.out, done.err.count("\n")) == (int(code), "", 1)
    assert problem in done.err


def test_sums_are_written_for_a_base_and_for_rewards(tmp_path):
    assert cli.run("data", ["sums", str(tmp_path / "sums")]) == 0
    prompts, texts = (
        [json.loads(line) for line in (tmp_path / "sums" / name).read_text().splitlines()]
        for name in ("prompts.jsonl", "texts.jsonl")
    )
    right = {row["prompt"]: row["answer"] for row in prompts}

    def answer_to(question):
        return f"<{sum(map(int, question.removesuffix('=').split('+')))}>"

    assert all(answer_to(question) == answer for question, answer in right.items())
    seen = [row["text"].partition("=")[0] + "=" for row in texts]
    assert len(right) == 500
    assert not right.keys() & {*seen}
    num_right = 0
    for row in texts:
        question, _, answer = row["text"].partition("=")
        num_right += answer == answer_to(question)
    assert 0.21 < num_right / len(texts) < 0.235  # two of nine
