"""What a leader reports of itself beside answers, seen through a server."""

from tests.helpers.server import GREEDY, Server


def test_pages_of_preempted_requests_are_counted_on_their_way_out_and_back():
    memory = 24 * 4096  # 24 pages of 16 tokens; the four requests take 11 each
    with Server("--device", "sim", "--kv-cache-memory-bytes", str(memory), "--kv-offload-memory-bytes", str(memory)) as server:
        assert server.metric("slipstream:kv_pages_copied_total") == 0
        body = {**GREEDY, "prompt": [[i] * 8 for i in range(4)], "max_tokens": 160}
        assert server.post("/v1/completions", body).status == 200
        counted = [server.metric("slipstream:kv_pages_copied_total", copy=copy) for copy in ("offload", "restore")]
        assert server.metric("slipstream:num_preemptions_total") > 0
        assert counted[0] >= counted[1] > 0
