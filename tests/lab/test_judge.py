"""Other programs held against the oracle: right ones pass, and each planted mistake is named."""

import dataclasses
import functools
import hashlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers import slow_but
from peer_server import (
    TOKENIZER,
    Program,
    change_weights,
    interleave,
    late,
    open_model,
    quantize,
    rope_parameters,
    serving,
)

import jllama
from jllama.core import JllamaError, UsageError
from jllama.lab import probes, rows
from jllama.lab.checks import random_params
from jllama.lab.conformance import VARIANTS, small, weights
from jllama.lab.judge import Evidence, judge
from jllama.lab.judge_report import judgment_lines
from jllama.lab.mistakes import _WRONG_MODELS, known_mistakes
from jllama.lab.mutations import MUTATIONS
from jllama.lab.peers import check_server, open_exact
from jllama.lab.probes import make_rows
from jllama.lab.rows import Observed
from jllama.models import oracle
from jllama.models.capture import activations
from jllama.templates.messages import TEMPLATES

TIED = small("llama3.2-1b", 8, 2, vocab_size=259, embed_dim=128, mlp_dim=128)
UNTIED = small("llama3.1-8b", 4, 2, vocab_size=259, embed_dim=128, mlp_dim=128)


def saved(config, folder):
    template = TEMPLATES["llama2"]
    model = jllama.LanguageModel(config, weights(config), TOKENIZER, template, (TOKENIZER.eos_id,))
    jllama.save(model, folder, "hf")
    return folder


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return saved(TIED, tmp_path_factory.mktemp("tied") / "hf")


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return saved(UNTIED, tmp_path_factory.mktemp("untied") / "hf")


@pytest.fixture(autouse=True, scope="module")
def predicted_once():
    """What a mistake predicts of a prompt is computed once, for all programs and their tokens."""
    known = {}
    of_tokens = rows._log_probs

    def log_probs(model, config, params, inputs, where, ids):
        content = hashlib.sha256()
        for array in jax.tree.leaves((params, inputs, where)):
            content.update(np.ascontiguousarray(array).tobytes())
        key = model, config, content.digest()
        if key not in known:
            every_id = np.tile(np.arange(config.vocab_size, dtype=ids.dtype), (len(ids), 1))
            found = of_tokens(model, config, params, inputs, where, every_id)
            known[key] = [np.asarray(array) for array in found]
        best, values = known[key]
        return best, np.take_along_axis(values, ids, axis=1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "_log_probs", log_probs)
        yield


@pytest.fixture
def few_mistakes(monkeypatch):
    """Try a dozen mistakes, as each is a program; ``test_a_planted_mistake_is_named`` tries all."""
    few = re.compile("layer |the logits of|no BOS|rope_theta|weights in|GELU, not|the embedding")
    monkeypatch.setattr(
        "jllama.lab.judge.known_mistakes",
        lambda *model: [one for one in known_mistakes(*model) if few.match(one.about)],
    )


@pytest.fixture
def few_in_the_suite(request):
    if not request.node.get_closest_marker("slow"):
        request.getfixturevalue("few_mistakes")


def judged(program, folder, **options):
    options.setdefault("max_tokens", 512)
    with serving(program.answer) as url:
        return check_server(url, open_exact(folder), **options)


def with_rope(folder, **changes):
    return open_model(folder, rope_parameters=rope_parameters(folder, **changes))


def norms_in_bfloat16(folder):
    change = lambda weight: weight.bfloat16().float()  # noqa: E731
    return change_weights(open_model(folder), "norm.weight", change)


def permuted(folder):
    change = functools.partial(interleave, head_dim=TIED.head_dim)
    model = change_weights(open_model(folder), "q_proj.weight", change)
    return change_weights(model, "k_proj.weight", change)


def quantized(folder):
    model = change_weights(open_model(folder), "proj.weight", quantize)
    return change_weights(model, "embed_tokens.weight", quantize)


CHATML = {"template": TEMPLATES["chatml"]}
MISTAKES = {
    "theta": (lambda f: with_rope(f, rope_theta=1e4), {}, "rope_theta 10,000 for 500,000"),
    "factor": (lambda f: with_rope(f, factor=8.0), {}, "rope_scaling.factor 8 for 32"),
    "epsilon": (lambda f: open_model(f, rms_norm_eps=1e-6), {}, "norm_eps 1e-06 for 1e-05"),
    "order": (permuted, {}, "the order of rotated channels"),
    "norm dtype": (norms_in_bfloat16, {}, "weights of norms in bfloat16"),
    "quantization": (quantized, {}, "weights in Q8_0"),
    "mask": (open_model, {"ahead": 1}, "a mask that shows each token the next"),
    "window": (open_model, {"window": 256}, "sliding_window 256 for 0"),
    "context": (
        open_model,
        {"context": 256},
        "a context of 256 tokens, and what is before them dropped",
    ),
    "BOS": (open_model, {"num_bos": 2}, "BOS twice before texts"),
    "cache": (open_model, {"decoded_shift": 1}, "decoded tokens one slot too far in the cache"),
    "template": (open_model, CHATML, "the chat template 'chatml' for the model's own"),
}
"""How the model is opened, what is wrong around it, and how the mistake is named."""
PLACES = {
    "factor": {"far", "text", "decode"},
    "window": {"far"},
    "context": {"far"},
    "BOS": {"plain text"},
    "cache": {"decode"},
    "template": {"chat"},
}
"""Where a mistake shows, if not everywhere."""


def test_a_right_server_passes(tied):
    found = judged(Program(open_model(tied)), tied, max_tokens=256)
    assert found.passed, found
    assert found.precision == "float32"
    assert found.error < 2e-4
    assert found.kl < 1e-8
    kinds = {kind for kind, *_ in found.groups}
    assert kinds == {"text", "short", "far", "plain text", "special tokens", "chat", "decode"}
    assert f"positions 0 to 254 of {TIED.max_seq_len:,}" in found.verdict
    assert all(one.share == 0 for one in found.behaviors)


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_named(tied, name, monkeypatch):
    monkeypatch.setattr(probes, "FAR", (512,))
    opened, wrong, about = MISTAKES[name]
    found = judged(Program(opened(tied), **wrong), tied)
    assert not found.passed, found
    assert about in found.verdict.partition("; ")[2], found
    kinds = {kind for kind, _, error, allowed in found.groups if error > allowed}
    assert kinds <= PLACES.get(name, kinds)


@pytest.mark.slow
@pytest.mark.usefixtures("few_mistakes")
def test_a_head_that_is_taken_for_the_embedding_is_named(untied):
    model = open_model(untied)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    found = judged(Program(model), untied)
    assert "the embedding for the output head" in found.verdict


@pytest.mark.slow
def test_what_no_mistake_explains_is_said(tied):
    noise = torch.Generator().manual_seed(0)

    def disturbed(weight):
        return weight * (1 + 0.3 * torch.randn(weight.shape, generator=noise))

    model = change_weights(open_model(tied), "proj.weight", disturbed)
    found = judged(Program(model), tied)
    assert not found
    assert re.search("none of [0-9]+ known mistakes explains it$", found.verdict)


@pytest.mark.slow
@pytest.mark.usefixtures("few_mistakes")
def test_a_server_is_asked_in_the_way_that_it_serves(tied):
    """A mistake shows in the tokens that it prefers alone."""
    found = judged(Program(open_model(tied), refuses=("echo",)), tied)
    assert found.passed, found
    assert found.method.startswith("logprobs of one token")
    refuses = ("echo", "logprobs")
    found = judged(Program(open_model(tied), refuses=refuses), tied)
    assert found.passed, found
    assert found.method.startswith("the choice of one token")
    found = judged(Program(with_rope(tied, rope_theta=1e4), refuses=refuses), tied)
    assert not found
    assert found.kl is None
    assert "rope_theta 10,000 for 500,000" in found.verdict


def test_forms_of_other_servers_are_read(tied):
    """vLLM's prompt_logprobs, and llama.cpp's n_probs."""
    program = Program(open_model(tied))

    def vllm(path, body):
        if "prompt_logprobs" not in body:
            return program.answer(path, body) if body["max_tokens"] > 1 else None
        if isinstance(body["prompt"], str):
            return None
        ids, log_probs = program.complete(body["prompt"], body)
        entries = [None]
        for place, id in enumerate(ids[1:-1]):
            top = [*log_probs[place].topk(5).indices.tolist(), id]
            entries.append({str(one): {"logprob": float(log_probs[place][one])} for one in top})
        return {"choices": [{"text": "", "prompt_logprobs": entries}]}

    def llama_cpp(path, body):
        if path != "/completion" or isinstance(body["prompt"], str):
            return None
        first = len(body["prompt"])
        ids, log_probs = program.complete(body["prompt"], {"max_tokens": body["n_predict"]})
        found = []
        for place in range(first, len(ids)):
            row = log_probs[place - 1]
            entries = [
                {"id": id, "logprob": float(row[id])}
                for id in [ids[place], *row.topk(5).indices.tolist()]
            ]
            found.append(entries[0] | {"top_logprobs": entries[1:]})
        return {"completion_probabilities": found}

    for answer, method in ((vllm, "prompt_logprobs"), (llama_cpp, "n_probs")):
        with serving(answer) as url:
            found = check_server(url, open_exact(tied), max_tokens=64)
        assert found.passed, found
        assert found.method.startswith(method)


def with_token(id):
    """An answer as llama.cpp gives it."""
    return {"completion_probabilities": [{"id": id, "token": "a", "logprob": -0.1}]}


OUTSIDE = [-1, 10**6, 1e30, "x", None, [], True]


@pytest.mark.parametrize(
    "answer", [None, {"choices": "none"}, {"choices": []}, {}, *map(with_token, OUTSIDE)]
)
def test_a_server_that_gives_nothing_is_one_sentence(tied, answer):
    """Tokens outside the vocabulary would leave nothing to compare."""
    nothing = "gives neither log-probabilities nor tokens"
    with serving(lambda path, body: answer) as url, pytest.raises(JllamaError, match=nothing):
        check_server(url, open_exact(tied), max_tokens=64)


def test_differences_that_are_no_numbers_do_not_pass(tied, monkeypatch):
    monkeypatch.setattr("jllama.lab.judge.known_mistakes", lambda *_: [])
    model = open_exact(tied)
    row = make_rows(model, 64)[0]
    shape = len(row.places), 1
    observed = [Observed(row, np.full(shape, -1), np.full(shape, np.nan))]
    found = judge(Evidence("a program", "nothing", observed), model, "float32")
    assert not found.passed
    assert found.verdict.startswith("FAIL")
    assert [*judgment_lines(found, 0.0)]


def test_a_server_that_dies_or_is_late_is_one_sentence(tied):
    with serving(lambda path, body: None) as url:
        pass
    with pytest.raises(JllamaError, match=r"gave no answer within 120 s: .*refused"):
        check_server(url, open_exact(tied))
    timed_out = r"gave no answer within 0\.5 s: timed out"
    with serving(late) as url, pytest.raises(JllamaError, match=timed_out):
        check_server(url, open_exact(tied), timeout_s=0.5)

    def dying(path, body):
        raise ConnectionAbortedError

    died = "gave no answer within 120 s: Remote end"
    with serving(dying) as url, pytest.raises(JllamaError, match=died):
        check_server(url, open_exact(tied))


@pytest.mark.slow
def test_answers_that_change_in_company_are_told(tied):
    program = Program(open_model(tied))
    active = []

    def answer(path, body):
        found = program.answer(path, body)
        active.append(path)
        if found and len(active) % 2 and "logprobs" in found["choices"][0] and body.get("echo"):
            log_probs = found["choices"][0]["logprobs"]["token_logprobs"]
            log_probs[5:] = [value + 1e-5 for value in log_probs[5:]]
        return found

    with serving(answer) as url:
        found = check_server(url, open_exact(tied), max_tokens=512)
    assert found.passed
    assert any(0 < one.share <= 1 and 1e-6 < one.largest < 1e-4 for one in found.behaviors)


@pytest.mark.slow
def test_a_prefix_of_another_prompt_is_told(tied):
    """A cache that gives the first tokens of the prompt before, whatever it was."""
    program = Program(open_model(tied))
    right = program.log_probs
    first = []

    def log_probs(ids, num_prompt):
        if len(ids) < 100:
            return right(ids, num_prompt)
        first.append(ids[:32])
        return right([*first[-2:][0], *ids[32:]], num_prompt)

    program.log_probs = log_probs
    found = judged(program, tied, max_tokens=256, parallel=1)
    changed = {one.about: one.share for one in found.behaviors}
    assert changed["after a prompt with another beginning"] > 0.5, changed
    assert changed["the same request again"] < 0.5, changed


def test_a_function_is_checked(tied):
    model = open_model(tied)

    def logits(tokens):
        return model(torch.tensor(tokens[None])).logits

    found = jllama.check_model(logits, tied, max_tokens=256)
    assert found
    assert repr(found).startswith("PASS: the function computes this checkpoint as float32 does")
    with pytest.raises(JllamaError, match=r"returns \[3\] for .* tokens; expected logits"):
        jllama.check_model(lambda tokens: np.zeros(3), tied)
    with pytest.raises(UsageError, match="there is no precision bfloat17; did you mean bfloat16"):
        jllama.check_model(logits, tied, "bfloat17")


EXACT = jllama.LlamaConfig(
    vocab_size=259, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=64,
    max_seq_len=256, tie_embeddings=True,
)  # fmt: skip


def with_penalty(logits, tokens):
    """Multiply the log-probabilities of the tokens so far by 1.1."""
    found = np.log(oracle.softmax(logits))
    for place in range(len(tokens)):
        found[place, np.unique(tokens[: place + 1])] *= 1.1
    return found


def with_top_k(logits, tokens):
    least = np.sort(logits, axis=1)[:, -8:-7]
    return np.where(logits < least, -np.inf, logits)


SILENT = {
    "a penalty of tokens seen before": with_penalty,
    "a soft cap of the logits": lambda logits, _: 30 * np.tanh(logits / 30),
    "a temperature": lambda logits, _: logits / 1.01,
    "only the likeliest tokens kept (top-k or top-p)": with_top_k,
}
"""Changes of right logits; the first three are as small as what float16 or 8-bit products allow."""


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def exact(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param) / "hf"
    params = random_params(EXACT, 0, embed_std=0.3)
    model = jllama.LanguageModel(EXACT, params, TOKENIZER, None, (TOKENIZER.eos_id,))
    jllama.save(model, folder, "hf", dtype=request.param)
    return folder, open_exact(folder).params


@pytest.mark.parametrize("exact", ["float32"], indirect=True)
@pytest.mark.parametrize("name", slow_but(["a temperature"], SILENT))
@pytest.mark.usefixtures("few_in_the_suite")
def test_a_precision_excuses_no_mistake(exact, name):
    """Neither one that nobody declares nor, if a mistake explains the difference, any other."""
    folder, params = exact

    def program(tokens):
        return SILENT[name](oracle.forward(params, tokens[None], EXACT)[0], tokens)

    for precision in ("auto", "bfloat16"):
        found = jllama.check_model(program, folder, precision)
        assert not found, found
        assert f"; with {name} our logits agree with it to" in found.verdict


def changed_layers(params, indices):
    layers = {name: stack[np.array(indices)] for name, stack in params["layers"].items()}
    return dataclasses.replace(EXACT, num_layers=len(indices)), params | {"layers": layers}


def on_padded(logits):
    """A function of rows of any length that is compiled once: what follows a token is not seen."""
    compiled = jax.jit(logits)
    size = EXACT.max_seq_len
    return lambda ids: compiled(np.pad(ids, (0, size - len(ids)))[None])[0, : len(ids)]


EXCHANGED = {one.about: one.model for one in MUTATIONS if one.name == "gate for up"}
WRONG_MODELS = _WRONG_MODELS | EXCHANGED
PLANTED = {
    **{name: (lambda params, m=model: (m, EXACT, params)) for name, model in WRONG_MODELS.items()},
    "layer 0 left out": lambda params: (jllama.models.build, *changed_layers(params, [1])),
    "layer 1 run twice": lambda params: (jllama.models.build, *changed_layers(params, [0, 1, 1])),
}


@pytest.mark.parametrize("exact", ["float32"], indirect=True)
@pytest.mark.parametrize("name", slow_but(["layer 0 left out"], PLANTED))
@pytest.mark.usefixtures("few_in_the_suite")
def test_a_wrong_block_is_named(exact, name):
    folder, params = exact
    module, config, wrong = PLANTED[name](params)
    found = jllama.check_model(on_padded(module.build_model(config, wrong)), folder)
    assert f"; with {name} our logits agree with it to" in found.verdict, found


@pytest.mark.parametrize("exact", ["float32"], indirect=True)
@pytest.mark.usefixtures("few_mistakes")
def test_shifted_logits_are_named_and_the_context_is_filled(exact):
    folder, params = exact

    def logits(tokens):
        return oracle.forward(params, tokens[None], EXACT)[0]

    for distance, name in ((1, "after"), (-1, "before")):
        found = jllama.check_model(lambda t, d=distance: np.roll(logits(t), -d, axis=0), folder)
        assert f"; with the logits of the token {name} it our" in found.verdict
    found = jllama.check_model(logits, folder)
    assert "positions 0 to 254 of 256)" in found.verdict
    # Right only as far as prompts reached before.
    late = lambda tokens: np.concatenate([logits(tokens)[:200], logits(tokens)[200:][::-1]])  # noqa: E731
    found = jllama.check_model(late, folder)
    assert not found, found
    assert "in far (from position 128)" in found.verdict


@pytest.mark.slow
@pytest.mark.parametrize("exact", ["float32"], indirect=True)
@pytest.mark.usefixtures("few_mistakes")
def test_hidden_states_locate_a_mistake_that_has_no_name(exact):
    folder, params = exact
    scales = np.random.default_rng(0).uniform(0.2, 2, params["layers"]["wo"].shape[1:])
    wo = np.array(params["layers"]["wo"])
    wo[1] *= scales
    wrong = params | {"layers": params["layers"] | {"wo": wo}}
    names = ("embedding", "layers/0", "layers/1")

    def program(tokens, weights, with_states=True):
        logits = oracle.forward(weights, tokens[None], EXACT)[0]
        states = activations(EXACT, weights, jnp.asarray(tokens)[None], names)
        return (logits, [states[name] for name in names]) if with_states else logits

    found = jllama.check_model(lambda tokens: program(tokens, wrong), folder)
    assert found.verdict.endswith("; the first hidden state that differs is layers/1")
    found = jllama.check_model(lambda tokens: program(tokens, wrong, False), folder)
    assert "; it may return hidden states, too: then the first wrong" in found.verdict
    head = params | {"final_norm": params["final_norm"] * scales.ravel()[: EXACT.embed_dim]}
    states = lambda tokens: (program(tokens, head, False), program(tokens, params)[1])  # noqa: E731
    found = jllama.check_model(states, folder)
    assert found.verdict.endswith("so look at the final norm and the head")
    assert jllama.check_model(lambda tokens: program(tokens, params), folder)


@pytest.mark.slow
def test_a_precision_is_an_excuse_if_it_is_declared(exact):
    folder, params = exact
    rounded = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), params)
    llama = on_padded(jllama.build_model(EXACT, rounded))
    found = jllama.check_model(llama, folder)  # float32 logits
    if folder.parent.name.startswith("bfloat16"):
        assert found
        assert found.verdict.endswith("; as float32 it would fail")
    else:
        assert not found
        assert "held against float32 and float16-cache" in found.verdict
    found = jllama.check_model(lambda tokens: llama(tokens).astype(jnp.bfloat16), folder)
    assert found, found


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_has_mistakes_with_names_of_their_own(name):
    config = VARIANTS[name]
    params = {"layers": {}, "embed": None, "lm_head": None, "final_norm": np.ones(2, np.float32)}
    mistakes = known_mistakes(jllama.LanguageModel(config, params, TOKENIZER), 4096)
    names = [mistake.about for mistake in mistakes]
    assert len(names) == len({*names}) >= 40
    fields = [mistake for mistake in mistakes if " for " in mistake.about]
    for mistake in fields:
        if mistake.change is None and "embedding for" not in mistake.about:
            assert mistake.misread(config, params)[0] != config
