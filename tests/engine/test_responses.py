"""What is said of SGLang's response store, in the emulated replica and in docs/decisions/0029, is in its source."""

from __future__ import annotations

import re

import pytest

from sim.emulator import stored
from sim.emulator.errors import ApiError
from sim.emulator.stored import ResponseStore
from tests.fakes.process import ROOT

pytestmark = pytest.mark.engine


def source(name: str) -> str:
    """Of a module of the engine's OpenAI entrypoints, strings that are split over lines joined."""
    (file,) = ROOT.glob(f".engine/venv/lib/python3*/site-packages/sglang/srt/entrypoints/openai/{name}.py")
    return re.sub(r'"\s+f?"', "", file.read_text())


def test_the_emulated_words_are_the_engines() -> None:
    serving = source("serving_responses")
    assert str(stored.disabled("x")) in serving
    for name in ("x", "resp_x"):
        with pytest.raises(ApiError) as refused:
            ResponseStore().find(name)
        assert str(refused.value).replace(f"'{name}'", "'{response_id}'") in serving
        assert f"status_code={'HTTPStatus.NOT_FOUND' if refused.value.status == 404 else '400'}" in serving or (
            refused.value.status == 400
        )


def test_what_the_router_relies_on() -> None:
    serving, protocol = source("serving_responses"), source("protocol")
    assert "self.response_store: dict[str, ResponsesResponse] = {}" in serving, "it is in the process"
    assert "persist = self.enable_response_store and bool(request.store)" in serving
    request = protocol.split("class ResponsesRequest(")[1].split("\nclass ")[0]
    assert "store: Optional[bool] = True" in request, "kept unless it says otherwise"
    assert 'f"resp_{uuid.uuid4().hex}"' in request
    response = protocol.split("class ResponsesResponse(")[1].split("\nclass ")[0]
    assert re.search(r'"""\s+id: str', response), "the id is the first field"
