"""Plant 60 mistakes in the source, one at a time, and say which test finds each.

    python benchmarks/planted.py                      # in the suite, then in CI's slow sets
    python benchmarks/planted.py --room data serve    # of some rooms
    python benchmarks/planted.py --results planted.json

Each mistake is planted in a copy of this checkout. The tests nearest to it run first, and the whole
suite only if they find nothing; then the slow set and ``jllama verify``. A mistake is found by a
test that fails with it and passes without, so the tests must pass before. ``--results`` keeps what
was found, and a later run tries the tests named there first.
"""

import argparse
import collections
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SUITE = (sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-W", "ignore")


class Mistake(NamedTuple):
    room: str
    path: str  # below ``jllama``
    right: str  # text that occurs there once
    wrong: str  # what takes its place
    tests: str  # below ``tests``, the likeliest to find it


MISTAKES = [
    # functional
    Mistake(  # subtle: gradients of a query that sees no key
        "functional",
        "kernels/attention.py",
        "lse = jnp.where(softmax.total > 0, softmax.largest + jnp.log(softmax.total), jnp.inf)",
        "lse = softmax.largest + jnp.log(softmax.total)",
        "functional/test_attention.py",
    ),
    Mistake(  # subtle: a drawn token that another program would truncate
        "functional",
        "kernels/sampling.py",
        "shifted = jnp.where(stays | is_drawn, shifted, -jnp.inf)",
        "shifted = jnp.where(stays, shifted, -jnp.inf)",
        "functional/test_sampling.py training/test_grpo.py",
    ),
    Mistake(  # subtle: several chunks, and a mask that is not a prefix
        "functional",
        "kernels/loss.py",
        "in_order = jnp.argsort(order, axis=1)",
        "in_order = order",
        "functional/test_loss.py",
    ),
    Mistake(
        "functional",
        "kernels/int8.py",
        "values = numpy.round(wide * reciprocal[:, None].astype(wide.dtype))",
        "values = wide * reciprocal[:, None].astype(wide.dtype)",
        "functional/test_linear.py models/test_decode_params.py",
    ),
    Mistake(  # subtle: positions from 65,536 on
        "functional",
        "core/ops.py",
        "for shift in (0, 8, 16):",
        "for shift in (0, 8):",
        "functional/test_block.py",
    ),
    # model
    Mistake(  # subtle: kinds of layers that do not repeat whole
        "model",
        "core/model.py",
        "if [*kinds[size:], *kinds[:size]] == [*kinds]:",
        "if [*kinds[size:]] == [*kinds[:-size]]:",
        "models/test_model.py models/test_oracle.py generation/test_families.py",
    ),
    Mistake(  # subtle: only one of the two fields is set
        "model",
        "models/rope_scaling.py",
        "if not mscale or not mscale_all_dim:",
        "if not mscale and not mscale_all_dim:",
        "models/test_rope_scaling.py formats/test_huggingface.py",
    ),
    Mistake(
        "model",
        "models/decode_params.py",
        "joined[name] = _decode_matrix(flat, (0,), quantize)",
        "joined[name] = _decode_matrix(flat, (0,))",
        "models/test_decode_params.py formats/test_tensors.py",
    ),
    Mistake(
        "model",
        "training/metrics.py",
        'is_used = config.tie_embeddings or path != "embed"',
        'is_used = path != "embed"',
        "core/test_parameters.py",
    ),
    Mistake(  # subtle: fewer key-value heads than ``tensor``, and more than one
        "model",
        "parallel/shards.py",
        'first = jax.lax.axis_index("tensor") * query.shape[1] // group_size',
        'first = jax.lax.axis_index("tensor") // group_size',
        "parallel/test_sharding.py parallel/test_meshes.py",
    ),
    # tokenizers
    Mistake(  # subtle: texts of over 65,536 characters
        "tokenizers",
        "tokenizers/sentencepiece.py",
        "first += ids[1:]",
        "first += ids",
        "tokenizers/test_tokenizers.py tokenizers/test_conversion.py",
    ),
    Mistake(  # subtle: two tokenizers that differ in EOS share what is cached
        "tokenizers",
        "tokenizers/huggingface.py",
        'ends = f"{self.bos_id} {self.eos_id} {self.add_bos} "',
        'ends = f"{self.bos_id} {self.add_bos} "',
        "tokenizers/test_tokenizers.py tokenizers/test_conversion.py data",
    ),
    Mistake(  # subtle: texts of over 400,000 characters
        "tokenizers",
        "tokenizers/tiktoken.py",
        "part = text[start : start + _LONGEST_TEXT]",
        "part = text[start : start + _LONGEST_TEXT - 1]",
        "tokenizers/test_tokenizers.py tokenizers/test_conversion.py",
    ),
    Mistake(
        "tokenizers",
        "tokenizers/base.py",
        "sorted(self.special_tokens, key=len, reverse=True)",
        "sorted(self.special_tokens, key=len)",
        "tokenizers/test_tokenizers.py tokenizers",
    ),
    Mistake(
        "tokenizers",
        "tokenizers/gguf.py",
        'read("add_bos_token", bool, is_pieces or pre in _WITH_BOS)',
        'read("add_bos_token", bool, is_pieces)',
        "tokenizers/test_conversion.py formats/test_gguf.py",
    ),
    # data
    Mistake(  # subtle: a batch in which the second epoch begins
        "data",
        "data/batches.py",
        "epochs = (batch_index * batch_size + np.arange(batch_size)) // num_windows",
        "epochs = np.full(batch_size, batch_index * batch_size // num_windows)",
        "data/test_batches.py",
    ),
    Mistake(
        "data",
        "data/datasets.py",
        'while self.count < state["batches"] and',
        'while self.count <= state["batches"] and',
        "training/test_own_loop.py training/test_loop.py",
    ),
    Mistake(  # subtle: a file that ends within a character
        "data",
        "data/corpus.py",
        "text = decoder.decode(without_nul, not data)",
        "text = decoder.decode(without_nul)",
        "data/test_corpus.py",
    ),
    Mistake(  # subtle: a pair of which one answer alone is too long
        "data",
        "data/chats.py",
        "is_lost = not all(any(counted) for _, counted in sides)",
        "is_lost = not any(any(counted) for _, counted in sides)",
        "data/test_chats.py",
    ),
    Mistake(
        "data",
        "data/tokens.py",
        "sha256(CACHE_VERSION, listing, config.text_field, config.validation_fraction, *others)",
        "sha256(CACHE_VERSION, listing, config.validation_fraction, *others)",
        "data/test_tokens.py",
    ),
    # templates
    Mistake(  # subtle: a second answer before the first has ended
        "templates",
        "generation/conversation.py",
        "if self.engine is None or self.engine.busy:",
        "if self.engine is None:",
        "generation/test_conversation.py",
    ),
    Mistake(  # subtle: control characters in what a template writes
        "templates",
        "templates/template.py",
        'line = "".join(char if char.isprintable() else " " for char in problem[:1000])',
        "line = problem[:1000]",
        "templates/test_template.py",
    ),
    Mistake(  # subtle: a call whose arguments are an empty text
        "templates",
        "templates/messages.py",
        'arguments = json.loads(function["arguments"] or "{}")',
        'arguments = json.loads(function["arguments"])',
        "templates/test_messages.py serve/test_tools.py",
    ),
    Mistake(
        "templates",
        "templates/messages.py",
        "return len(text) - len(rest) + len(following)",
        "return span.end + len(following)",
        "templates/test_answers.py data/test_chats.py",
    ),
    Mistake(
        "templates",
        "templates/template_worker.py",
        '_environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)',
        '_environment.filters["tojson"] = json.dumps',
        "templates/test_template.py templates",
    ),
    # checkpoints
    Mistake(
        "checkpoints",
        "formats/tensors.py",
        "_copy(block, out[within])",
        "_copy(block, out[place])",
        "formats/test_tensors.py parallel/test_meshes.py",
    ),
    Mistake(  # subtle: norms that 16 bits do not hold exactly
        "checkpoints",
        "formats/gguf.py",
        "if have_same_bits(norm.astype(np.float32), tensor):",
        "if np.isfinite(norm.astype(np.float32)).all():",
        "formats/test_gguf.py",
    ),
    Mistake(
        "checkpoints",
        "formats/huggingface.py",
        '"norm_eps": ("rms_norm_eps", 1e-6),',
        '"norm_eps": ("rms_norm_eps", 1e-5),',
        "formats/test_huggingface.py",
    ),
    Mistake(
        "checkpoints",
        "formats/meta.py",
        "if head is None or (embed is not None and have_same_bits(head, embed)):",
        "if head is None:",
        "formats/test_meta.py",
    ),
    Mistake(  # subtle: the best checkpoint of a run whose data has changed
        "checkpoints",
        "formats/run_checkpoints.py",
        'return metrics["validation_loss"] - 1000.0 * metrics.get("data_since", 0)',
        'return metrics["validation_loss"]',
        "formats/test_run.py commands/test_train.py commands/test_watching.py",
    ),
    # training
    Mistake(  # subtle: after a step that was not finite
        "training",
        "core/step.py",
        "usual_norm = jnp.where(is_accepted, new_norm, usual_norm)",
        "usual_norm = new_norm",
        "training/test_step.py training/test_own_loop.py",
    ),
    Mistake(
        "training",
        "training/optimizer.py",
        'return not path.endswith("/magnitude")',
        "return True",
        "training/test_optimizer.py training/test_lora.py",
    ),
    Mistake(  # subtle: a run with a running mean of its weights, resumed
        "training",
        "training/checkpointing.py",
        "weights = training.trainable.with_trained(weights, trained)",
        'weights = training.trainable.with_trained(weights, others["average"])',
        "training/test_trainable.py training/test_own_loop.py commands/test_train.py",
    ),
    Mistake(  # the last partial batch of an epoch
        "training",
        "training/resolve.py",
        "steps = math.ceil(options.epochs * num_rows / options.batch_size) or options.steps",
        "steps = int(options.epochs * num_rows / options.batch_size) or options.steps",
        "commands/test_train.py data",
    ),
    Mistake(  # bytes of a window's first token, which is no target
        "training",
        "training/sources.py",
        "text_bytes = token_bytes[batch.tokens[:, 1:][batch.counted[:, 1:]]].sum()",
        "text_bytes = token_bytes[batch.tokens[batch.counted]].sum()",
        "training/test_loop.py training/test_own_loop.py commands/test_train.py",
    ),
    # generation
    Mistake(  # subtle: a stop string that is split over tokens
        "generation",
        "generation/text.py",
        "self.text.find(stop, max(num_searched - len(stop), 0)) for stop in self._prompt.stop",
        "self.text.find(stop, num_searched) for stop in self._prompt.stop",
        "generation/test_text.py",
    ),
    Mistake(  # subtle: prompts that were cached with other weights
        "generation",
        "generation/engine.py",
        "        self._prefixes.clear()\n",
        "",
        "generation/test_engine.py rl/test_rollouts.py",
    ),
    Mistake(
        "generation",
        "core/engine.py",
        "(lengths + 1 >= batch.limits)",
        "(lengths >= batch.limits)",
        "core/test_engine.py generation/test_engine.py generation/test_text.py",
    ),
    Mistake(  # an empty list of prompts
        "generation",
        "generation/generate.py",
        "len(prompts) and isinstance(prompts[0], numbers.Integral)",
        "isinstance(prompts[0], numbers.Integral)",
        "generation/test_text.py generation",
    ),
    Mistake(  # subtle: a guessed token behind the end of a text
        "generation",
        "generation/prompt_lookup.py",
        "return (batch, is_right & ~batch.finished), None",
        "return (batch, is_right), None",
        "generation",
    ),
    # evaluation and rewards
    Mistake(  # subtle: texts that are cut at max_tokens
        "evaluation and rewards",
        "score/scoring.py",
        'np.searchsorted(np.cumsum(is_scored), num_left, side="right")',
        'np.searchsorted(np.cumsum(is_scored), num_left, side="left")',
        "score/test_scoring.py commands/test_eval.py",
    ),
    Mistake(  # subtle: a context that is too long by one token or more
        "evaluation and rewards",
        "score/benchmarks.py",
        "[option.ids[-max_length - 1 :] for option in options]",
        "[option.ids[-max_length:] for option in options]",
        "score/test_benchmarks.py",
    ),
    Mistake(
        "evaluation and rewards",
        "rl/scorer.py",
        "if np.isnan(total).all():",
        "if np.isnan(total).any():",
        "rl/test_rewards.py rl/test_rollouts.py",
    ),
    Mistake(  # subtle: an answer with NaN, which is not JSON
        "evaluation and rewards",
        "rl/shipped.py",
        "validator.is_valid(json.loads(answer, parse_constant=_refuse))",
        "validator.is_valid(json.loads(answer))",
        "rl/test_rewards.py",
    ),
    Mistake(
        "evaluation and rewards",
        "generation/grammar.py",
        "self._matcher = _compiled(grammar, tokenizer).deep_copy()",
        "self._matcher = _compiled(grammar, tokenizer)",
        "generation/test_grammar.py",
    ),
    # serve
    Mistake(  # subtle: several texts with the largest seed
        "serve",
        "serve/protocol.py",
        "seed=(sampling.seed + number) % 2**32",
        "seed=sampling.seed + number",
        "serve/test_http.py serve/test_engine.py",
    ),
    Mistake(  # subtle: characters that are split over tokens
        "serve",
        "serve/answers.py",
        "self._offset += len(self._decoder.decode(piece))",
        'self._offset += len(piece.decode(errors="replace"))',
        "serve/test_http.py serve/test_clients.py",
    ),
    Mistake(  # subtle: clients with other keys share cached prefixes
        "serve",
        "serve/app.py",
        r'salt = f"{state.key}\0{body.cache_salt}"',
        "salt = body.cache_salt",
        "serve/test_http.py serve/test_planted_leaks.py",
    ),
    Mistake(
        "serve",
        "serve/tools.py",
        "text = pending[: len(pending) - num_held].rstrip()",
        "text = pending[: len(pending) - num_held]",
        "serve/test_tools.py",
    ),
    Mistake(
        "serve",
        "serve/responses.py",
        'if not messages or messages[-1]["role"] != "assistant":',
        'if not messages or "tool_calls" not in messages[-1]:',
        "serve/test_responses.py",
    ),
    # commands
    Mistake(  # subtle: a disk that is full within a line
        "commands",
        "system/files.py",
        "            os.truncate(path, size)\n",
        "",
        "system/test_files.py commands/test_watching.py",
    ),
    Mistake(
        "commands",
        "commands/prompts_file.py",
        "rows = sorted([*done.values(), *bad], key=_key)",
        "rows = [*done.values(), *bad]",
        "commands/test_sample.py",
    ),
    Mistake(
        "commands",
        "training/report.py",
        'sample = html.escape(prompt + line["text"])',
        'sample = prompt + line["text"]',
        "commands/test_watching.py",
    ),
    Mistake(  # a conversation that just fits
        "commands",
        "commands/data.py",
        "too_long=len(ids) > limit,",
        "too_long=len(ids) >= limit,",
        "commands/test_data.py",
    ),
    Mistake(
        "commands",
        "commands/replay.py",
        'names = ("system_fingerprint", "ids", "log_probs")',
        'names = ("system_fingerprint", "ids")',
        "serve/test_http.py commands/test_serve.py",
    ),
    # verify and plan
    Mistake(  # NaN, of a check that raised, would pass
        "verify and plan",
        "lab/checks.py",
        "return self.ratio < 1 or bool(self.refusal)",
        "return not self.ratio >= 1 or bool(self.refusal)",
        "commands/test_verify.py lab",
    ),
    Mistake(  # subtle: a mistake within what a coarse precision allows
        "verify and plan",
        "lab/judge.py",
        "passed = not fit.over and all(one.precision == fit.name for one in named[:1])",
        "passed = not fit.over",
        "lab/test_judge.py",
    ),
    Mistake(  # subtle: a figure that was 0
        "verify and plan",
        "lab/bisect.py",
        "error = abs(values[0] - values[1]) / (abs(values[0]) or 1.0)",
        "error = abs(values[0] - values[1]) / abs(values[0])",
        "commands/test_audit.py",
    ),
    Mistake(
        "verify and plan",
        "lab/plan_program.py",
        '"reduce-scatter": devices - 1,',
        '"reduce-scatter": (devices - 1) / devices,',
        "lab/test_plan_program.py lab/test_plan_compiled.py",
    ),
    Mistake(  # what quantizing takes before the first step
        "verify and plan",
        "lab/plan_receipt.py",
        "return max(self.needed_bytes, self.starting_bytes)",
        "return self.needed_bytes",
        "lab/test_plan_receipt.py lab/test_plan_compiled.py",
    ),
]


def copied_checkout(folder: Path) -> Path:
    """Return a copy of what git knows of this checkout."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def first_failure(checkout: Path, command: list[str], timeout_s: float) -> str:
    """Return the first test that fails or cannot be imported; an empty text if all pass."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "JAX_PLATFORMS": "cpu"}
    try:
        done = subprocess.run(
            command,
            cwd=checkout,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return f"no end within {timeout_s:g} s"
    found = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", done.stdout, re.M)
    if found:
        return found[1]
    return "" if done.returncode in (0, 5) else f"exit code {done.returncode}"


def find(checkout: Path, mistake: Mistake, known: str, places: list[str]) -> tuple[str, str]:
    """Return where a mistake is found, and by which test; two empty texts if nowhere."""
    near = [f"tests/{name}" for name in mistake.tests.split()]
    commands = {
        "suite": [[*SUITE, *near], [*SUITE, "-n", "2"]],
        "slow": [
            [*SUITE, "-m", "slow", *near],
            [*SUITE, "-n", "2", "-m", "slow"],
            [sys.executable, "-m", "jllama", "verify"],
        ],
    }
    if known and (checkout / known.partition("::")[0]).exists():
        commands["suite"].insert(0, [*SUITE, known])
    for place in places:
        for command in commands[place]:
            if test := first_failure(checkout, command, timeout_s=3600):
                return place, test
    return "", ""


def main() -> None:
    """Plant the mistakes and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--room", nargs="*", help="of these rooms alone")
    parser.add_argument("--places", nargs="*", default=["suite", "slow"])
    parser.add_argument("--results", type=Path, help="read before, and written after each mistake")
    options = parser.parse_args()
    results = {}
    if options.results and options.results.exists():
        results = json.loads(options.results.read_text())
    counts = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        checkout = copied_checkout(Path(folder))
        for mistake in MISTAKES:
            if options.room and mistake.room not in options.room:
                continue
            path = checkout / "jllama" / mistake.path
            right = path.read_text()
            if right.count(mistake.right) != 1:
                sys.exit(f"{mistake.path} does not hold once: {mistake.right}")
            path.write_text(right.replace(mistake.right, mistake.wrong))
            name = f"{mistake.path}: {mistake.wrong}"
            known = results.get(name, ["", ""])[1]
            place, test = find(checkout, mistake, known, options.places)
            path.write_text(right)
            counts[place or "nowhere"] += 1
            results[name] = [place, test]
            print(f"{place or 'NOT FOUND':9}  {name}\n           {test}", flush=True)
            if options.results:
                options.results.write_text(json.dumps(results, indent=1) + "\n")
    print(dict(counts))


if __name__ == "__main__":
    main()
