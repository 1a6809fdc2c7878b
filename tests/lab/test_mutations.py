"""Planted mistakes fail exactly the checks that they concern."""

import dataclasses
import functools

import pytest
from models import planted, written_variant
from reference_writers import FORMAT_WRITERS

import jllama.models.build
from jllama.core.model import rope_frequencies
from jllama.core.parameters import Params
from jllama.lab.checks import VISIBLE, Check, run_checks
from jllama.lab.conformance import VARIANTS as ALL_VARIANTS
from jllama.lab.conformance import file_error, implementation_of
from jllama.lab.mutations import (
    MUTATIONS,
    Mistake,
    interleave_channels,
    model_with,
    mutation_checks,
)

pytestmark = pytest.mark.slow


def chosen(*names):
    return {name: ALL_VARIANTS[name] for name in names}


HALF_SPLIT, INTERLEAVED, NATIVE = "hf v5", "gguf", "native"
# Those that differ by more than a number from all others; the command itself runs all.
VARIANTS = chosen(
    *("Llama 1", "Llama 2 grouped", "Code Llama", "Llama 3.1", "Llama 3.2 tied", "multi-query"),
    *("linear x4", "dynamic x4", "yarn x32"),
)
RELATIVES = chosen(
    *("Llama 1", "Mistral", "Qwen 2 in windows", "Qwen 3", "SmolLM3", "OLMo 3"),
    *("partial rotation", "Granite 3"),
)
"""Those with options that a Llama does not have, and a Llama."""
WITH_EXPERTS = chosen("Llama 1", "Qwen 3", "Mixtral", "Qwen 3 experts", "OLMoE", "Llama 4")
"""Those with experts, which only the native format's writer holds, and two without."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Keeps the files, so that each is written once."""
    return tmp_path_factory.mktemp("variants")


def run_conformance(implementation, folder, formats, variants):
    """Return the rows and columns that fail, by far more than rounding; the others pass.

    Nothing is compiled: each planted copy would be, for each variant.
    """
    checks = [
        Check(
            "conformance",
            name,
            column,
            functools.partial(
                file_error, implementation, written_variant(folder, name, column), config
            ),
        )
        for name, config in variants.items()
        for column in formats
        if FORMAT_WRITERS[column].holds(config)
    ]
    results = list(run_checks(checks))
    passed = {(result.row, result.column) for result in results if result.passed}
    failed = {(result.row, result.column) for result in results if result.ratio >= VISIBLE}
    problems = [result for result in results if result.problem]
    assert len(passed) + len(failed) == len(results), problems
    return failed


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_planted_mistake_is_red_where_it_matters_and_nowhere_else(mutation, folder):
    """A file of the first variant that it concerns, as ``verify`` has a row of each; all others.

    A mistake of reading is not planted where it does not apply, so there is nothing to be seen.
    """
    file_format = INTERLEAVED if "permuted" in mutation.name else HALF_SPLIT
    groups = (VARIANTS, RELATIVES, WITH_EXPERTS)
    variants = next(group for group in groups if any(map(mutation.applies, group.values())))
    if variants is WITH_EXPERTS:
        file_format = NATIVE
    concerned, others = [], []
    for name, config in variants.items():
        if FORMAT_WRITERS[file_format].holds(config):
            (concerned if mutation.applies(config) else others).append(name)
    if mutation.model is jllama.models.build:
        others = []
    red = run_conformance(planted(mutation), folder, [file_format], chosen(concerned[0], *others))
    assert red == {(concerned[0], file_format)}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mistake_is_seen_with_experts(mutation):
    checks = [check for check in mutation_checks() if check.column == mutation.name]
    for result in run_checks(check for check in checks if ALL_VARIANTS[check.row].num_experts):
        assert result.passed, result


# Three mistakes as they were made


def without_theta(config):
    """A model that has RoPE's base as a default argument, and never hands it on."""
    return dataclasses.replace(config, rope_theta=10_000.0)


def with_factor_8(config):
    """A model made for Llama 3.1, given Llama 3.2."""
    scaling = config.rope_scaling and dataclasses.replace(config.rope_scaling, factor=8.0)
    return dataclasses.replace(config, rope_scaling=scaling)


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (without_theta, {"Code Llama", "Llama 3.1", "Llama 3.2 tied"}),
        (with_factor_8, {"Llama 3.2 tied", "dynamic x4"}),
    ],
)
def test_frequencies_of_another_configuration(folder, change, rows):
    model = model_with()
    vars(model)["rope_frequencies"] = lambda config, *length: rope_frequencies(
        change(config), *length
    )
    variants = chosen("Llama 1", "Code Llama", "Llama 3.1", "Llama 3.2 tied", "dynamic x4")
    red = run_conformance(implementation_of(model), folder, [HALF_SPLIT], variants)
    assert {row for row, _ in red} == rows


@pytest.mark.parametrize("variant", ["Llama 2 grouped", "Llama 3.1"])
def test_queries_and_keys_left_interleaved_for_one_variant(folder, variant):
    """A reader that knows one model's files by name."""

    def forgetful(config, params: Params):
        if config != VARIANTS[variant]:
            return config, params
        layers = params["layers"]
        return config, params | {
            "layers": layers | {name: interleave_channels(layers[name]) for name in ("wq", "wk")}
        }

    variants = chosen("Llama 1", "Llama 2 grouped", "Llama 3.1")
    mistake = Mistake("", forgetful, name="forgetful")
    red = run_conformance(planted(mistake), folder, [INTERLEAVED], variants)
    assert red == {(variant, INTERLEAVED)}


# The matrix's own figures


def test_every_variant_has_its_row_of_mistakes():
    checks = mutation_checks()
    for name, config in ALL_VARIANTS.items():
        columns = [check.column for check in checks if check.row == name]
        assert columns == [mutation.name for mutation in MUTATIONS if mutation.applies(config)]


def test_a_mistake_that_is_none_fails_the_matrix(monkeypatch):
    monkeypatch.setattr("jllama.lab.mutations.MUTATIONS", [Mistake("", name="nothing")])
    monkeypatch.setattr("jllama.lab.mutations.VARIANTS", {"Llama 1": VARIANTS["Llama 1"]})
    (result,) = run_checks(mutation_checks())
    assert result.ratio < 1
    assert not result.passed


def test_the_weights_are_such_that_a_small_mistake_shows():
    (check,) = [
        c for c in mutation_checks() if (c.row, c.column) == ("Llama 3.2 tied", "factor 8 for 32")
    ]
    assert next(run_checks([check])).ratio > VISIBLE
    dull = dataclasses.replace(check, tolerance=1.0)
    assert not next(run_checks([dull])).passed
