"""Routes fuzzed from the OpenAPI document: no 500, and the engine never sees what it could not run."""

import json
import os
import random
from array import array

from slipstream.log.request import Request
from tests.serve.fake import EOS, Script, wait_for

CASES = int(os.environ.get("FUZZ_CASES", "1500"))  # 10,000 before a release
ODD = [None, True, False, 0, 1, -1, 2**31, 2**63, 2**80, 0.5, -0.0, 1e308]
ODD += ["", "x", "\u0000", "💥" * 50, [], [[]], [0], ["a", 1], {}, {"a": None}]
INPUTS = ["hi", [{"role": "user", "content": "x"}], [{"type": "message", "role": "assistant", "content": None}]]
INPUTS += [[{"type": "function_call", "call_id": "1", "name": "a", "arguments": "{}"}, {"role": "user", "content": "x"}]]
INPUTS += [[{"type": "function_call_output", "call_id": "1", "output": "x"}], [{"type": "reasoning", "summary": []}], [{}]]
ENDS = ("data: [DONE]", '"type":"message_stop"', '"type":"response.completed"', '"type":"response.incomplete"')


class Maker:
    """Values that fit a schema, mostly."""

    def __init__(self, document: dict, rng: random.Random):
        self.schemas, self.rng = document["components"]["schemas"], rng

    def make(self, schema: dict, depth: int = 0):
        rng = self.rng
        if rng.random() < 0.04 or depth > 6:
            return rng.choice(ODD)
        if "$ref" in schema:
            return self.make(self.schemas[schema["$ref"].rsplit("/", 1)[1]], depth)
        if "anyOf" in schema:
            return self.make(rng.choice(schema["anyOf"]), depth)
        if "enum" in schema:
            return rng.choice(schema["enum"])
        kind = schema.get("type")
        if kind == "object":
            return self.object(schema, depth)
        if kind == "array":
            low, high = schema.get("minItems", 0), schema.get("maxItems", 4)
            count = high + 1 if rng.random() < 0.01 else rng.choice([low, 1, low + 1, min(high, low + 3)])
            return [self.make(schema.get("items", {}), depth + 1) for _ in range(min(count, 300))]
        if kind in ("integer", "number"):
            low = schema.get("minimum", schema.get("exclusiveMinimum", -5))
            high = schema.get("maximum", low + 10)
            span = rng.choice([min(high, low + 3), high]) if rng.random() < 0.2 else min(high, low + 3)
            value = rng.uniform(low, span)
            return int(value) if kind == "integer" else value
        if kind == "string":
            return rng.choice(["a", "hello", "STOP", "é", " ", "\n", "x" * rng.randrange(1, 40)])
        if kind == "boolean":
            return rng.random() < 0.5
        if kind == "null":
            return None
        return rng.choice(ODD)

    def object(self, schema: dict, depth: int) -> dict:
        rng, out = self.rng, {}
        properties = schema.get("properties", {})
        for name, sub in properties.items():
            if name in schema.get("required", ()) or rng.random() < 0.15:
                out[name] = self.make(sub, depth + 1)
        if not properties and rng.random() < 0.5:
            out[rng.choice(["a", "1", "300"])] = self.make(schema.get("additionalProperties") or {}, depth + 1)
        if rng.random() < 0.02:
            out["no_such_parameter"] = 1
        if "model" in out:
            out["model"] = rng.choice([None, "fake", "fake", "other"])
        return out


def check(request: Request, vocab: int, max_len: int) -> None:
    """What every rank may rely on."""
    s = request.sampling
    ids = array("i", request.prompt)
    assert len(ids) >= 1 and all(0 <= i < vocab for i in ids) and request.max_tokens >= 1
    assert len(ids) + request.max_tokens <= max_len and s.min_tokens <= request.max_tokens
    assert 0 <= s.temperature <= 2 and 0 < s.top_p <= 1 and s.top_k >= 0 and 0 <= s.min_p <= 1 and 0 <= s.seed < 2**63
    assert s.repetition_penalty > 0 and abs(s.presence_penalty) <= 2 and abs(s.frequency_penalty) <= 2
    assert -1 <= s.logprobs <= 20 and -1 <= s.prompt_logprobs <= 20 and all(0 <= i < vocab for i in s.stop_ids)
    assert all(0 <= i < vocab for i, _ in s.logit_bias) and all(w and all(0 <= i < vocab for i in w) for w in s.bad_words)


def test_routes_fuzzed_from_the_document_never_answer_500(front):
    rng = random.Random(2)
    document = front.client.get("/openapi.json").json()
    maker = Maker(document, rng)
    front.script = lambda r: Script([*[rng.randrange(front.tokenizer.vocab_size) for _ in range(8)], EOS], reason="length")
    posts = [path for path, item in document["paths"].items() if "requestBody" in item.get("post", {})]
    seen: dict[int, int] = {}
    for _ in range(CASES):
        path = rng.choice(posts[:2] * 4 + posts[2:4] * 2 + posts[4:])
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        body = maker.make(schema)
        if path.startswith("/v1/responses") and isinstance(body, dict) and rng.random() < 0.7:
            body["input"] = rng.choice(INPUTS)
        raw = json.dumps(body).encode()
        if rng.random() < 0.05:
            at = rng.randrange(len(raw) + 1)
            raw = raw[:at] + bytes([rng.randrange(256)]) + raw[at:]
        r = front.client.post(path, content=raw, headers={"content-type": "application/json"})
        seen[r.status_code] = seen.get(r.status_code, 0) + 1
        assert r.status_code in (200, 400, 404), (path, raw, r.text)
        if r.status_code != 200:
            assert r.json()["error"]["message"], raw
        elif "text/event-stream" in r.headers["content-type"]:
            last = r.text.rstrip().splitlines()[-1]
            assert any(end in last for end in ENDS), (raw, r.text[-300:])
    for request in front.leader.requests:
        check(request, front.tokenizer.vocab_size, 512)
    assert seen[200] > CASES // 10 and seen[400] > CASES // 10, seen
    wait_for(lambda: front.front.engine.live == 0 and not front.front.open)  # some ran in the background
