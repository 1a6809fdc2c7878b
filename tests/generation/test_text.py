"""Streamed pieces add up to the whole text, never show half a character, agree with the batch."""

import dataclasses
import inspect
import logging
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jllama.config import LlamaConfig
from jllama.conversation import Conversation, chat, chat_ids
from jllama.errors import JllamaError, UsageError
from jllama.generation import engine as engines
from jllama.generation import steps
from jllama.generation.engine import Engine
from jllama.generation.generate import completions, generate, stream, warm_up
from jllama.generation.requests import Answer, Request
from jllama.generation.sampling_params import Prompt, SamplingFields, SamplingParams
from jllama.generation.text import Completion, TextDecoder, encode_prompt, prompt_ids
from jllama.language_model import LanguageModel
from jllama.templates.messages import end_of_turn_ids
from jllama.tokenizers import BytesTokenizer, train_sentencepiece
from jllama.verify.checks import random_params

BYTES = BytesTokenizer()
BPE = train_sentencepiece(
    [
        "the cat sat on the mat, and the other cats sat on the other mats\n",
        "def area(radius: float) -> float:\n    return 3.14159 * radius**2\n",
        "naïve café, où est le garçon? 世界 世 🙂\n",
    ],
    340,
)
both = pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["bytes", "bpe"])
texts = st.text(
    st.characters(exclude_categories=["Cs"]) | st.sampled_from(" \n\ufffdathe é世界🙂👩‍👧"),
    max_size=40,
)
whole_texts = texts.map(lambda text: text.replace("\ufffd", ""))

CONFIG = LlamaConfig(
    vocab_size=340,
    num_layers=1,
    embed_dim=64,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    mlp_dim=96,
    max_seq_len=64,
)
MODEL = LanguageModel(CONFIG, jax.tree.map(jnp.asarray, random_params(CONFIG, 0)), BPE)
PROMPTS = ["the cat", "", "世界 🙂"]
SAMPLING = [
    SamplingParams(0.0),
    SamplingParams(1.0, seed=1),
    SamplingParams(0.8, top_k=20, top_p=0.9, seed=2),
]
NEW = 40


class Ending(BytesTokenizer):
    """As if ``eos_id`` were the end: a random model will not draw a certain token in time, so it is
    chosen after."""

    vocab_size = CONFIG.vocab_size

    def __init__(self, eos_id):
        self.eos_id = eos_id

    def decode(self, ids):
        return super().decode([token for token in ids if token < BYTES.vocab_size])


def after(tokenizer, start, new):
    """What ``new`` adds to the text of ``start``."""
    return tokenizer.decode([*start, *new])[len(tokenizer.decode(start)) :]


def text_pieces(tokenizer, start, new, stop=()):
    """What a stream shows, piece by piece."""
    decoder = TextDecoder(tokenizer, Prompt(start, stop=stop))
    for token in new:
        if piece := decoder.push(token):
            yield piece
    if rest := decoder.end():
        yield rest


# Pieces


@both
@settings(max_examples=60)
@given(prompt=texts, text=texts)
@example(prompt="", text=" two  spaces, 世界 and 👩‍👩‍👧")
@example(prompt="the", text=" ")
@example(prompt="\ufffd", text="\ufffd\ufffd")
@example(prompt="🙂🙂🙂", text="\ufffd世")
def test_pieces_add_up_to_the_text(tokenizer, prompt, text):
    start, new = prompt_ids(tokenizer, prompt), tokenizer.encode(text)
    pieces = list(text_pieces(tokenizer, start, new))
    assert "".join(pieces) == after(tokenizer, start, new)
    assert all(pieces)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@both
@settings(max_examples=60)
@given(prompt=texts, data=st.data())
def test_pieces_of_any_ids_add_up_to_their_text(tokenizer, prompt, data):
    # What a model draws need not be text: controls, halves of characters, bytes in the middle of
    # pieces.
    byte, control = st.integers(3, 258), st.integers(0, 2)
    new = data.draw(
        st.lists(byte | control | st.integers(0, tokenizer.vocab_size - 1), max_size=40)
    )
    start = prompt_ids(tokenizer, prompt)
    assert "".join(text_pieces(tokenizer, start, new)) == after(tokenizer, start, new)


@given(text=whole_texts)
def test_a_character_is_shown_as_soon_as_it_is_whole(text):
    shown = []

    def ids():
        for index, char in enumerate(text):
            for token in BYTES.encode(char):
                assert len(shown) == index
                yield token

    for piece in text_pieces(BYTES, [BYTES.bos_id], ids()):
        shown.append(piece)  # noqa: PERF402 (the generator looks at it)
    assert shown == list(text)


@both
@given(prompt=whole_texts, text=whole_texts, char=st.sampled_from("é世🙂"), data=st.data())
def test_a_text_that_ends_inside_a_character_shows_it_last(tokenizer, prompt, text, char, data):
    half = [3 + byte for byte in char.encode()][: data.draw(st.integers(1, len(char.encode()) - 1))]
    start, new = prompt_ids(tokenizer, prompt), [*tokenizer.encode(text), *half]
    *pieces, last = text_pieces(tokenizer, start, new)
    assert not any("\ufffd" in piece for piece in pieces)
    assert last == last[0] * len(last) == "\ufffd" * len(last)
    assert "".join([*pieces, last]) == after(tokenizer, start, new)


def test_leading_spaces_are_kept():
    the = BPE.encode("the")[0]
    assert BPE.decode([the]) == "the"
    assert list(text_pieces(BPE, prompt_ids(BPE, "on"), [the])) == [" the"]
    assert list(text_pieces(BPE, prompt_ids(BPE, "on"), [the, the, the])) == [" the"] * 3
    long = prompt_ids(BPE, "the cat sat on the mat, and the other cats sat")
    assert list(text_pieces(BPE, long, [the] * 12)) == [" the"] * 12


# Prompts


@both
@given(text=texts)
@example(text="<s> <s></s>")
def test_a_prompt_has_exactly_one_bos(tokenizer, text):
    ids = prompt_ids(tokenizer, text, parse_special=False)
    assert ids[0] == tokenizer.bos_id
    assert ids.count(tokenizer.bos_id) == 1
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == text


@both
def test_a_prompt_that_spells_out_special_tokens(tokenizer):
    bos, end = tokenizer.bos_id, tokenizer.eos_id
    names = {id: name for name, id in tokenizer.special_tokens.items()}
    the = tokenizer.encode("the")
    text = f"the{names[end]}the"
    assert prompt_ids(tokenizer, text) == [bos, *the, end, *the]
    assert prompt_ids(tokenizer, names[bos] + text) == [bos, *the, end, *the]
    assert prompt_ids(tokenizer, text, begin=False) == [*the, end, *the]
    assert (prompt_ids(tokenizer, ""), prompt_ids(tokenizer, "", begin=False)) == ([bos], [])


# Stop strings


@both
@settings(max_examples=60)
@given(
    text=whole_texts, stop=st.lists(st.text("the cats 世é🙂\n", min_size=1, max_size=5), max_size=3)
)
@example(text="the cat sat", stop=["cat s", "at sat"])
@example(text="aaab", stop=["aab"])
@example(text="the cat", stop=["cats"])
def test_a_text_ends_where_its_first_stop_string_begins(tokenizer, text, stop):
    start, new = prompt_ids(tokenizer, "the cat"), tokenizer.encode(text)
    whole = after(tokenizer, start, new)
    decoder = TextDecoder(tokenizer, Prompt(start, stop=stop))
    shown = ""
    for token in new:
        shown += decoder.push(token)
        assert whole.startswith(shown)
        if decoder.finish_reason:
            break
    shown += decoder.end()
    found = [place for each in stop if (place := whole.find(each)) >= 0]
    assert decoder.finish_reason == ("stop_string" if found else "")
    completion = decoder.completion(0, 0)
    assert (completion.text, completion.finish_reason) == (
        shown,
        "stop_string" if found else "context",
    )
    # Of overlapping stop strings the one that is whole first ends the text.
    ends = [whole.find(each) + len(each) for each in stop if each in whole]
    assert shown == (whole if not found else whole[: len(shown)])
    assert not any(each in shown for each in stop)
    if found:
        assert min(found) <= len(shown) < min(ends)


def test_nothing_of_a_stop_string_is_shown_before_it_is_certain():
    pieces = list(text_pieces(BYTES, [BYTES.bos_id], BYTES.encode("a<|b<|end|>c"), ["<|end|>"]))
    assert pieces == ["a", "<|b"]


# Whole texts


def test_generate_and_stream_agree_and_end_at_the_length():
    wanted = [Prompt(text, sampling, NEW) for text, sampling in zip(PROMPTS, SAMPLING, strict=True)]
    results = generate(MODEL, wanted)
    for prompt, result in zip(wanted, results, strict=True):
        pieces = stream(MODEL, prompt)
        assert "".join(pieces) == result.text
        assert result.text == after(BPE, prompt_ids(BPE, prompt.content), result.ids)
        assert result.finish_reason == "length"
        assert len(result.ids) == len(result.log_probs) == NEW
        assert min(result.ids) >= 0
        assert max(result.log_probs) <= 0
    assert len({result.text for result in results}) == len(PROMPTS)


def test_a_prompt_may_be_ids_and_settings_may_be_shared():
    (text,) = generate(MODEL, [PROMPTS[0]], SAMPLING[1], max_new_tokens=NEW)
    (ids,) = generate(MODEL, [prompt_ids(BPE, PROMPTS[0])], SAMPLING[1], max_new_tokens=NEW)
    assert text == ids == generate(MODEL, [Prompt(PROMPTS[0], SAMPLING[1], NEW)])[0]


def test_one_prompt_and_one_stop_need_no_list():
    """A string is not a list of its characters, and no stop is empty because it is a string."""
    free = generate(MODEL, ["the cat"], SAMPLING[1], max_new_tokens=NEW)
    for one in ("the cat", prompt_ids(BPE, "the cat")):
        assert generate(MODEL, one, SAMPLING[1], max_new_tokens=NEW) == free
    assert generate(MODEL, Prompt("the cat", SAMPLING[1], NEW)) == free
    stop = free[0].text[2:5]
    cut = generate(MODEL, "the cat", SAMPLING[1], max_new_tokens=NEW, stop=[stop])
    assert cut[0].finish_reason == "stop_string"
    assert generate(MODEL, "the cat", SAMPLING[1], max_new_tokens=NEW, stop=stop) == cut
    assert generate(MODEL, Prompt("the cat", SAMPLING[1], NEW, stop)) == cut
    assert (
        "".join(stream(MODEL, "the cat", SAMPLING[1], max_new_tokens=NEW, stop=stop)) == cut[0].text
    )
    for empty in ("", [""], ["x", ""]):
        with pytest.raises(UsageError, match="a stop string is empty"):
            generate(MODEL, "the cat", stop=empty)


def test_settings_by_their_names():
    """Those of ``SamplingParams``, each of which is taken, and no others."""
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(SamplingFields.__annotations__) == fields
    assert all(f"``{name}``" in generate.__doc__ for name in fields)
    ids, together = (
        prompt_ids(BPE, "the cat"),
        generate(MODEL, "the cat", SAMPLING[2], max_new_tokens=NEW),
    )
    assert (
        generate(MODEL, ids, temperature=0.8, top_k=20, top_p=0.9, seed=2, max_new_tokens=NEW)
        == together
    )
    changed = dataclasses.replace(SAMPLING[2], seed=5)
    assert generate(MODEL, ids, changed, seed=2, max_new_tokens=NEW) == together
    assert "".join(stream(MODEL, ids, changed, seed=2, max_new_tokens=NEW)) == together[0].text
    assert (together[0].prompt_tokens, together[0].new_tokens) == (len(ids), NEW)
    with pytest.raises(
        UsageError, match=r"^there is no setting temprature; did you mean temperature\?$"
    ):
        generate(MODEL, ids, temprature=1)
    with pytest.raises(UsageError, match="did you mean max_new_tokens"):
        next(stream(MODEL, ids, new_tokens=1))
    with pytest.raises(
        UsageError, match=r"there is no setting x; there are temperature, .*, stop_ids$"
    ):
        generate(MODEL, ids, x=1)
    with pytest.raises(UsageError, match="temperature is -1"):
        generate(MODEL, ids, temperature=-1)
    with pytest.raises(
        UsageError, match="a Prompt brings its own settings, and others are given beside it"
    ):
        generate(MODEL, [Prompt(ids)], temperature=0.0)


def test_after_warming_up_nothing_compiles(caplog):
    config = dataclasses.replace(CONFIG, max_seq_len=256)  # a cache of 128 and one of 256
    on_device = jax.device_put(MODEL.params, jax.devices()[0])
    model = dataclasses.replace(MODEL, config=config, params=on_device).for_decoding()

    def compilations():
        return [
            record.message for record in caplog.records if record.message.startswith("Compiling")
        ]

    caplog.set_level(logging.WARNING)
    with jax.log_compiles():
        warm_up(model, [16, 40], max_new_tokens=180)
        warm_up(model, [16, 40], [2], max_new_tokens=60, speculate=1)
        assert compilations()
        caplog.clear()
        generate(model, [[5] * 16], max_new_tokens=3)
        generate(model, [[6] * 40], max_new_tokens=180)
        list(
            stream(model, "the cat", max_new_tokens=60, temperature=0.5, stop="x", stop_ids=[1, 2])
        )
        generate(
            model,
            [[5] * 35, [6] * 9, [7] * 16],
            SAMPLING[2],
            max_new_tokens=60,
            batch_size=2,
            speculate=1,
        )
        assert compilations() == []
    with pytest.raises(
        UsageError,
        match="the prompt's 250 tokens and 20 new ones exceed the context of 256",
    ):
        warm_up(model, [16, 250], max_new_tokens=20)


def test_after_warming_up_nothing_compiles_for_prompts_of_many_chunks_that_begin_alike(
    monkeypatch, caplog
):
    monkeypatch.setitem(engines.CHUNK_TOKENS, "cpu", 16)
    model = dataclasses.replace(
        MODEL, params=jax.device_put(MODEL.params, jax.devices()[0])
    ).for_decoding()
    warm_up(model, [16, 40], [2], max_new_tokens=9)
    caplog.set_level(logging.WARNING)
    with jax.log_compiles():
        prompts = [
            [7] * 40,
            [8] * 38,
            [*[7] * 20, *[5] * 16],
            [3] * 12,
        ]  # the third finds a chunk of the first
        generate(model, prompts, SAMPLING[1], max_new_tokens=9, batch_size=2)
        assert [record for record in caplog.records if record.message.startswith("Compiling")] == []


def test_batches_give_what_one_batch_gives():
    prompts = ["the", "cat sat on", "", "a mat", "où est le garçon?"]
    together = generate(MODEL, prompts, SAMPLING[1], max_new_tokens=9)
    two_by_two = generate(MODEL, prompts, SAMPLING[1], max_new_tokens=9, batch_size=2)
    for found, wanted in zip(
        two_by_two, together, strict=True
    ):  # XLA may round otherwise for another batch size
        np.testing.assert_allclose(found.log_probs, wanted.log_probs, rtol=1e-6, atol=1e-6)
        assert found._replace(log_probs=wanted.log_probs) == wanted
    encoded = [encode_prompt(MODEL, Prompt(each, SAMPLING[1], 9)) for each in prompts]
    done = list(completions(MODEL, encoded, batch_size=2))
    assert dict(done) == dict(enumerate(two_by_two))
    assert 4 in [index for index, _ in done[:2]]  # the longest first
    assert list(completions(MODEL, [])) == []
    assert generate(MODEL, []) == []


@pytest.mark.parametrize("index", [0, 1, 15, 16, 17, NEW - 1])
def test_a_stop_id_ends_the_text_and_is_not_in_it(index):
    wanted = [Prompt(text, sampling, NEW) for text, sampling in zip(PROMPTS, SAMPLING, strict=True)]
    model = dataclasses.replace(MODEL, tokenizer=Ending(CONFIG.vocab_size - 1))
    without = generate(dataclasses.replace(model, stop_ids=(CONFIG.vocab_size - 1,)), wanted)
    eos = without[1].ids[index]
    tokenizer = Ending(eos)
    model = dataclasses.replace(model, tokenizer=tokenizer)
    results = generate(model, wanted)
    for prompt, free, result in zip(wanted, without, results, strict=True):
        stops = eos in free.ids
        ids = free.ids[: free.ids.index(eos)] if stops else free.ids
        assert result.ids == ids
        assert result.log_probs == free.log_probs[: len(ids)]
        assert result.finish_reason == ("stop_id" if stops else "length")
        assert result.text == after(tokenizer, prompt_ids(tokenizer, prompt.content), ids)
        assert "".join(stream(model, prompt)) == result.text
    assert results[1].finish_reason == "stop_id"


@pytest.mark.parametrize("where", [0, 3, 17, 30])
def test_a_stop_string_ends_its_row_alone(where):
    """In the row that has it, wherever it lies on the tokens' borders.

    What ``ids`` hold is what the text came from.
    """
    wanted = [Prompt(text, sampling, NEW) for text, sampling in zip(PROMPTS, SAMPLING, strict=True)]
    free = generate(MODEL, wanted)
    text = free[1].text
    stop = text[where : where + 3]
    wanted[1] = dataclasses.replace(wanted[1], stop=[stop, "never"])
    results = generate(MODEL, wanted)
    assert [results[0], results[2]] == [free[0], free[2]]
    result = results[1]
    assert (result.text, result.finish_reason) == (text[: text.find(stop)], "stop_string")
    assert "".join(stream(MODEL, wanted[1])) == result.text
    assert result.ids == free[1].ids[: len(result.ids)]
    assert len(result.log_probs) == len(result.ids)
    start = prompt_ids(BPE, PROMPTS[1])
    assert after(BPE, start, result.ids).startswith(result.text)
    if "\ufffd" not in result.text:  # such text is certain only some tokens later
        assert not result.ids or not after(BPE, start, result.ids[:-1]).startswith(result.text)


def test_the_end_of_the_context():
    (result,) = generate(MODEL, ["the cat"], SAMPLING[1])
    assert result.finish_reason == "context"
    assert len(prompt_ids(BPE, "the cat")) + len(result.ids) == CONFIG.max_seq_len


def test_no_new_tokens_are_no_text():
    for result in generate(MODEL, PROMPTS, max_new_tokens=0):
        assert result == Completion("", [], "length", [], prompt_tokens=result.prompt_tokens)
        assert result.new_tokens == 0
    assert list(stream(MODEL, PROMPTS[0], max_new_tokens=0)) == []


def test_a_kept_prefix_changes_nothing():
    engine = Engine(MODEL, 1, resumes=True)
    conversation = prompt_ids(BPE, "the cat")
    for turn in range(3):
        settings_ = SamplingParams(seed=turn)
        pieces = stream(MODEL, conversation, settings_, max_new_tokens=7, engine=engine)
        text = "".join(pieces)
        (alone,) = generate(MODEL, [conversation], settings_, max_new_tokens=7)
        assert text == alone.text
        assert engine._staged[1] == [
            *conversation,
            *alone.ids[:-1],
        ]  # so all of the next one but what is said then
        conversation = [*conversation, *alone.ids, *BPE.encode("mat")]


def test_an_interrupted_step_leaves_no_prefix(monkeypatch):
    """Its cache was consumed; what comes next is computed anew, and the same."""
    engine, ids = Engine(MODEL, 1, resumes=True), prompt_ids(BPE, "the cat")
    pieces = stream(MODEL, ids, SAMPLING[1], engine=engine)
    next(pieces)
    assert engine._staged[1] == ids[:-1]
    right = steps.decode_block

    def broken(*arguments):
        right(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(steps, "decode_block", broken)
        with pytest.raises(KeyboardInterrupt):
            list(pieces)
    assert (engine._staged[1], engine.busy) == ([], False)
    again = "".join(stream(MODEL, ids, SAMPLING[1], max_new_tokens=7, engine=engine))
    assert again == generate(MODEL, [ids], SAMPLING[1], max_new_tokens=7)[0].text


def test_an_engine_yields_every_rows_pieces(monkeypatch):
    monkeypatch.setattr(engines, "STEPS", 3)
    prompts = [
        encode_prompt(MODEL, Prompt(*each, NEW)) for each in zip(PROMPTS, SAMPLING, strict=True)
    ]
    engine = Engine(MODEL, len(prompts))
    rows = [engine.submit(Request(prompt)) for prompt in prompts]
    pieces, answers = {row: [] for row in rows}, {}
    while engine.busy:
        for row, event in engine.step():
            assert row not in answers
            if isinstance(event, Answer):
                answers[row] = event
            else:
                pieces[row].append(event)
    expected = generate(MODEL, prompts)
    assert [answers[row].completion for row in rows] == expected
    for row, completion in zip(rows, expected, strict=True):
        assert "".join(piece.text for piece in pieces[row]) == completion.text
        assert len(pieces[row]) > NEW / 6
        tokens = tuple(token for piece in pieces[row] for token in piece.tokens)
        assert tokens == answers[row].tokens
        assert [token.id for token in tokens] == completion.ids
        assert [token.log_prob for token in tokens] == completion.log_probs


def test_decoding_params_are_used_as_they_are():
    model = MODEL.for_decoding()
    assert model.decode_params is model.params
    assert generate(model, "the cat", max_new_tokens=3) == generate(
        MODEL, "the cat", max_new_tokens=3
    )


def test_a_conversation_is_what_was_said():
    """Each answer is the one to all messages so far.

    What cannot be said is not, and what was said can be undone.
    """
    fields = {"temperature": 0.9, "seed": 4, "max_new_tokens": 3}
    template = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    model = dataclasses.replace(MODEL, chat_template=template)
    conversation, stop_ids = Conversation(model), end_of_turn_ids(BPE, model.stop_ids)
    expected = []
    for text in ("a", "on"):
        expected.append({"role": "user", "content": text})
        (completion,) = generate(model, chat_ids(model, expected), stop_ids=stop_ids, **fields)
        assert chat(model, expected, **fields) == completion
        assert (
            chat(model, expected, stop=completion.text[0], **fields).finish_reason == "stop_string"
        )
        assert "".join(conversation.answer(text, **fields)) == completion.text
        expected.append({"role": "assistant", "content": completion.text})
        assert conversation.messages == expected
    with pytest.raises(UsageError, match="there is no setting"):
        list(conversation.answer("a", temprature=1))
    with pytest.raises(
        JllamaError, match=r"and the model's context is 64: begin a new one, or say less$"
    ):
        list(conversation.answer("the cat sat on the mat" * 9))
    with pytest.raises(JllamaError, match="the model's context is 64"):
        chat(model, [{"role": "user", "content": "x" * 99}])
    assert conversation.messages == expected
    pieces = conversation.answer(
        "mat", **fields | {"max_new_tokens": 99}
    )  # where the context ends is soon enough
    heard = next(pieces)
    pieces.close()
    assert conversation.messages[-2:] == [
        {"role": "user", "content": "mat"},
        {"role": "assistant", "content": heard},
    ]
    assert [conversation.undo() for _ in range(3)] == ["mat", "on", "a"]
    with pytest.raises(UsageError, match="there is no question to take back"):
        conversation.undo()
    assert (
        chat(model, expected, template="{{ bos_token }}a", **fields).text
        == generate(model, "a", **fields)[0].text
    )


def test_there_are_no_more_rows_than_texts(monkeypatch):
    """Each row takes time, also one that nobody has."""
    numbers, zeros = [], engines._zeros
    monkeypatch.setattr(
        engines,
        "_zeros",
        lambda config, rows, *others: numbers.append(rows) or zeros(config, rows, *others),
    )
    generate(MODEL, PROMPTS[:2], max_new_tokens=1, batch_size=8)
    assert max(numbers) == 2


def test_what_cannot_be_done_is_refused():
    with pytest.raises(JllamaError, match=r"^the model has no tokenizer: put the one"):
        generate(dataclasses.replace(MODEL, tokenizer=None), ["a"])
    with pytest.raises(
        UsageError, match=r"^a stop string is empty: it would end every text at once$"
    ):
        generate(MODEL, ["a"], stop=["x", ""])
    for content in (["a", "b"], [1.5], [[1], [2]], None):  # the types are checked before, in tests
        with pytest.raises(UsageError, match=r"it must be text, token ids or a Prompt$"):
            inspect.unwrap(encode_prompt)(MODEL, types.SimpleNamespace(content=content, stop=()))
    with pytest.raises(UsageError, match="exceed the context of 64"):
        list(stream(MODEL, "a", max_new_tokens=100))
