"""A program from an earlier process gives the bits of one that was traced here, and is never one of
other code.
"""

import dataclasses
import os
import pickle
import threading

import jax
import models
import numpy as np
import pytest
from jax.experimental import serialize_executable

import jllama
from jllama import functional as F
from jllama.core.config import BLOCKS
from jllama.core.model import Layer
from jllama.generation import steps
from jllama.models.language_model import LanguageModel
from jllama.system import cache, programs
from jllama.tokenizers.base import BytesTokenizer


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("JLLAMA_CACHE", str(tmp_path))
    later_process(monkeypatch)
    return tmp_path / "programs"


@pytest.fixture
def loaded(monkeypatch):
    """What was loaded; each is a program that was neither traced nor compiled."""
    found, load = [], serialize_executable.deserialize_and_load
    monkeypatch.setattr(
        serialize_executable, "deserialize_and_load", lambda *a: found.append(load(*a)) or found[-1]
    )
    return found


@jax.jit
def doubled(x):
    return x + x


@jax.jit
def squared(x):
    return x * x


def computed():
    """What two programs give."""
    numbers = jax.numpy.arange(3.0)
    return [programs.call(function, numbers).tolist() for function in (doubled, squared)]


def later_process(monkeypatch, keeps=True):
    monkeypatch.setattr(programs, "_is_enabled", threading.Event())
    monkeypatch.setattr(programs, "_programs", {})
    monkeypatch.setattr(programs, "_loading", {})
    if keeps:
        programs.enable_store()


def test_a_later_process_loads_what_this_one_compiled(folder, loaded, monkeypatch):
    config = dataclasses.replace(models.SERVED, num_layers=1, max_seq_len=64)
    model = LanguageModel(config, models.decode_params(config), BytesTokenizer())

    def generate(seed, temperature, top_k):
        settings = {"seed": seed, "temperature": temperature, "top_k": top_k}
        return jllama.generate(model, "Once", max_new_tokens=6, **settings)

    monkeypatch.setattr(steps, "call_program", programs.call)
    later_process(monkeypatch, keeps=False)
    expected = generate(3, 0.9, 40)
    assert not folder.exists()
    programs.enable_store()
    assert generate(3, 0.9, 40) == expected
    assert len([*folder.iterdir()]) == 2
    assert not loaded
    later_process(monkeypatch)
    assert generate(3, 0.9, 40) == expected
    assert len(loaded) == 2
    assert generate(4, 0.0, 0) != expected  # settings are data
    assert len(loaded) == len([*folder.iterdir()]) == 2


def test_what_can_be_damaged_is_compiled_again(folder, loaded, monkeypatch):
    expected = computed()
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:-500])
    later_process(monkeypatch)
    assert computed() == expected
    for path in [*folder.iterdir()]:  # whole, and still no program
        path.unlink()
        cache.store("programs", path.name, [np.arange(99)])
    later_process(monkeypatch)
    assert computed() == expected
    assert not loaded
    later_process(monkeypatch)
    assert computed() == expected
    assert len(loaded) == 2


@pytest.mark.parametrize(
    ("table", "name", "entry"),
    [
        (F.TRUNCATIONS, "top_k", lambda logits, k: F.top_k_mask(logits, k * 0 + 1)),
        (F.PENALTIES, "mine", lambda logits, value, seen, counts: logits),
        (
            F.ATTENTION,
            "reference",
            F.AttentionImplementation(lambda *a: F.ATTENTION["blocked"].function(*a)),
        ),
        (BLOCKS, "mine", type("Mine", (Layer,), {"__module__": "mine"})),
    ],
    ids=["truncation", "penalty", "attention", "layer"],
)
def test_with_code_of_others_nothing_is_kept_or_loaded(
    table, name, entry, folder, loaded, monkeypatch
):
    monkeypatch.setitem(table, name, entry)
    call = jax.jit(lambda x: x + 1)
    assert programs.call(call, jax.numpy.zeros(3)).tolist() == [1, 1, 1]
    assert not folder.exists()


def test_a_configuration_of_others_is_left_to_jax(folder):
    @dataclasses.dataclass(frozen=True)
    class Mine(jllama.LlamaConfig):
        pass

    call = jax.jit(lambda config, x: x + config.num_layers, static_argnums=0)
    assert programs.call(call, Mine(num_layers=4), jax.numpy.zeros(3)).tolist() == [4, 4, 4]
    assert not folder.exists()
    assert programs.call(call, models.SMALL, jax.numpy.zeros(3)).tolist() == [2, 2, 2]
    assert folder.exists()


def test_everything_that_a_program_depends_on_is_in_its_key(folder, monkeypatch):
    def kept():
        later_process(monkeypatch)
        programs.call(jax.jit(lambda config, x: x + 1, static_argnums=0), *args).block_until_ready()
        return len([*folder.iterdir()])

    args = [models.SMALL, jax.numpy.zeros(3)]
    assert kept() == kept() == 1
    args[1] = jax.numpy.zeros(3, jax.numpy.bfloat16)
    assert kept() == 2
    args[0] = dataclasses.replace(models.SMALL, rope_theta=7.0)
    assert kept() == 3
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=1")
    assert kept() == 4
    monkeypatch.setattr(cache, "_code", lambda: "a later version")
    assert kept() == 5
    jax.config.update("jax_numpy_rank_promotion", "warn")
    try:
        assert kept() == 6
    finally:
        jax.config.update("jax_numpy_rank_promotion", "allow")


def test_donated_arguments_are_consumed_and_others_stay(monkeypatch):
    call = jax.jit(lambda x, y: x + y, donate_argnums=0)
    for _ in range(2):
        x, y = jax.numpy.ones(64), jax.numpy.ones(64)
        assert programs.call(call, x, y)[0] == 2
        assert (x.is_deleted(), y.is_deleted()) == (True, False)
        later_process(monkeypatch)


def test_arguments_on_another_device_are_left_to_jax(folder):
    call, device = jax.jit(lambda x: x + 1), jax.devices()[-1]
    assert programs.call(call, jax.device_put(jax.numpy.zeros(3), device)).devices() == {device}


class Planted:
    """A pickle that leaves a mark when it is read."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def plant(folder, key, mark, mode):
    cache.store("programs", key, [np.frombuffer(pickle.dumps(Planted(mark)), np.uint8)])
    (folder / key).chmod(mode)


def test_nothing_is_run_but_what_is_asked_for(folder, tmp_path, monkeypatch):
    """However new it is, and whatever its name; and not what others can write, though it is asked
    for.
    """
    expected, mark = computed(), tmp_path / "mark"
    for number, key in enumerate([*(path.name for path in folder.iterdir()), "f" * 64]):
        plant(folder, key, mark, 0o600 if key == "f" * 64 else 0o666)
        os.utime(folder / key, (4e9 + number, 4e9 + number))
    later_process(monkeypatch)
    assert computed() == expected
    for found in programs._loading.values():
        found.result()
    assert not mark.exists()
    plant(folder, "f" * 64, mark, 0o600)
    programs._load("f" * 64)
    assert mark.exists()  # so it would have been seen


def test_what_the_last_process_with_a_task_asked_for_is_loaded_ahead(folder, loaded, monkeypatch):
    programs.enable_store("sample", "one")
    expected = computed()
    later_process(monkeypatch, keeps=False)
    programs.enable_store("sample", "two")
    assert not programs._loading
    assert computed() == expected
    for task in ("one", "two"):
        later_process(monkeypatch, keeps=False)
        loaded.clear()
        programs.enable_store("sample", task)
        assert {*programs._loading} == {path.name for path in folder.iterdir()}
        for found in programs._loading.values():
            found.result()
        assert len(loaded) == 2
        assert computed() == expected
        assert len(loaded) == 2
        assert not programs._loading
