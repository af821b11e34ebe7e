"""`slipstream generate` on the simulated device: prompts of every form, answers in their order."""

import json

from slipstream import cli


def test_prompts_of_every_form_are_answered_in_order(tmp_path):
    prompts, output = tmp_path / "p.jsonl", tmp_path / "o.jsonl"
    chat = {"messages": [{"role": "user", "content": "hi"}], "id": "b"}
    rows = [{"prompt": [5, 6, 7], "id": "a"}, chat, "text", {"prompt": [5, 6, 7]}]
    prompts.write_text("\n".join(json.dumps(r) for r in rows))
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    flags = ["--device", "sim", "--load-format", "dummy", "--sim-step-us", "100", "--max-tokens", "4", "--temperature", "0"]
    status = cli.main(["generate", str(tmp_path), *flags, "--prompts", str(prompts), "--output", str(output)])
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert status == 0
    assert [a.get("id") for a in answers] == ["a", "b", None, None]
    assert [a.get("prompt") for a in answers] == [[5, 6, 7], None, "text", [5, 6, 7]]
    assert all(len(a["token_ids"]) == 4 and a["finish_reason"] == "length" for a in answers)
    assert answers[0]["token_ids"] == answers[3]["token_ids"] and answers[0]["prompt_tokens"] == 3


def generate(folder, prompts, *flags):
    (folder / "config.json").write_text(json.dumps(TINY))
    (folder / "p.jsonl").write_text("\n".join(json.dumps(p) for p in prompts))
    fixed = ["--device", "sim", "--load-format", "dummy", "--sim-step-us", "100", "--sim-token-us", "1", "--max-tokens", "2"]
    files = ["--prompts", str(folder / "p.jsonl"), "--output", str(folder / "o.jsonl")]
    return cli.main(["generate", str(folder), *fixed, *files, *flags])


def test_more_prompts_than_one_http_request_may_hold_or_the_queue(tmp_path):
    assert generate(tmp_path, [f"prompt {i}" for i in range(2100)], "--max-queue", "100") == 0
    answers = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert [a["prompt"] for a in answers] == [f"prompt {i}" for i in range(2100)]
    assert all(len(a["token_ids"]) == 2 for a in answers)


def test_a_parameter_in_a_line_is_refused_with_its_flag(tmp_path, capsys):
    assert generate(tmp_path, ["a", {"prompt": "b", "seed": 3}]) == 2
    assert "line 2: seed" in (err := capsys.readouterr().err) and "--sample-seed" in err


TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
