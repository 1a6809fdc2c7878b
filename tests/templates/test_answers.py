"""Which tokens of a conversation count: exactly the answers and their ends, whatever the template."""

import pytest
from helpers import trained_llama3, trained_smollm

from jllama.errors import JllamaError
from jllama.templates.answers import conversation_tokens
from jllama.templates.messages import TEMPLATES, end_of_turn_ids
from jllama.tokenizers import train_sentencepiece

CORPUS = [
    "the system says hello to the user and the assistant, don't they? 12 345\n\n  user\n héllo 世界 [INST] <<SYS>>\n"
]
LLAMA_2, LLAMA_3 = train_sentencepiece(CORPUS * 20, 340), trained_llama3(CORPUS * 20, 350)
CHATML = trained_smollm(CORPUS * 20, 350)
SAID = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "the user says"},
    {"role": "user", "content": "12"},
    {"role": "assistant", "content": "345"},
]


@pytest.mark.parametrize(
    ("name", "tokenizer", "end"),
    [("llama2", LLAMA_2, "</s>"), ("llama3", LLAMA_3, "<|eot_id|>"), ("chatml", CHATML, "<|im_end|>")],
)
def test_answers_and_their_ends_count(name, tokenizer, end):
    ids, counted = conversation_tokens(
        tokenizer, TEMPLATES[name], SAID, end_of_turn_ids(tokenizer, (tokenizer.eos_id,))
    )
    texts = {id: text for text, id in tokenizer.special_tokens.items()}
    shown = "".join(texts.get(id) or tokenizer.decode([id]) for id, counts in zip(ids, counted, strict=True) if counts)
    assert shown.replace(" ", "") == f"theusersays{end}345{end}"


def test_no_answer():
    with pytest.raises(JllamaError, match="no message is the assistant's"):
        conversation_tokens(CHATML, TEMPLATES["chatml"], SAID[:1], (2,))
