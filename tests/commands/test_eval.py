"""``python -m jllama eval`` on a text: what it prints, that options count, and when it fails."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jllama
from jllama.commands import cli
from jllama.core import JllamaError
from jllama.core.config import LlamaConfig
from jllama.lab.checks import random_params
from jllama.models import oracle
from jllama.models.language_model import LanguageModel
from jllama.score import benchmarks
from jllama.score.benchmarks import evaluate
from jllama.score.scoring import sliding_windows
from jllama.tokenizers.base import BytesTokenizer

pytestmark = pytest.mark.usefixtures("loads_once")
TEXT = "The quick brown fox jumps over the lazy dog, and the dog says: 'Füße!' 🙂\n"
CONFIG = LlamaConfig(
    vocab_size=259, num_layers=1, embed_dim=32, num_heads=2, mlp_dim=64, max_seq_len=32
)
PARAMS = random_params(CONFIG, 0)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A random model with and without its tokenizer, and texts."""
    folder = tmp_path_factory.mktemp("eval")
    params = jax.tree.map(jnp.asarray, PARAMS)
    jllama.save(LanguageModel(CONFIG, params, BytesTokenizer()), folder / "model", "hf")
    jllama.save(LanguageModel(CONFIG, params), folder / "bare", "hf")
    (folder / "text.txt").write_text(TEXT)
    documents = [{"text": TEXT, "other": "a"}, {"text": "second", "other": "bc"}]
    write_rows(folder / "documents.jsonl", documents)
    (folder / "empty.txt").write_text("")
    (folder / "latin.txt").write_bytes("café".encode("latin-1"))
    (folder / "bad.jsonl").write_text('{"text": "a"}\nnot json\n')
    return folder


@pytest.fixture
def measure(place, capsys):
    def run(data="text.txt", *arguments, model=place / "model", loaded=""):
        words = [model, "--data", place / data, "--json", "--batch_size", "2", *arguments]
        assert cli.run("eval", [*map(str, words)]) == 0
        printed = capsys.readouterr()
        assert printed.err == f"{model}{loaded}\n"
        result = json.loads(printed.out)
        assert result.pop("tokens_per_s") > 0
        return result

    return run


def test_the_numbers_are_the_oracles(measure):
    """Windows of 32 with half a window of context: what is printed is what the definition says."""
    ids = np.array([1, *BytesTokenizer().encode(TEXT)])
    nats = 0.0
    for start, first, end in ((0, 1, 33), (16, 33, 49), (32, 49, 65), (46, 65, 79)):
        row = ids[start:end]
        logits = oracle.forward(PARAMS, row[None, :-1], CONFIG)[0]
        is_new = np.arange(start + 1, start + len(row)) >= first
        nats += oracle.cross_entropy(logits, row[1:], is_new)[0]
    result = measure()
    tokens = len(ids) - 1
    assert tokens == len(TEXT.encode()) == 78
    sizes = [result[name] for name in ("tokens", "bytes", "window", "stride")]
    assert sizes == [tokens, tokens, 32, 16]
    assert result["loss"] == pytest.approx(nats / tokens, rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / tokens, rel=1e-5)


def test_every_option_changes_something(measure):
    plain = measure()
    for name, value in (("window", 20), ("stride", 5), ("dtype", "bfloat16"), ("quantize", "int8")):
        result = measure("text.txt", f"--{name}", value)
        assert result != plain, name
    assert result["loss"] == pytest.approx(plain["loss"], rel=0.01)
    part = measure("text.txt", "--max_tokens", 30)
    assert (part["tokens"], part["loss"] != plain["loss"]) == (30, True)
    assert measure("text.txt", "--batch_size", 1)["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    assert measure("documents.jsonl", "--text_field", "other")["tokens"] == 3


def test_documents_are_scored_each_by_itself(measure):
    whole, part = measure("documents.jsonl"), measure()
    assert whole["tokens"] == 78 + 6
    assert measure("documents.jsonl", "--max_tokens", 78) == part
    assert whole["loss"] != part["loss"]


def test_a_step_of_a_run(small_run, measure):
    run = small_run.folder
    losses = [
        measure("text.txt", "--step", step, model=run, loaded=f", step {step}")["loss"]
        for step in (15, 20)
    ]
    assert losses[0] != losses[1]


def test_the_table(place, capsys):
    words = [place / "model", "--data", place / "text.txt", "--batch_size", "2"]
    assert cli.run("eval", [*map(str, words)]) == 0
    lines = dict(line.split() for line in capsys.readouterr().out.splitlines())
    names = "tokens bytes loss perplexity bits_per_byte window stride tokens_per_s"
    assert [*lines] == names.split()
    assert lines["tokens"] == "78"


MISTAKES = """
1 model --data missing.txt -> there is no file at --data missing.txt: give a text file, or a .jsonl
1 model --data . -> there is no file at --data .: give a text file
1 model --data empty.txt -> the texts have no tokens to score
1 model --data latin.txt -> left out: byte 0xE9 at offset 3 is not UTF-8 text
1 model --data bad.jsonl -> bad.jsonl line 2 is not a JSON object
1 model --data documents.jsonl --text_field body -> line 1 has no field 'body'
1 bare --data text.txt -> bare has no tokenizer: put the one it was trained with beside its weights
1 nowhere --data text.txt -> there is no checkpoint at nowhere
2 model -> give --data FILE, to measure how well a text is predicted, or --benchmarks
2 model --data text.txt --window 33 -> it must be between 1 and the model's context of 32
2 model --data text.txt --window 8 --stride 9 -> it must be between 1 and the window of 8
2 model --data text.txt --stride -1 -> stride is -1; it must be 0 or more
2 model --data text.txt --batch_size 0 -> batch_size is 0; it must be at least 1
2 model --data text.txt --step 3 -> is not a training run, so it has no step 3: leave out the step
2 model --data text.txt --limit 3 -> --limit is for --benchmarks alone: leave it out
2 model --data text.txt --num_fewshot 0 -> --num_fewshot is for --benchmarks alone
2 model --data text.txt --run_programs -> --run_programs is for --benchmarks alone
2 model --benchmarks core --window 8 -> --window is for --data alone: leave it out
2 model --benchmarks core,mmlu --data a -> --data is of one benchmark: name one, or
2 model --benchmarks core,arc_esy -> there is no benchmark arc_esy; did you mean arc_easy?
2 model --benchmarks humaneval -> with limits of time, memory and files: allow it by --run_programs
2 nowhere --benchmarks arc_easy,core --num_fewshot 2 -> core is of texts with examples of its own
1 model --benchmarks arc_easy --data missing.txt -> there is no file at missing.txt: give a file
1 model --benchmarks core --data missing.zip -> missing.zip is no bundle of CORE, or
1 model --benchmarks arc_easy --data documents.jsonl -> line 1: 'question' is undefined
1 bare --benchmarks arc_easy --data documents.jsonl -> bare has no tokenizer
2 model --benchmarks core --stride 3 -> --stride is for --data alone: leave it out
2 model --benchmarks core --text_field body -> --text_field is for --data alone
2 --data text.txt -> checkpoint is missing; usage: python -m jllama eval CHECKPOINT [options]
"""


@pytest.mark.parametrize("line", MISTAKES.strip().splitlines())
def test_mistakes_are_one_sentence(place, monkeypatch, capsys, line):
    monkeypatch.chdir(place)
    words, message = line.split(" -> ")
    code, *arguments = words.split()
    assert cli.run("eval", arguments) == int(code)
    printed = capsys.readouterr()
    assert printed.out == ""
    last = printed.err.rpartition("error: ")[2]
    assert last.count("\n") == 1
    assert message in last


QUESTION = "How many questions fit into a window of 32 tokens?"
CHATS = [
    {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]},
    {"prompt": QUESTION, "completion": "Füße! " * 12},
]


@pytest.fixture
def chats(place):
    """A file of chats, and what of them the oracle makes: log-probabilities of the answers, window
    by window.
    """
    write_rows(place / "chats.jsonl", CHATS)
    (place / "template.jinja").write_text(
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    nats, tokens, tokenizer = 0.0, 0, BytesTokenizer()
    for question, answer in (("Who?", "Me."), (QUESTION, CHATS[1]["completion"])):
        text, end = f"user: {question}\nassistant: {answer}\n".encode(), len(answer.encode())
        ids = np.array(tokenizer.encode(text.decode()))
        is_answer = np.zeros(len(ids), bool)
        is_answer[len(ids) - 1 - end : len(ids) - 1] = True
        for start, stop, count in sliding_windows(len(ids), 32, 16):
            logits = oracle.forward(PARAMS, ids[None, start : stop - 1], CONFIG)[0]
            is_new = np.arange(stop - start - 1) >= stop - start - 1 - count
            mask = is_answer[start + 1 : stop] & is_new
            nats += oracle.cross_entropy(logits, ids[start + 1 : stop], mask)[0]
        tokens += int(is_answer.sum())
    return nats, tokens


def test_the_answers_of_chats_are_scored(place, measure, chats):
    """Through the template that is given, in windows that slide over what is longer than the
    context.
    """
    nats, tokens = chats
    arguments = ("chats.jsonl", "--chat_template", place / "template.jinja")
    result = measure(*arguments)
    assert (result["tokens"], result["bytes"]) == (tokens, tokens)
    assert result["loss"] == pytest.approx(nats / tokens, rel=1e-5)
    first = measure(*arguments, "--max_tokens", 3)
    assert (first["tokens"], first["bytes"]) == (3, 3)  # all of the first answer


def test_what_cannot_be_scored_of_chats_is_one_sentence(place, chats, capsys):
    (place / "pairs.jsonl").write_text('{"prompt": "q", "chosen": "a", "rejected": "b"}\n')
    for arguments, code, said in [
        (["text.txt", "--chat_template", "chatml"], 2, "--chat_template is for chats, and "),
        (
            ["chats.jsonl"],
            1,
            "line 1: the model has no chat template: give a prompt and an answer that are texts",
        ),
        (["pairs.jsonl"], 1, "where messages, or prompt and completion, or conversations, or"),
        (["chats.jsonl", "--data.task", "chat"], 2, "there is no option data.task"),
    ]:
        data, *others = arguments
        assert cli.run("eval", [str(place / "model"), "--data", str(place / data), *others]) == code
        assert said in capsys.readouterr().err.splitlines()[-1]


ARC = {"choices": {"text": ["a dog", "a cat"], "label": ["A", "B"]}, "answerKey": "A"}


@pytest.fixture(scope="module")
def questions(place):
    """A folder with questions and solved ones; beside it a chat model."""
    model = LanguageModel(
        CONFIG, jax.tree.map(jnp.asarray, PARAMS), BytesTokenizer(), "{{ messages[-1].content }}"
    )
    jllama.save(model, place / "chat", "hf")
    for split, count in (("test", 5), ("train", 3)):
        folder = place / "questions"
        folder.mkdir(exist_ok=True)
        rows = [ARC | {"question": f"{split} {number}"} for number in range(count)]
        write_rows(folder / f"{split}-0.jsonl", rows)
    return folder


def evaluate_benchmarks(place, *arguments):
    return cli.run("eval", [*map(str, (place / "chat", "--batch_size", "2", *arguments))])


def test_benchmarks(place, questions, capsys):
    """As ``evaluate`` has them; every option changes something."""
    model = jllama.load(place / "chat")
    arguments = ["--benchmarks", "arc_easy", "--data", questions]
    changes = [
        ([], {}),
        (["--limit", 2], {"limit": 2}),
        (["--num_fewshot", 2], {"num_fewshot": 2}),
        (["--apply_chat_template"], {"apply_chat_template": True}),
    ]
    for words, options in changes:
        assert evaluate_benchmarks(place, *arguments, *words, "--json") == 0
        expected = evaluate(model, "arc_easy", str(questions), **options)
        assert json.loads(capsys.readouterr().out) == expected
    assert evaluate_benchmarks(place, *arguments) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:2] for line in lines] == [
        ["arc_easy", metric]
        for metric in ("questions", "acc", "acc_stderr", "acc_norm", "acc_norm_stderr")
    ]
    assert lines[0][2] == "5"


def test_several_benchmarks_and_those_that_run_programs(place, questions, monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(
        benchmarks,
        "evaluate",
        lambda model, name, data, **options: calls.append(name) or {name: {}},
    )
    names = "core, gsm8k,humaneval"
    assert evaluate_benchmarks(place, "--benchmarks", names, "--run_programs", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"core": {}, "gsm8k": {}, "humaneval": {}}
    assert calls == ["core", "gsm8k", "humaneval"]


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_results_are_printed_if_a_later_benchmark_fails(place, monkeypatch, capsys, arguments):
    printed = []

    def evaluate_two(model, name, data, **options):
        printed.append(capsys.readouterr().out)
        if name == "mmlu":
            raise JllamaError("the data are damaged")
        return {name: {"acc": 0.5}}

    monkeypatch.setattr(benchmarks, "evaluate", evaluate_two)
    assert evaluate_benchmarks(place, "--benchmarks", "arc_easy,mmlu", *arguments) == 1
    last = capsys.readouterr()
    assert last.err.endswith("error: the data are damaged\n")
    if arguments:
        assert printed == ["", ""]
        assert json.loads(last.out) == {"arc_easy": {"acc": 0.5}}
    else:  # when it is done
        assert [text.split() for text in printed] == [[], ["arc_easy", "acc", "0.5"]]
        assert last.out == ""
    # Without any result, nothing is printed.
    assert evaluate_benchmarks(place, "--benchmarks", "mmlu", *arguments) == 1
    assert capsys.readouterr().out == ""
