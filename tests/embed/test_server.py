"""A server of all-MiniLM-L6-v2: OpenAI's client, scores, refusals, what its other routes say, and the loss of its process."""

import base64
import concurrent.futures
import json
import os
import signal
import socket
import time

import numpy as np
import openai
import pytest

from slipstream.errors import BadRequest
from slipstream.llm import LLM
from slipstream.weights.pull import resolve_model
from tests.embed.test_encoder import SENTENCES, SMALL, encoder_of, texts
from tests.helpers.checkpoints import randomize
from tests.helpers.server import Server

NAME = "mini"
DOCUMENTS = ["Bananas are yellow.", "Paris is the capital of France.", "France is a country in Europe."]
QUERY = "What is the capital of France?"


@pytest.fixture(scope="module")
def server():
    with Server("--served-model-name", NAME, "--enable-debug", model=str(resolve_model("all-minilm-l6-v2"))) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected():
    """The vectors of SENTENCES, each computed alone, and their ids."""
    from slipstream.tokenize.tokenizer import load_tokenizer

    folder = resolve_model("all-minilm-l6-v2")
    encoder, tokenizer = encoder_of(folder), load_tokenizer(folder)
    ids = [tokenizer.encode(text) for text in SENTENCES]
    return [encoder.encode(texts([np.array(row, np.int32)]))[0] for row in ids], ids


@pytest.mark.parametrize("form", ["float", "base64", None])
def test_openais_client_gets_the_models_vectors(client, expected, form):
    more = {"encoding_format": form} if form else {}  # without it, the client asks for base64 and decodes it
    answer = client.embeddings.create(model=NAME, input=list(SENTENCES), **more)
    vectors, ids = expected
    assert [each.index for each in answer.data] == list(range(len(SENTENCES)))
    for each, vector in zip(answer.data, vectors, strict=True):
        got = np.frombuffer(base64.b64decode(each.embedding), "<f4") if form == "base64" else np.array(each.embedding)
        assert np.abs(got - vector).max() < 1e-5
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    assert (answer.object, answer.model, answer.data[0].object) == ("list", NAME, "embedding")


def test_token_ids_are_taken_as_they_are(client, expected):
    vectors, ids = expected
    answer = client.embeddings.create(model=NAME, input=ids[:2])
    assert np.abs(np.array(answer.data[1].embedding) - vectors[1]).max() < 1e-5
    (one,) = client.embeddings.create(model=NAME, input=ids[0]).data
    assert np.abs(np.array(one.embedding) - vectors[0]).max() < 1e-5


def test_fewer_dimensions_are_the_first_ones_with_length_1(client, expected):
    (one,) = client.embeddings.create(model=NAME, input=SENTENCES[0], dimensions=10).data
    part = expected[0][0][:10]
    assert np.abs(np.array(one.embedding) - part / np.linalg.norm(part)).max() < 1e-5


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"input": ""}, "input", "must not be empty"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": ["a", ""]}, "input", r"input[1]: must not be empty"),
        ({"input": "word " * 300}, "input", "has 302 tokens; the model takes at most 256"),
        ({"input": "word " * 100_000}, "input", "must fit in the model's 256 tokens"),
        ({"input": [[101, 99999]]}, "input", "must be below 30522"),
        ({"input": ["a", [1]]}, "input", "list of lists"),
        ({"input": ["a"] * 2049}, "input", "at most 2048 texts"),
        ({"input": "a", "dimensions": 385}, "dimensions", "at most 384"),
        ({"input": "a", "dimensions": 0}, "dimensions", "at least 1"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", ""),
        ({"input": "a", "truncate": True}, "truncate", "unknown parameter"),
        ({"model": NAME}, "input", "missing"),
    ],
)
def test_a_wrong_embedding_request_is_refused_with_its_field(server, body, param, says):
    answer = server.post("/v1/embeddings", body)
    assert answer.status == 400 and says in answer.body["error"]["message"], answer
    assert answer.body["error"]["param"] == param and answer.body["error"]["type"] == "invalid_request_error"


def test_another_model_is_not_found(server):
    assert server.post("/v1/embeddings", {"model": "other", "input": "a"}).status == 404


def test_documents_are_ranked_by_the_cosine_of_their_vectors(server):
    body = {"model": NAME, "query": QUERY, "documents": DOCUMENTS}
    answer = server.post("/v1/rerank", body).body
    rows = server.post("/v1/embeddings", {"input": [QUERY, *DOCUMENTS]}).body["data"]
    query, *documents = (np.array(row["embedding"]) for row in rows)
    scores = [float(query @ d) for d in documents]
    assert [r["index"] for r in answer["results"]] == sorted(range(3), key=lambda i: -scores[i]) == [1, 2, 0]
    for result in answer["results"]:
        assert abs(result["relevance_score"] - scores[result["index"]]) < 1e-5
        assert result["document"] == {"text": DOCUMENTS[result["index"]]}
    assert answer["id"].startswith("rerank-") and answer["usage"]["total_tokens"] > 20
    short = server.post(
        "/v2/rerank", {**body, "documents": [{"text": d} for d in DOCUMENTS], "top_n": 1, "return_documents": False}
    )
    assert short.body["results"] == [{"index": 1, "relevance_score": answer["results"][0]["relevance_score"]}]


def test_scores_come_in_order_for_one_text_or_as_many(server):
    many = server.post("/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS}).body
    assert [(d["index"], d["object"]) for d in many["data"]] == [(0, "score"), (1, "score"), (2, "score")]
    pairs = server.post("/score", {"text_1": [QUERY] * 3, "text_2": DOCUMENTS}).body
    for one, other in zip(many["data"], pairs["data"], strict=True):
        assert abs(one["score"] - other["score"]) < 1e-5
    refused = server.post("/v1/score", {"text_1": ["a", "b"], "text_2": DOCUMENTS})
    assert refused.status == 400 and "as many as text_2 has (3)" in refused.body["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_routes_that_generate_say_what_the_model_does(server, path):
    answer = server.post(path, {"model": NAME, "prompt": "x", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]})
    assert answer.status == 400 and "embeds texts" in answer.body["error"]["message"]


def test_the_other_routes_know_the_model(server):
    assert server.get("/health").status == server.get("/ready").status == 200
    (card,) = server.get("/v1/models").body["data"]
    assert (card["id"], card["max_model_len"]) == (NAME, 256)
    assert server.post("/tokenize", {"prompt": "Paris"}).body["tokens"] == [101, 3000, 102]
    paths = server.get("/openapi.json").body["paths"]
    assert "/v1/embeddings" in paths and "/v1/completions" not in paths


def metric(server, name):
    lines = [line for line in server.get("/metrics").body.splitlines() if line.startswith(f"slipstream:{name}")]
    return float(lines[0].rpartition(" ")[2])


def test_requests_and_their_tokens_are_counted(server):
    names = ("prompt_tokens_total", 'request_success_total{finished_reason="stop"')
    before = [metric(server, name) for name in names]
    server.post("/v1/embeddings", {"input": [[101, 102], [101, 3000, 102]]})
    assert [metric(server, name) for name in names] == [before[0] + 5, before[1] + 1]


LONG = {"input": [[101, *[3000] * 250, 102]] * 1000}  # many seconds of work


def test_a_client_that_leaves_ends_its_request_and_others_do_not_wait_for_it(server):
    name = 'request_success_total{finished_reason="abort"'
    before, body = metric(server, name), json.dumps(LONG).encode()
    lines = (
        "POST /v1/embeddings HTTP/1.1",
        "host: localhost",
        "content-type: application/json",
        f"content-length: {len(body)}",
    )
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        server.until(lambda: metric(server, "num_requests_waiting") == 1, "the request")
        begun = time.monotonic()
        assert server.post("/v1/embeddings", {"input": "small"}).status == 200
        assert metric(server, "num_requests_waiting") == 1 and time.monotonic() - begun < 20
    server.until(lambda: metric(server, name) == before + 1, "the abort")
    server.until(lambda: metric(server, "num_requests_waiting") == 0, "an empty queue")


def test_a_killed_process_gives_each_request_one_error_and_starts_again(server):
    (rank,) = server.ranks().values()
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(server.post, "/v1/embeddings", LONG) for _ in range(3)]
        server.until(lambda: metric(server, "num_requests_waiting") == 3, "three requests")
        os.kill(rank["pid"], signal.SIGKILL)
        for answer in answers:
            assert answer.result(60).status == 500 and answer.result().body["error"]["code"] == "engine_down"
    assert server.get("/health").status == 503
    server.wait_healthy()
    assert server.post("/v1/embeddings", {"input": "again"}).status == 200


def test_a_python_program_gets_vectors_and_scores(expected):
    vectors, ids = expected
    with LLM("all-minilm-l6-v2", device="cpu") as llm:
        found = [*llm.embed(SENTENCES), *llm.embed(ids[:2])]
        assert [each.prompt_token_ids for each in found] == [*ids, *ids[:2]]
        for each, vector in zip(found, [*vectors, *vectors[:2]], strict=True):
            assert np.abs(np.array(each.outputs.embedding) - vector).max() < 1e-5
        assert len(llm.embed("x", dimensions=5)[0].outputs.embedding) == 5 and llm.embed([]) == []
        scores = [each.outputs.score for each in llm.score(QUERY, DOCUMENTS)]
        assert max(scores) == scores[1]
        for wrong, param in ((lambda: llm.embed("x", 999), "dimensions"), (lambda: llm.score(["a", "b"], "c"), "text_1")):
            with pytest.raises(BadRequest) as caught:
                wrong()
            assert caught.value.param == param


def test_a_cross_encoder_in_python_scores_and_has_no_vectors(tmp_path):
    import torch
    import transformers

    (tmp_path / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "house", "blue", "##s"])
    )
    config = transformers.BertConfig(**SMALL, num_labels=1)
    model = transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
    randomize(model)
    model.save_pretrained(tmp_path)
    words = transformers.BertTokenizer(str(tmp_path / "vocab.txt"))
    words.save_pretrained(tmp_path)
    with LLM(str(tmp_path), device="cpu") as llm:
        found = [each.outputs.score for each in llm.score("the house", ["blue", "the houses"])]
        for document, value in zip(["blue", "the houses"], found, strict=True):
            with torch.no_grad():
                logit = model(**words("the house", document, return_tensors="pt")).logits[0, 0]
            assert abs(value - float(logit.sigmoid())) < 1e-5
        with pytest.raises(BadRequest, match="scores pairs"):
            llm.embed("x")
        with pytest.raises(BadRequest, match="does not generate"):
            llm.generate("x")
