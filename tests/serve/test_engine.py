"""The engine: answers do not depend on company, cache, slot or restart, and nothing is lost."""

import dataclasses

import jax
import numpy as np
import prometheus_client
import pytest
from helpers import slow_but
from helpers_serve import (
    PREFIX,
    Asked,
    alone,
    in_company,
    random_request,
    request_of,
    started,
    wait_for,
)
from models import SERVED, served

import jllama
from jllama import functional as F
from jllama.core import UsageError
from jllama.generation import steps
from jllama.generation.engine import Engine
from jllama.generation.grammar import Grammar
from jllama.generation.requests import Answer
from jllama.lab.checks import random_params
from jllama.models import oracle
from jllama.serve import metrics
from jllama.serve.config import EngineConfig
from jllama.serve.engine import CHUNK, EngineThread
from jllama.serve.protocol import Continuation, make_job
from jllama.serve.requests import Busy, Failure


def started_with_two(**config):
    return started({"small": served(), "other": served(1)}, **config)


@pytest.fixture(scope="module")
def engine():
    with started_with_two(cache_tokens=4 * CHUNK) as engine:
        yield engine


def endless():
    return request_of("", 1000, banned_ids=(2,))


COMPILED = []  # one entry for each program that XLA has compiled, whoever asked for it
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: (
        COMPILED.append(event) if event.endswith("/backend_compile_duration") else None
    )
)


def num_compiled():
    names = "prefill_chunk read_chunk write_chunk score_chunk join decode_block extend"
    return [len(COMPILED), *(getattr(steps, name)._cache_size() for name in names.split())]


@pytest.fixture(scope="module")
def requests():
    return [random_request(served(), number) for number in range(20)]


@pytest.fixture(scope="module")
def answers(engine, requests):
    return alone(engine, requests)


# Rule one and rule two


@pytest.mark.parametrize("seed", slow_but([0], range(2)))
def test_answers_are_those_given_alone_bit_for_bit_and_nothing_compiles(
    engine, requests, answers, seed
):
    before = num_compiled()
    assert in_company(engine, requests, seed) == answers
    assert num_compiled() == before


NUMBERS = [(2, 60, "float32", "int8"), (5, 700, "bfloat16", None), (1, 420, "float32", None)]


@pytest.mark.parametrize(("slots", "context", "dtype", "quantize"), slow_but(NUMBERS[:1], NUMBERS))
def test_nothing_compiles_after_the_start(slots, context, dtype, quantize):
    """Whatever is asked: rows as long as no other test's, so that no program has been compiled for
    them before. Answers of other numbers do not depend on company either."""
    before = num_compiled()
    models = {name: served(seed, dtype, quantize) for seed, name in enumerate(["small", "other"])}
    with started(models, slots=slots, context=context, cache_tokens=4 * CHUNK) as engine:
        compiled = num_compiled()
        assert compiled[0] > before[0]
        assert compiled[-1] == before[-1]  # nothing grows
        lengths = [
            length
            for power in range(10)
            for length in (2**power, 2**power + 1, CHUNK + 2**power + 1)
            if length < context
        ]
        few = [lengths[0], lengths[len(lengths) // 2], lengths[-1]]
        kinds = [
            (lengths, {}),
            (few, {"model": "other"}),
            (few, {"top": 20}),
            (few, {"prompt_log_probs": True, "top": 3}),
            (few, {"salt": "another"}),
            (few, {}),  # the chunks are there, and another prompt was computed since
        ]
        requests = [
            dataclasses.replace(request_of([0] * length, 1 + number % 3), **kind)
            for some_lengths, kind in kinds
            for number, length in enumerate(some_lengths)
            if length + 1 + number % 3 <= context
        ]
        requests += [
            request_of([0] * length, 0, options={"pooling": pooling})
            for length in (*lengths[::3], context)
            for pooling in ("mean", "last")
        ]
        penalties = {"repetition_penalty": 1.3, "top_p": 0.5, "top_k": 9}
        requests += [
            request_of("abc", 9, Grammar("regex", "(yes|no)!"), temperature=1.5),
            request_of("abc", 9, **penalties, logit_bias={70: 3.0}, banned_ids=(2,)),
        ]
        assert in_company(engine, requests, seed=1) == alone(engine, requests)
        assert num_compiled() == compiled


def test_answers_are_the_same_after_a_restart_with_other_slots_free_and_without_a_cache(
    engine, requests, answers
):
    with started_with_two(cache_tokens=0) as again:
        fingerprint = again.fingerprint("small")
        assert fingerprint == engine.fingerprint("small") != engine.fingerprint("other")
        assert in_company(again, requests, seed=5) == answers


def test_ids_and_log_probabilities_are_those_of_generate_and_the_oracle(engine):
    options = {"top": 5, "prompt_log_probs": True}
    request = request_of(PREFIX, 30, options=options, temperature=0.9, top_p=0.9, seed=7)
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


def test_several_models_are_served_at_once_and_share_no_prefix(engine):
    request = request_of(PREFIX, 20, seed=1)
    requests = [request, dataclasses.replace(request, model="other")] * 3
    expected = alone(engine, requests[:2])
    assert expected[0].completion.ids != expected[1].completion.ids
    assert in_company(engine, requests, seed=2) == expected * 3
    with started({"small": served(1)}) as other:
        assert Asked(other, request).answer() == expected[1]


def test_a_grammar_holds_in_company(engine, requests, answers):
    grammar = Grammar("regex", "(yes|no|perhaps)!")
    choice = request_of("Say:", 20, grammar, temperature=1.5, seed=4)
    expected = Asked(engine, choice).answer()
    assert expected.completion.text in ("yes!", "no!", "perhaps!")
    assert in_company(engine, [choice, *requests[:10]], seed=8) == [expected, *answers[:10]]


# The prefix cache


def test_whole_chunks_are_kept_and_the_one_used_longest_ago_goes():
    texts = ["a" * (2 * CHUNK + 9), "a" * CHUNK + "b" * CHUNK, "c" * (CHUNK + 1)]
    with started(cache_tokens=2 * CHUNK) as engine:

        def cached(text):
            return Asked(engine, request_of(text, 1)).end().cached_tokens

        assert [cached(texts[0]), cached(texts[0])] == [0, 2 * CHUNK]
        assert cached(texts[1]) == CHUNK  # its second chunk takes the place of the first text's
        assert cached(texts[0]) == CHUNK
        assert [cached(texts[2]), cached(texts[2])] == [0, CHUNK]
        assert len(engine._engine._prefixes) == 2


# Coming and going


def test_a_client_that_left_frees_its_slot(engine):
    before = metrics.CANCELLED._value.get()
    leaving = [Asked(engine, endless(), cancel_after=2) for _ in range(6)]
    for asked in leaving:
        asked.end()
    Asked(engine, request_of("abc", 3)).answer()
    assert all(len(asked.events) == 2 for asked in leaving)
    assert metrics.CANCELLED._value.get() == before + 6


def test_a_client_that_left_while_it_waited_is_counted(engine):
    before = metrics.CANCELLED._value.get()
    # The engine has three slots.
    cancels = [engine.submit(endless(), lambda event: None) for _ in range(9)]
    for cancel in reversed(cancels):
        cancel()
    wait_for(lambda: metrics.CANCELLED._value.get() == before + 9)


def test_the_context_ends_an_answer(engine):
    with started(context=1000) as short:
        endless = request_of([5] * 971, None, banned_ids=(2,))
        completion = Asked(short, endless).answer().completion
        assert (completion.finish_reason, completion.new_tokens) == ("context", 29)
        limited = Asked(engine, request_of([5] * 971, 29, banned_ids=(2,))).answer()
        assert completion.ids == limited.completion.ids
        with pytest.raises(UsageError, match="971 tokens and 30 new ones exceed the context of 10"):
            short.check(request_of([5] * 971, 30))
        with pytest.raises(UsageError, match=r"exceed the context of 1000: .* at most 989$"):
            make_job(short, Continuation(prompt=[1] * 11, max_tokens=5000))


def test_a_full_queue_is_busy_and_a_closing_engine_drains():
    with started(queue=2) as engine:
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
    engine = EngineThread({"small": served()}, EngineConfig(slots=3))
    engine.start()
    requests = [Asked(engine, endless()) for _ in range(5)]
    wait_for(lambda: requests[0].events)
    assert engine.close(drain_s=0) == 5
    assert all("shutting down" in asked.end().message for asked in requests)


def test_a_fault_fails_what_is_under_way_and_the_next_request_is_served(monkeypatch, capfd):
    right, reserve, calls, memory = steps.decode_block, Engine.reserve, [], []

    def decode_block(*inputs):
        calls.append(1)
        if len(calls) == 3:
            memory.append(live_bytes())
            raise RuntimeError("planted")
        return right(*inputs)

    def watched(self):
        if not self.batch:
            memory.append(live_bytes())
        reserve(self)

    with started() as engine:
        request = request_of("abc", 30, seed=2)
        expected = Asked(engine, request).answer()
        monkeypatch.setattr(steps, "decode_block", decode_block)
        monkeypatch.setattr(Engine, "reserve", watched)
        assert isinstance(Asked(engine, request).end(), Failure)
        assert Asked(engine, request).answer() == expected
        assert "planted" in capfd.readouterr().err
        at_fault, before_the_next = memory
        # The memory was given back, and there is room for it again.
        assert at_fault - before_the_next > engine.kv_bytes


def live_bytes():
    return sum(array.nbytes for array in jax.live_arrays())


def answered(engine):
    """The rows of a bare engine, in the order in which they end."""
    while engine.busy:
        yield from (row for row, event in engine.step() if isinstance(event, Answer))


def test_a_prompt_waits_for_those_that_came_before_alone():
    """In whatever slots: a short one that takes a slot which was left goes behind."""
    engine = Engine({"small": served()}, 2, context=1024, chunk_tokens=CHUNK, prefill_budget=CHUNK)
    prompts = iter(request_of("a" * 2 * CHUNK, 0, options={"salt": salt}) for salt in "abcdefgh")
    rows, ended = [engine.submit(next(prompts)) for _ in range(2)], []
    for row in answered(engine):
        ended.append(row)
        if prompt := next(prompts, None):
            rows.append(engine.submit(prompt))
    assert ended == rows


def test_rows_that_are_idle_are_not_read(monkeypatch):
    """What a long answer left in its slot makes no step of another longer."""
    cached, offsets = F.ATTENTION["cached"], []

    def spy(query, key, value, mask):
        jax.debug.callback(lambda offset: offsets.append(int(offset.max())), mask.offset)
        return cached.function(query, key, value, mask)

    monkeypatch.setitem(F.ATTENTION, "cached", cached._replace(function=spy))
    # Its sizes are those of no other test: the programs call the spy.
    engine = Engine({"small": served()}, 7, context=900, chunk_tokens=CHUNK)
    for length, max_new_tokens in ((800, 5), (3, 40)):
        engine.submit(request_of([5] * length, max_new_tokens, banned_ids=(2,)))
    assert len([*answered(engine)]) == 2
    jax.effects_barrier()
    assert max(offsets) >= 800
    assert offsets[-1] < 43


def test_a_row_under_a_grammar_does_not_wait_for_long_blocks_of_others():
    engine = Engine({"small": served()}, 3, context=1024)  # with blocks of any length
    plain = engine.submit(request_of("a", 60, banned_ids=(2,)))
    limited = engine.submit(request_of("a", 20, Grammar("regex", "a{99}")))
    assert [*answered(engine)] == [limited, plain]


def test_what_was_computed_for_nobody_is_not_taken_for_slow():
    """A row that ends by itself leaves a block behind, which the next request finds when it comes
    much later."""
    engine = Engine({"small": served()}, 3, context=1024, block_s=0.025)
    ends = request_of("abc", 100)
    prompt = dataclasses.replace(ends.prompt, stop_ids=range(259))
    ends = dataclasses.replace(ends, prompt=prompt)
    engine.submit(ends)
    assert len([*answered(engine)]) == 1
    assert engine._dispatches
    engine._dispatches = [dispatch._replace(start_s=-1e9) for dispatch in engine._dispatches]
    engine._read_s = -1e9
    engine.submit(ends)
    assert len([*answered(engine)]) == 1
    assert engine._step_s < 1e6


def test_memory_decides_the_context():
    def with_memory(num_chunks, **config):
        config["memory_gib"] = num_chunks * chunk_bytes / 2**30
        return EngineThread({"small": served()}, EngineConfig(slots=3, **config))

    layers, heads, head_dim, rows = 2, 2, 32, 3 + 1  # one row more, that prompts are computed in
    chunk_bytes = 2 * layers * heads * head_dim * 4 * CHUNK * rows
    assert with_memory(2.5).context == 2 * CHUNK
    assert with_memory(0).kv_bytes == 4 * chunk_bytes
    one = EngineThread({"small": served()}, EngineConfig(slots=1))
    assert one.kv_bytes == chunk_bytes  # four chunks of one row
    with pytest.raises(
        UsageError, match=r"3 slots of 768 tokens take .* take fewer slots or a shorter context"
    ):
        with_memory(2.5, context=600)
    with pytest.raises(UsageError, match="take fewer slots"):
        with_memory(0.5)


@pytest.mark.parametrize(("slots", "context"), [(1, 1024), (3, 600)])
def test_what_is_said_to_be_reserved_is(slots, context):
    engine = EngineThread({"small": served()}, EngineConfig(slots=slots, context=context))
    engine._engine.reserve()
    caches = engine._engine.batch.cache, engine._engine._prompt_cache
    leaves = [leaf for leaf in jax.tree.leaves(caches) if leaf.ndim == 4]
    assert sum(leaf.nbytes for leaf in leaves) == engine.kv_bytes
    assert all(leaf.shape[2] >= context for leaf in leaves)


@pytest.mark.parametrize("field", ["slots", "prefill_budget", "queue", "context"])
def test_sizes_that_mean_nothing_are_refused(field):
    with pytest.raises(UsageError, match=field):
        EngineConfig(**{field: -1})


def test_metrics_count_what_was_served(engine):
    expected = {
        "jllama_prompt_tokens_total": 4,
        "jllama_new_tokens_total": 5,
        "jllama_time_to_first_token_seconds_count": 1,
    }
    value = prometheus_client.REGISTRY.get_sample_value
    before = {name: value(name) for name in expected}
    Asked(engine, request_of("abc", 5, banned_ids=(2,))).answer()
    assert {name: value(name) - before[name] for name in expected} == expected
