"""Whatever the OpenAPI document allows, and what it forbids: no fault of the server's, and answers
as it says."""

import pytest
import schemathesis
from helpers_serve import CHAT, COMPLETIONS, MESSAGES, started
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from jllama.serve.app import make_app
from jllama.serve.config import HttpConfig

CHECKS = [
    not_a_server_error,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def document():
    with started(context=64, queue=8) as engine:
        yield schemathesis.openapi.from_asgi("/openapi.json", make_app(engine, HttpConfig()))


@pytest.mark.parametrize(
    "mode", [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
)
def test_the_server_does_what_its_document_says(document, mode):
    tried = []
    for result in document.get_all_operations():
        operation = result.ok()
        if mode == schemathesis.GenerationMode.NEGATIVE and operation.method == "get":
            continue  # they take nothing that could be wrong

        @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case):
            case.call_and_validate(checks=CHECKS)

        check()
        tried.append(operation.path)
    assert CHAT in tried


@pytest.mark.parametrize(
    ("path", "prompt"), [(COMPLETIONS, {"prompt": "words"}), (CHAT, {"messages": MESSAGES})]
)
def test_a_stream_is_what_the_document_says(document, path, prompt):
    case = document[path]["POST"].Case(
        body={**prompt, "stream": True}, media_type="application/json"
    )
    assert case.call_and_validate(checks=CHECKS).status_code == 200
