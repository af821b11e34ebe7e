"""transformers' Whisper with the weights of a CTranslate2 folder: the reference of the golden tests."""

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

from slipstream.weights.ctranslate2 import CTranslate2File


def reference(folder) -> WhisperForConditionalGeneration:
    file = CTranslate2File(folder / "model.bin")
    get = lambda name: torch.from_numpy(file.float32(name))
    vocab, width = file.raw("decoder/embeddings/weight").shape
    heads = int(file.raw("encoder/num_heads"))
    config = WhisperConfig(
        vocab_size=vocab, d_model=width, encoder_layers=4, decoder_layers=4, encoder_attention_heads=heads,
        decoder_attention_heads=heads, encoder_ffn_dim=4 * width, decoder_ffn_dim=4 * width, num_mel_bins=80,
        decoder_start_token_id=50257, bos_token_id=50256, eos_token_id=50256, pad_token_id=50256,
    )  # fmt: skip
    state = {
        "model.encoder.embed_positions.weight": get("encoder/position_encodings/encodings"),
        "model.decoder.embed_positions.weight": get("decoder/position_encodings/encodings"),
        "model.decoder.embed_tokens.weight": get("decoder/embeddings/weight"),
        "proj_out.weight": get("decoder/embeddings/weight"),
    }
    for i in (1, 2):
        for part in ("weight", "bias"):
            state[f"model.encoder.conv{i}.{part}"] = get(f"encoder/conv{i}/{part}")

    def norm(ours, theirs):
        state[theirs + ".weight"], state[theirs + ".bias"] = get(ours + "/gamma"), get(ours + "/beta")

    def linear(ours, theirs, parts=1):
        weights, biases = get(ours + "/weight").chunk(parts), get(ours + "/bias").chunk(parts)
        for name, w, b in zip(theirs, weights, biases, strict=True):
            state[name + ".weight"] = w
            if not name.endswith("k_proj"):
                state[name + ".bias"] = b

    for side in ("encoder", "decoder"):
        norm(f"{side}/layer_norm", f"model.{side}.layer_norm")
        for i in range(4):
            a, b = f"{side}/layer_{i}/", f"model.{side}.layers.{i}."
            norm(a + "self_attention/layer_norm", b + "self_attn_layer_norm")
            linear(a + "self_attention/linear_0", [f"{b}self_attn.{p}_proj" for p in "qkv"], 3)
            linear(a + "self_attention/linear_1", [b + "self_attn.out_proj"])
            if side == "decoder":
                norm(a + "attention/layer_norm", b + "encoder_attn_layer_norm")
                linear(a + "attention/linear_0", [b + "encoder_attn.q_proj"])
                linear(a + "attention/linear_1", [f"{b}encoder_attn.{p}_proj" for p in "kv"], 2)
                linear(a + "attention/linear_2", [b + "encoder_attn.out_proj"])
            norm(a + "ffn/layer_norm", b + "final_layer_norm")
            linear(a + "ffn/linear_0", [b + "fc1"])
            linear(a + "ffn/linear_1", [b + "fc2"])
    model = WhisperForConditionalGeneration(config)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and not missing, (missing, unexpected)
    return model.eval()
