"""A conversation: answers are those to all that was said, and each computes only what is new."""

import dataclasses
import itertools
import string

import jax
import pytest
from models import SERVED, weights

from jllama.core import JllamaError, UsageError
from jllama.generation import steps
from jllama.generation.conversation import Conversation, chat, chat_ids
from jllama.generation.engine import Engine
from jllama.generation.generate import generate, stream
from jllama.models.decode_params import decode_layout
from jllama.models.language_model import LanguageModel
from jllama.tokenizers.base import BytesTokenizer

LETTERS = {*BytesTokenizer().encode(string.ascii_lowercase)}
FIELDS = {"temperature": 0.8, "banned_ids": tuple({*range(BytesTokenizer().vocab_size)} - LETTERS)}
"""Answers of letters, which are tokens as they were drawn when they come back in a prompt."""
QUESTIONS = ["A llama?", "And an alpaca?", "Oh."]
"""They fit the first cache, with a template of one character a message."""
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
NEW = 16  # tokens of an answer


@pytest.fixture(scope="module")
def model():
    config = dataclasses.replace(SERVED, num_layers=1)
    params = jax.jit(decode_layout, static_argnums=1)(weights(config), config)
    return LanguageModel(config, params, BytesTokenizer(), TEMPLATE, (2,))


@pytest.fixture
def prefilled(monkeypatch):
    """How many tokens of prompts were computed so far, chunk by chunk."""
    counts, original = [], steps.prefill_chunk

    def counting(params, config, cache, tokens, count, cache_is_empty):
        counts.append(int(count[0]))
        return original(params, config, cache, tokens, count, cache_is_empty)

    monkeypatch.setattr(steps, "prefill_chunk", counting)
    return counts


@pytest.fixture
def alone(model):
    """What is answered to a question where nothing was kept."""

    def answer(messages, question, max_new_tokens=NEW, **fields):
        fields = FIELDS | fields
        return chat(model, asked(messages, question), max_new_tokens=max_new_tokens, **fields).text

    return answer


def asked(messages, question):
    return [*messages, {"role": "user", "content": question}]


def said(question, answer):
    return [*asked([], question), {"role": "assistant", "content": answer}]


def talk(conversation, question, **fields):
    return "".join(conversation.answer(question, max_new_tokens=NEW, **FIELDS | fields))


def test_a_turn_computes_only_what_is_new(model, prefilled, alone):
    conversation, known = Conversation(model), []
    for turn, question in enumerate(QUESTIONS):
        before = conversation.messages
        ids = chat_ids(model, asked(before, question))
        prefilled.clear()
        answer = talk(conversation, question, seed=turn)
        assert sum(prefilled) == len(ids) - 1 - len(known)
        assert answer == alone(before, question, seed=turn)
        assert conversation.messages == [*before, *said(question, answer)]
        # Of the last token there are no keys and values.
        known = [*ids, *BytesTokenizer().encode(answer)[:-1]]


def test_an_answer_to_what_was_taken_back_computes_only_what_differs(model, prefilled, alone):
    conversation = Conversation(model)
    talk(conversation, QUESTIONS[0])
    before = conversation.messages
    talk(conversation, QUESTIONS[1])
    assert conversation.undo() == QUESTIONS[1]
    assert conversation.messages == before
    prefilled.clear()
    other = QUESTIONS[1][:10] + "?"
    answer, computed = talk(conversation, other), sum(prefilled)
    assert answer == alone(before, other)
    # All before it was computed with the question that was taken back.
    assert computed == len("?")


@pytest.mark.parametrize("heard", [1, 20])
def test_an_answer_that_is_closed_early_is_what_was_heard_and_what_was_computed_is_kept(
    model, prefilled, alone, heard
):
    conversation = Conversation(model)
    answer = conversation.answer(QUESTIONS[0], max_new_tokens=60, **FIELDS)
    text = "".join(itertools.islice(answer, heard))
    answer.close()
    assert conversation.messages == said(QUESTIONS[0], text)
    assert len(text) >= heard
    prefilled.clear()
    answer, computed = talk(conversation, QUESTIONS[1]), sum(prefilled)
    assert answer == alone(said(QUESTIONS[0], text), QUESTIONS[1])
    assert computed <= len(text[-1:] + "\n" + QUESTIONS[1])


def test_what_is_never_begun_is_not_said(model):
    conversation = Conversation(model)
    conversation.answer("hello").close()
    assert (conversation.messages, conversation.engine) == ([], None)


def test_after_an_error_nothing_is_lost(model, prefilled, alone):
    conversation = Conversation(model)
    talk(conversation, QUESTIONS[0])
    before = conversation.messages
    with pytest.raises(UsageError, match="there is no setting temprature"):
        talk(conversation, QUESTIONS[1], temprature=1)
    with pytest.raises(UsageError, match="banned_ids bans every token"):
        talk(conversation, QUESTIONS[1], banned_ids=tuple(range(BytesTokenizer().vocab_size)))
    with pytest.raises(JllamaError, match="begin a new one, or say less"):
        talk(conversation, "a" * 2000)
    assert conversation.messages == before
    prefilled.clear()
    answer, computed = talk(conversation, QUESTIONS[1]), sum(prefilled)
    assert answer == alone(before, QUESTIONS[1])
    assert computed == len("a\n" + QUESTIONS[1])


@pytest.mark.parametrize(
    ("broken", "num_calls"), [("prefill_chunk", 0), ("decode_block", 0), ("decode_block", 3)]
)
def test_an_interrupt_keeps_what_was_heard_and_leaves_a_conversation_that_goes_on(
    model, broken, num_calls, alone, monkeypatch
):
    """What the device computed in is gone then: it was given away, and nothing came back."""
    conversation = Conversation(model)
    talk(conversation, QUESTIONS[0])
    expected, pieces = conversation.messages, []
    original, calls = getattr(steps, broken), itertools.count()

    def interrupted(*args):
        result = original(*args)
        if next(calls) >= num_calls:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patch:
        patch.setattr(steps, broken, interrupted)
        with pytest.raises(KeyboardInterrupt):
            pieces.extend(conversation.answer(QUESTIONS[1], max_new_tokens=40, **FIELDS))
    assert bool(pieces) == bool(num_calls)
    if pieces:
        expected = [*expected, *said(QUESTIONS[1], "".join(pieces))]
    assert conversation.messages == expected
    assert talk(conversation, QUESTIONS[0]) == alone(expected, QUESTIONS[0])


def test_two_answers_under_way_do_not_mix(model, alone):
    """Each is the answer to what had been said when it began."""
    conversation = Conversation(model)
    first = conversation.answer(QUESTIONS[0], max_new_tokens=60, **FIELDS)
    begun = next(first)
    before = conversation.messages
    assert talk(conversation, QUESTIONS[1]) == alone(before, QUESTIONS[1])
    assert begun + "".join(first) == alone([], QUESTIONS[0], max_new_tokens=60)


def test_an_engine_that_is_generating_a_text_is_not_given_another(model):
    engine = Engine(model, 1)
    first = stream(model, "a", max_new_tokens=60, engine=engine)
    next(first)
    with pytest.raises(UsageError, match="the engine is generating other texts"):
        next(stream(model, "b", engine=engine))
    first.close()
    text = "".join(stream(model, "b", max_new_tokens=20, engine=engine))
    assert text == generate(model, "b", max_new_tokens=20)[0].text
