"""What tests of the server share."""

import dataclasses
import gc
from pathlib import Path

import jax
import openai
import pytest
from helpers import trained_smollm
from helpers_serve import CALLING, connected, started
from models import served


@pytest.fixture(autouse=True, scope="module")
def no_programs_of_earlier_modules():
    """The modules of this folder share the programs of engines of the same size."""


@pytest.fixture(autouse=True, scope="package")
def no_programs_of_this_folder():
    yield
    jax.clear_caches()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def engine():
    """One for a model as it is, and with templates that take tools."""
    stock = Path(__file__).parent.parent / "templates/stock/mistral_nemo.jinja"
    special = ("[TOOL_CALLS]", "<s>", "</s>")
    mistral = dataclasses.replace(
        served(),
        tokenizer=trained_smollm([], 256, "tekken", special, (1, 2), add_bos=True),
        chat_template=stock.read_text(),
        stop_ids=(2,),
    )
    caller = dataclasses.replace(served(), chat_template=CALLING)
    with started({"small": served(), "caller": caller, "mistral": mistral}, queue=16) as engine:
        yield engine


@pytest.fixture(scope="module")
def http(engine):
    with connected(engine) as http:
        yield http


@pytest.fixture(scope="module")
def client(http):
    """OpenAI's own."""
    with openai.OpenAI(
        base_url="http://x/v1", api_key="none", http_client=http, max_retries=0
    ) as client:
        yield client
