"""Safe by default: the key, Host and Origin, request ids, limits of a connection, and what is logged."""

import logging
import socket

import httpx

from tests.serve.fake import Script, wait_for


def raw(port: int, data: bytes, timeout: float = 5) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as sock:
        sock.sendall(data)
        out = b""
        try:
            while part := sock.recv(1 << 16):
                out += part
        except (TimeoutError, ConnectionError):
            pass
        return out


def test_the_key_covers_everything_but_the_probes(own_front):
    front = own_front(api_key="sesame", enable_debug=True)
    spec = front.client.get("/openapi.json", headers={"authorization": "Bearer sesame"}).json()
    paths = [*spec["paths"], "/openapi.json", "/nope", "/v1/models/fake", "/"]
    for path in paths:
        method = "POST" if "post" in spec["paths"].get(path, {}) else "GET"
        status = front.client.request(method, path).status_code
        assert status == (200 if path in ("/health", "/ready") else 401), path
        for bad in ("Bearer wrong", "Basic sesame", "sesame", "Bearer", "Bearer sesame2"):
            r = front.client.request(method, path, headers={"authorization": bad})
            assert path in ("/health", "/ready") or r.status_code == 401
    head = {"authorization": "Bearer sesame"}
    assert front.client.get("/v1/models", headers=head).status_code == 200
    assert front.client.get("/", headers=head).status_code == 200
    assert front.client.post("/v1/completions", json={"prompt": "x"}, headers=head).status_code == 200
    assert front.client.get("/v1/models").json()["error"]["code"] == "invalid_api_key"


def test_on_loopback_other_sites_reach_nothing(front):
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", ""):
        r = raw(front.port, f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        assert b" 403 " in r.split(b"\r\n")[0], host
    own = f"localhost:{front.port}"
    assert front.client.get("/v1/models", headers={"host": own}).status_code == 200
    assert front.client.get("/v1/models", headers={"host": own, "origin": f"http://{own}"}).status_code == 200
    for origin in ("http://evil.example", "null", "http://localhost:1"):
        assert front.client.get("/v1/models", headers={"host": own, "origin": origin}).status_code == 403
    r = front.client.options("/v1/completions", headers={"origin": f"http://127.0.0.1:{front.port}"})
    assert not [h for h in r.headers if h.startswith("access-control")]


def test_a_request_has_one_host_and_http_1_0_may_have_none(own_front):
    """HAProxy's default check is an HTTP/1.0 request without Host."""
    for front in (own_front(), own_front(host="0.0.0.0")):

        def status(version: str, *hosts: str, front=front) -> bytes:
            head = "".join(f"Host: {host}\r\n" for host in hosts)
            return raw(front.port, f"GET /health HTTP/{version}\r\n{head}Connection: close\r\n\r\n".encode()).split()[1]

        assert status("1.0") == status("1.0", "localhost") == status("1.1", "localhost") == b"200"
        assert status("1.1") == status("1.1", "localhost", "localhost") == status("1.0", "localhost", "a") == b"400"
        origin = raw(front.port, b"GET /health HTTP/1.0\r\nOrigin: http://evil.example\r\n\r\n").split()[1]
        assert origin == (b"403" if front.front.server_config.host != "0.0.0.0" else b"200")


def test_on_other_addresses_any_host_is_fine(own_front):
    front = own_front(host="0.0.0.0")
    assert front.client.get("/v1/models", headers={"host": "gpu.example"}).status_code == 200


def test_a_web_page_of_another_site_opens_no_socket_at_any_address():
    """Browsers ask nobody before they open a WebSocket, so the Origin is all there is."""
    import asyncio

    from slipstream.config import ServerConfig
    from slipstream.serve.guard import Guard

    async def opened(origin: bytes, **server) -> bool:
        reached, sent = [], []

        async def app(scope, receive, send):
            reached.append(scope)

        async def send(message):
            sent.append(message["type"])

        headers = [(b"host", b"gpu.example:8000"), (b"origin", origin)]
        scope = {"type": "websocket", "path": "/v1/realtime", "headers": headers}
        await Guard(app, ServerConfig(**server))(scope, None, send)
        assert bool(reached) != (sent == ["websocket.close"])
        return bool(reached)

    assert not asyncio.run(opened(b"http://evil.example", host="0.0.0.0"))
    assert asyncio.run(opened(b"http://gpu.example:8000", host="0.0.0.0"))
    assert asyncio.run(opened(b"http://app.example", host="0.0.0.0", allowed_origins=["http://app.example"]))


def test_pages_of_allowed_origins_may_ask_and_read_the_answer_and_others_may_not(own_front):
    page, other = "https://app.example", "https://app.example.evil.example"
    for host in ("127.0.0.1", "0.0.0.0"):
        front = own_front(api_key="sesame", host=host, allowed_origins=[page])
        ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}
        r = front.client.options("/v1/completions", headers={"origin": page, **ask})  # browsers send no key with it
        assert r.status_code == 204 and r.headers["access-control-allow-origin"] == page
        assert "POST" in r.headers["access-control-allow-methods"] and r.headers["vary"] == "Origin"
        assert r.headers["access-control-allow-headers"] == "authorization, content-type"
        r = front.client.options("/v1/completions", headers={"origin": other, **ask})
        assert r.status_code in (401, 403) and not [h for h in r.headers if h.startswith("access-control")]

        for key, status in (("sesame", 200), ("wrong", 401)):  # a page must be able to read an error
            head = {"origin": page, "authorization": f"Bearer {key}"}
            r = front.client.post("/v1/completions", json={"prompt": "x"}, headers=head)
            assert r.status_code == status and r.headers["access-control-allow-origin"] == page
        r = front.client.get("/v1/models", headers={"origin": other, "authorization": "Bearer sesame"})
        assert "access-control-allow-origin" not in r.headers and r.headers["vary"] == "Origin"


def test_headers_that_say_who_asks_may_come_once(own_front):
    front = own_front(api_key="sesame", host="0.0.0.0")
    head = b"GET /v1/models HTTP/1.1\r\nConnection: close\r\nHost: a\r\nAuthorization: Bearer sesame\r\n"
    assert b" 200 " in raw(front.port, head + b"\r\n").split(b"\r\n")[0]
    for again in (b"Host: b", b"Authorization: Bearer other", b"X-Api-Key: a\r\nX-Api-Key: b"):
        assert b" 400 " in raw(front.port, head + again + b"\r\n\r\n").split(b"\r\n")[0]


def test_a_full_house_gives_an_idle_connection_s_place_to_a_new_one_and_refuses_it_where_all_work(own_front, monkeypatch):
    monkeypatch.setattr("slipstream.serve.main.connection_limit", lambda: 3)
    front = own_front()
    idle = [socket.create_connection(("127.0.0.1", front.port)) for _ in range(5)]
    assert front.complete().status_code == 200
    front.leader.hold.set()
    body = b'{"prompt": "x"}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 15\r\n\r\n"
    busy = [socket.create_connection(("127.0.0.1", front.port)) for _ in range(3)]
    for sock in busy:
        sock.sendall(head + body)
    wait_for(lambda: len(front.front.open) == 3)
    assert b" 503 " in raw(front.port, head + body).split(b"\r\n")[0]
    front.leader.hold.clear()
    assert all(b" 200 " in sock.recv(4096) for sock in busy)
    for sock in (*idle, *busy):
        sock.close()


def test_request_ids_come_back_and_are_made_up_when_missing_or_bad(front):
    assert front.client.get("/version", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = {
        front.client.get("/version", headers={"x-request-id": bad}).headers["x-request-id"] for bad in ("", "a b", "x" * 65)
    }
    assert len(made) == 3 and not made & {"", "a b", "x" * 65}
    r = front.complete(headers=1)  # an error has one too
    assert r.headers["x-request-id"]


def test_headers_have_limits(front):
    many = "".join(f"X-{i}: y\r\n" for i in range(200))
    r = raw(front.port, f"GET /version HTTP/1.1\r\nHost: localhost\r\n{many}\r\n".encode())
    assert b" 431 " in r.split(b"\r\n")[0]
    r = raw(front.port, b"GET /version HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 300_000)
    assert b" 431 " in r.split(b"\r\n")[0] or r == b""
    r = raw(front.port, b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert b" 431 " in r.split(b"\r\n")[0]
    assert b" 400 " in raw(front.port, b"nonsense\r\n\r\n").split(b"\r\n")[0]
    assert front.client.get("/version").status_code == 200


def test_a_connection_that_sends_nothing_is_closed(front, monkeypatch):
    monkeypatch.setattr("slipstream.serve.http.HEADER_SECONDS", 0.1)
    assert b" 408 " in raw(front.port, b"GET /version HTTP/1.1\r\nHost: loc").split(b"\r\n")[0]


def test_a_body_that_does_not_come_is_given_up(front, monkeypatch):
    monkeypatch.setattr("slipstream.serve.request_body.READ_SECONDS", 0.1)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n"
    assert b" 408 " in raw(front.port, head + b"Connection: close\r\n\r\n{").split(b"\r\n")[0]


def test_connections_are_kept_for_the_next_request(front):
    with httpx.Client(base_url=front.url, limits=httpx.Limits(max_connections=1), trust_env=False) as client:
        streams = {id(client.get("/version").extensions["network_stream"].get_extra_info("socket")) for _ in range(3)}
        assert len(streams) == 1


def test_an_http_1_0_client_gets_no_chunks(front):
    front.script = Script([*b"abc", 256])
    body = b'{"prompt": "x", "stream": true}'
    head = b"POST /v1/completions HTTP/1.X\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    head += b"Content-Length: %d\r\n\r\n" % len(body)
    old, new = (raw(front.port, head.replace(b"X", digit, 1) + body) for digit in (b"0", b"1"))
    headers, _, events = old.partition(b"\r\n\r\n")
    assert b" 200 " in headers and b"transfer-encoding" not in headers and b"connection: close" in headers
    assert all(line.startswith(b"data: ") for line in events.split(b"\n\n")[:-1]) and events.endswith(b"data: [DONE]\n\n")
    assert b"transfer-encoding: chunked" in new and new.endswith(b"0\r\n\r\n")
    sized = raw(front.port, b"GET /version HTTP/1.0\r\nHost: localhost\r\n\r\n")
    assert b"content-length: " in sized and sized.endswith(b"}")


def test_prompts_and_answers_are_not_logged(front, caplog):
    caplog.set_level(logging.DEBUG)
    front.script = Script([*b"quiet answer", 256])
    front.complete(prompt="loud prompt")
    front.chat("loud prompt", temperature=9)
    front.client.get("/v1/models/loud")
    text = "\n".join(r.getMessage() for r in caplog.records if r.name.startswith(("slipstream", "uvicorn")))
    assert "loud prompt" not in text and "quiet answer" not in text
    assert "POST /v1/completions 200" in text


def test_the_page_s_headers_let_nothing_foreign_in(front):
    for path in ("/", "/static/page.js", "/static/page.css"):
        r = front.client.get(path)
        assert r.status_code == 200 and "default-src 'none'" in r.headers["content-security-policy"]
        assert r.headers["x-content-type-options"] == "nosniff" and "http://" not in r.text.replace("http://www.w3.org", "")
    assert front.client.get("/static/..%2f__init__.py").status_code == 404
