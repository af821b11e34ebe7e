"""The OpenAPI document: valid, of all routes and no others, and enough to make a client of."""

import json
import types
from typing import Any

import jsonschema
import openapi_spec_validator
import pytest
from starlette.routing import Route

from slipstream.serve import absent, openapi
from slipstream.serve.app import build
from slipstream.serve.embed import routes as embed_routes
from slipstream.serve.observe.shared_counters import SharedCounters

PAGE = {"/", "/static/{name}"}
REFUSING = {*(route.endpoint for route in absent.routes()), embed_routes.refuse}
KINDS = ("language model", "composite", "encoder")


def document(front, kind: str = "language model") -> tuple[dict, list[Route]]:
    """The document of an application, and its routes."""
    settings: dict[str, Any] = {name: getattr(front.front, name) for name in ("server_config", "engine_config", "model")}
    settings |= {"metrics": types.SimpleNamespace(), "shared_counters": SharedCounters()}
    kinds = {"composite": kind == "composite", "encoder": kind == "encoder"}
    app: Any = build(types.SimpleNamespace(**settings, **kinds))  # type: ignore[arg-type]
    while not hasattr(app, "routes"):  # what stands before the routes
        app = app._app
    routes = [r for r in app.routes if isinstance(r, Route)]
    describe = next(r for r in routes if r.path == "/openapi.json")
    body = describe.endpoint(None)
    try:
        body.send(None)
    except StopIteration as e:
        return json.loads(e.value.body), routes
    raise AssertionError("the document is made at once")


@pytest.mark.parametrize("kind", KINDS)
def test_the_document_is_valid_openapi(front, kind):
    spec, _ = document(front, kind)
    openapi_spec_validator.OpenAPIV31SpecValidator(spec).validate()
    ids = [op["operationId"] for item in spec["paths"].values() for op in item.values()]
    assert len(set(ids)) == len(ids)
    for name, schema in spec["components"]["schemas"].items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema.get("title", name) == name, "generators name a class by its title, so there may be one of each"
    assert all("items" in array for array in openapi._arrays(spec["components"]))


@pytest.mark.parametrize("kind", KINDS)
def test_the_document_has_every_route_and_no_other(front, kind):
    spec, routes = document(front, kind)
    said = {(method.upper(), path) for path, item in spec["paths"].items() for method in item}
    built: dict[tuple[str, str], Route] = {}
    for route in routes:
        for method in (route.methods or set()) - {"HEAD"}:
            built.setdefault((method, route.path.replace(":path", "")), route)  # the first one answers
    refused = {key for key, route in built.items() if route.endpoint in REFUSING}
    assert said == {key for key in built if key[1] not in PAGE} - refused


def test_a_wrong_method_hears_which_are_right(roomy):
    for path, item in roomy.client.get("/openapi.json").json()["paths"].items():
        r = roomy.client.request("PUT", path.format(id="x"))
        right = {method.upper() for method in item} | ({"HEAD"} if "get" in item else set())
        assert r.status_code == 405 and set(r.headers["allow"].split(", ")) == right, path


class Client:
    """Made of the document alone: a method for each operation, named by its id. What is sent and what comes must be in it."""

    def __init__(self, spec: dict, http):
        self._spec, self._http = spec, http
        for path, item in spec["paths"].items():
            for method, op in item.items():
                setattr(self, op["operationId"], lambda m=method, p=path, o=op, **given: self._call(m, p, o, **given))

    def _valid(self, value, schema: dict) -> None:
        jsonschema.Draft202012Validator({**schema, "components": self._spec["components"]}).validate(value)

    def _call(self, method: str, path: str, op: dict, body=None, **given):
        places = {p["name"]: p["in"] for p in op.get("parameters", ())}
        assert not given.keys() - places.keys(), f"{method} {path} has no such parameter"
        query = {k: v for k, v in given.items() if places[k] == "query"}
        path = path.format(**{k: given[k] for k, where in places.items() if where == "path"})
        if "requestBody" in op:
            self._valid(body, op["requestBody"]["content"]["application/json"]["schema"])
        r = self._http.request(method, path, json=body, params=query)
        kind = r.headers["content-type"].partition(";")[0]
        content = op["responses"][str(r.status_code)]["content"][kind]
        if kind == "application/json":
            self._valid(r.json(), content["schema"])
            return r.json()
        return r.text


def test_a_client_made_of_the_document_reaches_every_route(roomy):
    client, called = Client(roomy.client.get("/openapi.json").json(), roomy.client), []

    def call(name, **given):
        called.append(name)
        return getattr(client, name)(**given)

    chat = {"messages": [{"role": "user", "content": "hi"}]}
    hello = call("post_v1_chat_completions", body=chat)
    assert hello["choices"][0]["message"]["content"] == "hello"
    assert "[DONE]" in call("post_v1_chat_completions", body={**chat, "stream": True, "stop": ["x"], "tools": []})
    assert call("post_v1_completions", body={"prompt": [1, 2], "max_tokens": 1})["usage"]["completion_tokens"] == 1
    assert call("post_v1_messages", body={**chat, "max_tokens": 9})["content"][0]["text"] == "hello"
    assert call("post_v1_messages", body={**chat, "max_tokens": 10**6})["error"]["type"] == "invalid_request_error"
    assert call("post_v1_messages_count_tokens", body=chat)["input_tokens"] > 2
    response = call("post_v1_responses", body={"input": "hi"})
    assert call("get_v1_responses_id", id=response["id"]) == response
    assert len(call("get_v1_responses_id_input_items", id=response["id"], limit=5)["data"]) == 1
    assert "background" in call("post_v1_responses_id_cancel", id=response["id"])["error"]["message"]
    assert call("delete_v1_responses_id", id=response["id"])["deleted"]
    assert call("get_v1_responses_id", id=response["id"])["error"]["type"] == "not_found_error"
    assert call("post_v1_responses_input_tokens", body={"input": "hi"})["input_tokens"] > 2
    tokens = call("post_tokenize", body={"prompt": "ab"})["tokens"]
    assert call("post_detokenize", body={"tokens": tokens})["prompt"] == "ab"
    assert call("get_v1_models")["data"][0]["id"] == call("get_v1_models_id", id="fake")["id"] == "fake"
    assert call("get_tokenizer_info")["vocab_size"] and call("get_version")["version"]
    assert call("get_health") == {"status": "ok"} and call("get_ready") == {"ready": True}
    assert "slipstream" in call("get_metrics") and call("get_openapi_json")["openapi"] == "3.1.0"
    roomy.front.engine.draining = True
    assert "draining" in call("get_health")["reason"] and not call("get_ready")["ready"]
    assert call("post_v1_completions", body={"prompt": "x"})["error"]["code"] == "unavailable"
    roomy.front.engine.draining = False
    assert set(called) == {name for name in vars(client) if not name.startswith("_")}


def test_the_document_says_whether_a_key_is_needed():
    for needs, security in ((True, [{"bearer": []}, {"x-api-key": []}]), (False, [{"bearer": []}, {"x-api-key": []}, {}])):
        spec = openapi.document(False, needs)
        assert spec["security"] == security and spec["paths"]["/health"]["get"]["security"] == []
        assert set(spec["components"]["securitySchemes"]) == {"bearer", "x-api-key"}
