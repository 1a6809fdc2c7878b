"""Whatever the OpenAPI document allows, and what it forbids: no fault of the server's, and answers
as it says."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from models import served
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from jllama.serve.app import make_app
from jllama.serve.config import EngineConfig, HttpConfig
from jllama.serve.engine import EngineThread

CHECKS = [
    not_a_server_error,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def document():
    engine = EngineThread({"small": served()}, EngineConfig(slots=3, context=64, queue=8))
    engine.start()
    yield schemathesis.openapi.from_asgi("/openapi.json", make_app(engine, HttpConfig()))
    engine.close()


@pytest.mark.parametrize(
    "mode", [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
)
def test_the_server_does_what_its_document_says(document, mode):
    tried = []
    for result in document.get_all_operations():
        operation = result.ok()
        if mode == schemathesis.GenerationMode.NEGATIVE and operation.method == "get":
            continue  # they take nothing that could be wrong

        @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case):
            case.call_and_validate(checks=CHECKS)

        check()
        tried.append(operation.path)
    assert "/v1/chat/completions" in tried


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_is_what_the_document_says(document, path):
    prompt = (
        {"prompt": "words"}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": "words"}]}
    )
    case = document[path]["POST"].Case(
        body={**prompt, "stream": True}, media_type="application/json"
    )
    assert case.call_and_validate(checks=CHECKS).status_code == 200
