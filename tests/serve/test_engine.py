"""The engine: answers do not depend on company, cache, slot or restart, and nothing is lost."""

import dataclasses
import time

import jax
import numpy as np
import prometheus_client
import pytest
from engine_load import PREFIX, Asked, alone, in_company, random_request
from helpers import slow_but
from models import SERVED, served

import jllama
from jllama import functional as F
from jllama import oracle
from jllama.errors import UsageError
from jllama.generation import steps
from jllama.generation.engine import Engine
from jllama.generation.requests import Answer, Request
from jllama.generation.sampling_params import Prompt, SamplingParams
from jllama.generation.text import encode_prompt
from jllama.grammar import Grammar
from jllama.serve import metrics
from jllama.serve.config import EngineConfig
from jllama.serve.engine import CHUNK, EngineThread
from jllama.serve.protocol import Continuation, make_job
from jllama.serve.requests import Busy, Failure
from jllama.verify.checks import random_params


def started(models=None, **config):
    engine = EngineThread(
        models or {"small": served(), "other": served(1)}, EngineConfig(**{"slots": 3, **config})
    )
    engine.start()
    return engine


@pytest.fixture(scope="module")
def engine():
    engine = started(cache_tokens=4 * CHUNK)
    yield engine
    assert engine.close() == 0


def wait_for(condition):
    end_s = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


COMPILED = []  # one entry for each program that XLA has compiled, whoever asked for it
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: (
        COMPILED.append(event) if event.endswith("/backend_compile_duration") else None
    )
)


def num_compiled():
    names = "prefill_chunk read_chunk write_chunk score_chunk join decode_block resize"
    return [len(COMPILED), *(getattr(steps, name)._cache_size() for name in names.split())]


def request_of(
    text, max_new_tokens=10, top=0, prompt_log_probs=False, grammar=None, model=None, **sampling
):
    prompt = Prompt(text, SamplingParams(**sampling), max_new_tokens, grammar=grammar)
    return Request(
        encode_prompt(model or served(), prompt),
        "small",
        top=top,
        prompt_log_probs=prompt_log_probs,
    )


@pytest.fixture(scope="module")
def requests():
    return [random_request(served(), number) for number in range(40)]


@pytest.fixture(scope="module")
def answers(engine, requests):
    return alone(engine, requests)


# Rule one and rule two


@pytest.mark.parametrize("seed", slow_but([0], range(3)))
def test_answers_are_those_given_alone_bit_for_bit_and_nothing_compiles(
    engine, requests, answers, seed
):
    before = num_compiled()
    assert in_company(engine, requests, seed) == answers
    assert num_compiled() == before


@pytest.mark.parametrize(("slots", "context"), slow_but([(2, 60)], [(5, 700), (1, 420), (2, 60)]))
def test_nothing_compiles_after_the_start(slots, context):
    """Whatever is asked: rows as long as no other test's, so that no program has been compiled for
    them before."""
    before = num_compiled()
    engine = started(slots=slots, context=context, cache_tokens=4 * CHUNK)
    compiled = num_compiled()
    assert compiled[0] > before[0]
    assert compiled[-1] == before[-1]  # nothing grows
    lengths = [
        length for power in range(10) for length in (2**power, 2**power + 1, CHUNK + 2**power + 1)
    ]
    prompts = [Prompt([0] * length) for length in lengths if length < context]
    few = [prompts[0], prompts[len(prompts) // 2], prompts[-1]]
    kinds = [
        (prompts, {}),
        (few, {"model": "other"}),
        (few, {"top": 20}),
        (few, {"prompt_log_probs": True, "top": 3}),
        (few, {"salt": "another"}),
        (few, {}),  # the chunks are there, and another prompt was computed since
    ]
    requests = [
        dataclasses.replace(request_of(prompt.content, 1 + number % 3, model=served()), **kind)
        for given, kind in kinds
        for number, prompt in enumerate(given)
        if len(prompt.content) + 1 + number % 3 <= context
    ]
    requests += [
        dataclasses.replace(request_of([0] * length, 0), pooling=pooling)
        for length in (*(length for length in lengths if length < context), context)
        for pooling in ("mean", "last")
    ]
    requests += [
        request_of("abc", 9, grammar=Grammar("regex", "(yes|no)!"), temperature=1.5),
        request_of(
            "abc",
            9,
            repetition_penalty=1.3,
            top_p=0.5,
            top_k=9,
            logit_bias={70: 3.0},
            banned_ids=(2,),
        ),
    ]
    in_company(engine, requests, seed=1)
    alone(engine, requests)
    assert num_compiled() == compiled
    assert engine.close() == 0


def test_answers_are_the_same_after_a_restart_with_other_slots_free_and_without_a_cache(
    engine, requests, answers
):
    again = started(cache_tokens=0)
    assert again.fingerprint("small") == engine.fingerprint("small") != engine.fingerprint("other")
    assert in_company(again, requests, seed=5) == answers
    assert again.close() == 0


def test_every_slot_gives_the_same_bits(engine):
    same = request_of(PREFIX[:100], 30, temperature=1.0, seed=3)
    assert len({repr(asked.answer()) for asked in [Asked(engine, same) for _ in range(6)]}) == 1


def test_ids_and_log_probabilities_are_those_of_generate_and_the_oracle(engine):
    request = request_of(
        PREFIX, 30, top=5, temperature=0.9, top_p=0.9, seed=7, prompt_log_probs=True
    )
    answer = Asked(engine, request).answer()
    (expected,) = jllama.generate(served(), request.prompt)
    assert answer.completion.ids == expected.ids
    assert answer.completion.text == expected.text
    whole = [*request.prompt.ids, *expected.ids]
    logits = oracle.forward(random_params(SERVED, 0), np.array([whole]), SERVED)[0]
    log_probs = np.log(oracle.softmax(logits))
    tokens = [*answer.prompt_tokens, *answer.tokens]
    assert [token.id for token in tokens] == whole
    assert tokens[0].log_prob is None
    for index, token in enumerate(tokens[1:]):
        np.testing.assert_allclose(token.log_prob, log_probs[index, token.id], rtol=1e-4, atol=1e-5)
        likeliest = np.sort(log_probs[index])[::-1][:5]
        np.testing.assert_allclose(
            [value for _, value in token.top], likeliest, rtol=1e-4, atol=1e-5
        )
        assert token.top[0][0] == np.argmax(log_probs[index])


@pytest.mark.parametrize(
    ("dtype", "quantize"),
    slow_but([("float32", "int8")], [("bfloat16", None), ("float32", "int8")]),
)
def test_other_numbers_do_not_depend_on_company_either(dtype, quantize):
    model = served(0, dtype, quantize)
    engine = started({"small": model})
    requests = [random_request(model, number) for number in range(12)]
    assert in_company(engine, requests, seed=1) == alone(engine, requests)
    engine.close()


def test_several_models_are_served_at_once_and_share_no_prefix(engine):
    requests = [
        dataclasses.replace(request_of(PREFIX, 20, seed=1), model=name)
        for name in ("small", "other") * 3
    ]
    expected = alone(engine, requests[:2])
    assert expected[0].completion.ids != expected[1].completion.ids
    assert in_company(engine, requests, seed=2) == expected * 3
    assert expected[1].completion.ids == jllama.generate(served(1), requests[1].prompt)[0].ids


def test_a_grammar_holds_in_company(engine, requests, answers):
    choice = request_of(
        "Say:", 20, grammar=Grammar("regex", "(yes|no|perhaps)!"), temperature=1.5, seed=4
    )
    expected = Asked(engine, choice).answer()
    assert expected.completion.text in ("yes!", "no!", "perhaps!")
    assert in_company(engine, [choice, *requests[:20]], seed=8) == [expected, *answers[:20]]


# The prefix cache


def test_whole_chunks_are_kept_and_the_one_used_longest_ago_goes():
    engine = started(cache_tokens=2 * CHUNK)
    texts = ["a" * (2 * CHUNK + 9), "a" * CHUNK + "b" * CHUNK, "c" * (CHUNK + 1)]

    def cached(text):
        return Asked(engine, request_of(text, 1)).end().cached_tokens

    assert [cached(texts[0]), cached(texts[0])] == [0, 2 * CHUNK]
    assert cached(texts[1]) == CHUNK  # its second chunk takes the place of the first text's second
    assert cached(texts[0]) == CHUNK
    assert [cached(texts[2]), cached(texts[2])] == [0, CHUNK]
    assert len(engine._engine._prefixes) == 2
    engine.close()


# Coming and going


def test_a_client_that_left_frees_its_slot(engine):
    endless = request_of("", 1000, banned_ids=(2,))
    before = metrics.CANCELLED._value.get()
    leaving = [Asked(engine, endless, cancel_after=2) for _ in range(6)]
    for asked in leaving:
        asked.end()
    last = Asked(engine, request_of("abc", 3))
    last.answer()
    assert all(len(asked.events) == 2 for asked in leaving)
    assert metrics.CANCELLED._value.get() == before + 6


def test_a_client_that_left_while_it_waited_is_counted(engine):
    endless, before = request_of("", 1000, banned_ids=(2,)), metrics.CANCELLED._value.get()
    cancels = [
        engine.submit(endless, lambda event: None) for _ in range(9)
    ]  # the engine has three slots
    for cancel in reversed(cancels):
        cancel()
    wait_for(lambda: metrics.CANCELLED._value.get() == before + 9)


def test_no_new_tokens_are_an_answer_too(engine):
    answer = Asked(engine, request_of("abc", 0, prompt_log_probs=True)).answer()
    assert (answer.completion.text, answer.completion.finish_reason, len(answer.prompt_tokens)) == (
        "",
        "length",
        4,
    )


def test_the_context_ends_an_answer(engine):
    short = started({"small": served()}, context=40)
    request = request_of("abcdefghij", None, banned_ids=(2,))
    completion = Asked(short, request).answer().completion
    assert (completion.finish_reason, completion.new_tokens) == ("context", 40 - 11)
    assert (
        completion.ids
        == Asked(engine, request_of("abcdefghij", 29, banned_ids=(2,))).answer().completion.ids
    )
    with pytest.raises(UsageError, match="11 tokens and 30 new ones exceed the context of 40"):
        short.check(request_of("abcdefghij", 30))
    with pytest.raises(UsageError, match=r"exceed the context of 40: shorten .* at most 29$"):
        make_job(short, Continuation(prompt=[1] * 11, max_tokens=500))
    short.close()


def test_a_full_queue_is_busy_and_a_closing_engine_drains():
    engine = started({"small": served()}, queue=2)
    long = request_of("abc", 300, banned_ids=(2,))
    first, *others = [Asked(engine, long) for _ in range(3)]
    wait_for(lambda: all(asked.events for asked in (first, *others)))
    waiting = [Asked(engine, request_of("abc", 3)) for _ in range(2)]
    with pytest.raises(Busy, match="2 requests are waiting"):
        engine.submit(long, print)
    assert engine.close(drain_s=100) == 0
    assert [asked.answer().completion.new_tokens for asked in (first, *waiting)] == [300, 3, 3]
    with pytest.raises(Busy, match="shutting down"):
        engine.submit(long, print)


def test_what_is_not_finished_in_time_is_broken_off():
    engine = started({"small": served()})
    asked = [Asked(engine, request_of("abc", 1000, banned_ids=(2,))) for _ in range(5)]
    wait_for(lambda: asked[0].events)
    assert engine.close(drain_s=0) == 5
    assert all("shutting down" in each.end().message for each in asked)


def test_a_fault_fails_what_is_under_way_and_the_next_request_is_served(monkeypatch, capfd):
    engine = started({"small": served()})
    request = request_of("abc", 30, seed=2)
    expected = Asked(engine, request).answer()
    right, calls, held = steps.decode_block, [], []
    reserve = Engine.reserve

    def decode_block(*inputs):
        calls.append(1)
        if len(calls) == 3:
            held.append(live_bytes())
            raise RuntimeError("planted")
        return right(*inputs)

    def watched(self):
        if not self._batches:
            held.append(live_bytes())
        reserve(self)

    monkeypatch.setattr(steps, "decode_block", decode_block)
    monkeypatch.setattr(Engine, "reserve", watched)
    assert isinstance(Asked(engine, request).end(), Failure)
    assert Asked(engine, request).answer() == expected
    assert "planted" in capfd.readouterr().err
    at_fault, before_the_next = held
    assert (
        at_fault - before_the_next > engine.kv_bytes
    )  # what there was is gone, and there is room for it again
    engine.close()


def live_bytes():
    return sum(array.nbytes for array in jax.live_arrays())


def test_a_prompt_waits_for_those_that_came_before_alone():
    """In whatever slots: a short one that takes a slot which was left goes behind."""
    engine = Engine(served(), 2, context=1024, chunk_tokens=CHUNK, prefill_budget=CHUNK)
    prompt = encode_prompt(served(), Prompt("a" * 2 * CHUNK, SamplingParams(), 0))
    rows, ended = [engine.submit(Request(prompt, salt=salt)) for salt in "ab"], []
    while len(ended) < 6:
        for row, event in engine.step():
            if isinstance(event, Answer):
                ended.append(row)
                rows.append(engine.submit(Request(prompt, salt=str(len(rows)))))
    assert ended == rows[:6]


def test_rows_that_are_idle_are_not_read(monkeypatch):
    """What a long answer left in its slot makes no step of another longer."""
    cached, offsets = F.ATTENTION["cached"], []

    def spy(query, key, value, mask):
        jax.debug.callback(lambda offset: offsets.append(int(offset.max())), mask.offset)
        return cached.function(query, key, value, mask)

    monkeypatch.setitem(F.ATTENTION, "cached", cached._replace(function=spy))
    engine = Engine(
        served(), 7, context=900, chunk_tokens=CHUNK
    )  # of other sizes than those of other tests
    for length, new in ((800, 5), (3, 40)):
        engine.submit(
            Request(
                encode_prompt(served(), Prompt([5] * length, SamplingParams(banned_ids=(2,)), new))
            )
        )
    while engine.busy:
        engine.step()
    jax.effects_barrier()
    assert max(offsets) >= 800
    assert offsets[-1] < 43


def test_a_row_under_a_grammar_does_not_wait_for_long_blocks_of_others():
    engine = Engine(served(), 2, context=256)  # with blocks of any length
    plain = engine.submit(
        Request(encode_prompt(served(), Prompt("a", SamplingParams(banned_ids=(2,)), 60)))
    )
    limited = engine.submit(
        Request(
            encode_prompt(
                served(), Prompt("a", max_new_tokens=20, grammar=Grammar("regex", "a{99}"))
            )
        )
    )
    ended = []
    while engine.busy:
        ended += [row for row, event in engine.step() if isinstance(event, Answer)]
    assert ended == [limited, plain]


def test_what_was_computed_for_nobody_is_not_taken_for_slow():
    """A row that ends by itself leaves a block behind, which the next request finds when it comes
    much later."""
    engine = Engine(served(), 2, context=256, block_s=0.025)
    ends = Request(
        encode_prompt(served(), Prompt("abc", SamplingParams(), 100, stop_ids=[*range(259)]))
    )
    engine.submit(ends)
    while engine.busy:
        engine.step()
    assert engine._dispatches
    engine._dispatches = [each._replace(start_s=-1e9) for each in engine._dispatches]
    engine._read_s = -1e9
    engine.submit(ends)
    while engine.busy:
        engine.step()
    assert engine._step_s < 1e6


def test_memory_decides_the_context():
    rows = 3 + 1  # of the slots, and one that prompts are computed in
    chunk_gib = (
        2 * 2 * 2 * 32 * 4 * CHUNK * rows / 2**30
    )  # keys and values, layers, heads, head size, bytes
    config = {"slots": 3, "memory_gib": 2.5 * chunk_gib}
    assert EngineThread({"small": served()}, EngineConfig(**config)).context == 2 * CHUNK
    assert EngineThread({"small": served()}, EngineConfig(slots=3)).kv_bytes == round(
        4 * chunk_gib * 2**30
    )
    with pytest.raises(
        UsageError, match=r"3 slots of 768 tokens take .* take fewer slots or a shorter context"
    ):
        EngineThread({"small": served()}, EngineConfig(**config, context=600))
    assert EngineThread({"small": served()}, EngineConfig(slots=1)).kv_bytes == round(
        chunk_gib * 2**30
    )
    with pytest.raises(UsageError, match="take fewer slots"):
        EngineThread({"small": served()}, EngineConfig(slots=3, memory_gib=0.5 * chunk_gib))


@pytest.mark.parametrize(("slots", "context"), [(1, 1024), (3, 1024), (3, 600), (2, 300), (2, 100)])
def test_what_is_said_to_be_reserved_is(slots, context):
    engine = EngineThread({"small": served()}, EngineConfig(slots=slots, context=context))
    engine._engine.reserve()
    caches = [batch.cache for batch in engine._engine._batches]
    leaves = [leaf for leaf in jax.tree.leaves(caches) if leaf.ndim == 4]
    assert sum(leaf.nbytes for leaf in leaves) == engine.kv_bytes
    assert all(leaf.shape[2] >= context for leaf in leaves)


@pytest.mark.parametrize("field", ["slots", "prefill_budget", "queue", "context"])
def test_sizes_that_mean_nothing_are_refused(field):
    with pytest.raises(UsageError, match=field):
        EngineConfig(**{field: -1})


def test_metrics_count_what_was_served(engine):
    def values():
        return {
            sample.name: sample.value
            for family in prometheus_client.REGISTRY.collect()
            for sample in family.samples
        }

    before = values()
    Asked(engine, request_of("abc", 5, banned_ids=(2,))).answer()
    after = values()
    changed = {
        name: after[name] - before[name]
        for name in after
        if not name.endswith(("_created", "_sum", "_bucket"))
    }
    assert changed["jllama_prompt_tokens_total"] == 4
    assert changed["jllama_new_tokens_total"] == 5
    assert changed["jllama_time_to_first_token_seconds_count"] == 1
