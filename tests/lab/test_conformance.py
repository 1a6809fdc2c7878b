"""What ``jllama verify`` writes: each format refuses the variants that it cannot hold alone."""

import pytest

from jllama.core import JllamaError
from jllama.formats import registry
from jllama.lab.conformance import VARIANTS, weights
from jllama.models.language_model import LanguageModel

META_HOLDS = "Llama 1|Llama 2|Llama 2 grouped|Code Llama|Llama 3|Llama 3.1|Llama 3.2 tied|Llama 3.3"
META_HOLDS += "|OpenLLaMA 3B|TinyLlama|SmolLM2|llama2.c|Phi-4|multi-query"
HOLDS = {
    "orbax": {*VARIANTS},
    "hf": {*VARIANTS},
    "gguf": {*VARIANTS} - {"dynamic x4", "Llama 4"},
    "meta": {*META_HOLDS.split("|")},
    "llama2c": {"Llama 2", "Llama 2 grouped", "TinyLlama", "llama2.c", "multi-query"},
}


@pytest.mark.parametrize("file_format", registry.FORMATS)
def test_a_format_refuses_what_it_cannot_hold_and_nothing_else(file_format, tmp_path):
    held = set()
    for number, (name, variant) in enumerate(VARIANTS.items()):
        model = LanguageModel(variant, weights(variant))
        try:
            registry.save(model, tmp_path / str(number), file_format)
        except JllamaError:
            continue
        held.add(name)
    assert held == HOLDS[file_format]
