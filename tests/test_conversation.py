"""A conversation: answers are those to all that was said, and each computes only what is new."""

import functools
import itertools
import string

import pytest
from models import served

from jllama.conversation import Conversation, chat, chat_ids
from jllama.errors import JllamaError, UsageError
from jllama.generation import steps
from jllama.generation.engine import Engine
from jllama.generation.generate import generate, stream
from jllama.tokenizers import BytesTokenizer

LETTERS = {*BytesTokenizer().encode(string.ascii_lowercase)}
FIELDS = {"temperature": 0.8, "banned_ids": tuple({*range(BytesTokenizer().vocab_size)} - LETTERS)}
"""Answers of letters, which are tokens as they were drawn when they come back in a prompt."""
QUESTIONS = ["What is a llama?", "And what is an alpaca, by the way?", "Oh."]


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
def alone():
    """What is answered where nothing was kept."""
    return functools.partial(chat, served(), **FIELDS)


def ids_of(messages, question=None):
    asked = [] if question is None else [{"role": "user", "content": question}]
    return chat_ids(served(), [*messages, *asked], add_generation_prompt=question is not None)


def common(one, other):
    return sum(
        1
        for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    )


def talk(conversation, question, most=24, **fields):
    return "".join(conversation.answer(question, max_new_tokens=most, **FIELDS | fields))


def test_a_turn_computes_only_what_is_new(prefilled, alone):
    conversation, known = Conversation(served()), []
    for turn, question in enumerate(QUESTIONS):
        ids = ids_of(conversation.messages, question)
        asked = [*conversation.messages, {"role": "user", "content": question}]
        prefilled.clear()
        answer = talk(conversation, question, seed=turn)
        assert sum(prefilled) == len(ids) - 1 - common(known, ids[:-1])
        assert sum(prefilled) < len(question) + 70  # what the template puts around it
        assert answer == alone(asked, max_new_tokens=24, seed=turn).text
        assert conversation.messages == [*asked, {"role": "assistant", "content": answer}]
        known = [
            *ids,
            *BytesTokenizer().encode(answer)[:-1],
        ]  # of the last token there are no keys and values


def test_an_answer_to_what_was_taken_back_computes_only_what_differs(prefilled, alone):
    conversation = Conversation(served())
    talk(conversation, QUESTIONS[0])
    before = conversation.messages
    talk(conversation, QUESTIONS[1])
    assert conversation.undo() == QUESTIONS[1]
    assert conversation.messages == before
    prefilled.clear()
    other = QUESTIONS[1][:10] + "?"
    answer, computed = talk(conversation, other), sum(prefilled)
    assert answer == alone([*before, {"role": "user", "content": other}], max_new_tokens=24).text
    one, two = ids_of(before, QUESTIONS[1]), ids_of(before, other)
    assert computed == len(two) - 1 - common(one, two)


@pytest.mark.parametrize("heard", [1, 5, 20])
def test_an_answer_that_is_closed_early_is_what_was_heard_and_what_was_computed_is_kept(
    prefilled, alone, heard
):
    conversation = Conversation(served())
    answer = conversation.answer(QUESTIONS[0], max_new_tokens=200, **FIELDS)
    text = "".join(itertools.islice(answer, heard))
    answer.close()
    said = [{"role": "user", "content": QUESTIONS[0]}, {"role": "assistant", "content": text}]
    assert conversation.messages == said
    assert len(text) >= heard
    prefilled.clear()
    answer, computed = talk(conversation, QUESTIONS[1]), sum(prefilled)
    assert (
        answer == alone([*said, {"role": "user", "content": QUESTIONS[1]}], max_new_tokens=24).text
    )
    kept = len(ids_of([], QUESTIONS[0])) + len(text) - 1
    assert computed <= len(ids_of(said, QUESTIONS[1])) - 1 - kept


def test_what_is_never_begun_is_not_said():
    conversation = Conversation(served())
    conversation.answer("hello").close()
    assert (conversation.messages, conversation.engine) == ([], None)


def test_after_an_error_nothing_is_lost(prefilled, alone):
    conversation = Conversation(served())
    talk(conversation, QUESTIONS[0])
    said = conversation.messages
    with pytest.raises(UsageError, match="there is no setting temprature"):
        talk(conversation, QUESTIONS[1], temprature=1)
    with pytest.raises(UsageError, match="banned_ids bans every token"):
        talk(conversation, QUESTIONS[1], banned_ids=tuple(range(BytesTokenizer().vocab_size)))
    with pytest.raises(JllamaError, match="begin a new one, or say less"):
        talk(conversation, "a" * 2000)
    assert conversation.messages == said
    prefilled.clear()
    answer, computed = talk(conversation, QUESTIONS[1]), sum(prefilled)
    assert (
        answer == alone([*said, {"role": "user", "content": QUESTIONS[1]}], max_new_tokens=24).text
    )
    assert computed == len(ids_of(said, QUESTIONS[1])) - len(ids_of([], QUESTIONS[0])) - 24


@pytest.mark.parametrize("broken", ["prefill_chunk", "decode_block"])
def test_an_interrupt_in_the_middle_of_a_step_leaves_a_conversation_that_goes_on(
    broken, alone, monkeypatch
):
    """What the device computed in is gone then: it was given away, and nothing came back."""
    conversation = Conversation(served())
    talk(conversation, QUESTIONS[0])
    said, original = conversation.messages, getattr(steps, broken)

    def interrupted(*args):
        original(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(steps, broken, interrupted)
        with pytest.raises(KeyboardInterrupt):
            talk(conversation, QUESTIONS[1])
    assert conversation.messages == said
    asked = [*said, {"role": "user", "content": QUESTIONS[1]}]
    assert talk(conversation, QUESTIONS[1]) == alone(asked, max_new_tokens=24).text


def test_an_interrupt_in_the_middle_of_an_answer_keeps_what_was_heard(alone, monkeypatch):
    conversation, pieces = Conversation(served()), []
    original, calls = steps.decode_block, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) > 3:
            raise KeyboardInterrupt
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(steps, "decode_block", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pieces.extend(conversation.answer(QUESTIONS[0], max_new_tokens=200, **FIELDS))
    assert pieces
    said = [
        {"role": "user", "content": QUESTIONS[0]},
        {"role": "assistant", "content": "".join(pieces)},
    ]
    assert conversation.messages == said
    asked = [*said, {"role": "user", "content": QUESTIONS[1]}]
    assert talk(conversation, QUESTIONS[1]) == alone(asked, max_new_tokens=24).text


def test_two_answers_under_way_do_not_mix(alone):
    """Each is the answer to what had been said when it began."""
    conversation = Conversation(served())
    first = conversation.answer(QUESTIONS[0], max_new_tokens=60, **FIELDS)
    begun = next(first)
    asked = [*conversation.messages, {"role": "user", "content": QUESTIONS[1]}]
    assert talk(conversation, QUESTIONS[1]) == alone(asked, max_new_tokens=24).text
    whole = alone([{"role": "user", "content": QUESTIONS[0]}], max_new_tokens=60).text
    assert begun + "".join(first) == whole


def test_an_engine_that_is_generating_a_text_is_not_given_another():
    engine = Engine(served(), 1)
    first = stream(served(), "a", max_new_tokens=200, engine=engine)
    next(first)
    with pytest.raises(UsageError, match="the engine is generating other texts"):
        next(stream(served(), "b", engine=engine))
    first.close()
    text = "".join(stream(served(), "b", max_new_tokens=20, engine=engine))
    assert text == generate(served(), "b", max_new_tokens=20)[0].text
