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
