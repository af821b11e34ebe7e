import numpy as np
import pytest
import torch

from slipstream.components.whisper import WINDOW, Whisper, log_mel, mel_filters

from .reference import reference


@pytest.fixture(scope="module")
def whisper(whisper_folder):
    return Whisper.load(whisper_folder)


@pytest.fixture(scope="module")
def golden(whisper_folder):
    return reference(whisper_folder)


def test_the_frontend_is_the_references(question):
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(feature_size=80)
    filters = torch.from_numpy(mel_filters(80))
    np.testing.assert_allclose(filters.numpy(), extractor.mel_filters.T, atol=1e-8)
    for audio in (question, np.zeros(WINDOW, np.float32), np.sin(np.arange(WINDOW + 999) / 9).astype(np.float32)):
        want = extractor(audio[:WINDOW], sampling_rate=16_000, return_tensors="np").input_features[0]
        np.testing.assert_allclose(log_mel(audio, filters).numpy(), want, atol=2e-4)


@pytest.fixture(scope="module")
def features(whisper, question):
    return whisper.encoder.forward(log_mel(question, whisper.encoder.filters))


@torch.inference_mode()
def test_the_encoder_is_the_references(whisper, golden, question, features):
    mel = log_mel(question, whisper.encoder.filters)
    want = golden.model.encoder(mel[None]).last_hidden_state[0]
    assert (features - want).abs().max() < 2e-3 * want.abs().max()


@torch.inference_mode()
def test_the_decoders_logits_and_greedy_tokens_are_the_references(whisper, golden, features):
    from transformers.modeling_outputs import BaseModelOutput

    prompt = [50257, 50362]
    got, slot, new = [], whisper.decoder.slot(features), prompt
    while len(got) < 40 and 50256 not in got:
        logits = whisper.decoder.forward([new], [slot])[0].clone()
        logits[list(whisper.suppress)] = -torch.inf
        new = [int(logits.argmax())]
        got += new
    encoded = BaseModelOutput(last_hidden_state=features[None])
    want_logits = golden(encoder_outputs=encoded, decoder_input_ids=torch.tensor([prompt + got[:-1]])).logits[0]
    ours = whisper.decoder.forward([prompt + got[:-1]], [whisper.decoder.slot(features)], every=True)
    assert (ours - want_logits).abs().max() < 1e-3
    want_logits[:, list(whisper.suppress)] = -torch.inf
    assert want_logits[len(prompt) - 1 :].argmax(-1).tolist() == got and got[-1] == 50256


@torch.inference_mode()
def test_rows_of_a_step_do_not_change_each_other(whisper, features):
    other = features.flip(0)
    rows = [([50257, 50362, 383], features), ([50257], other), ([50257, 50363, 11, 12], other), ([50257, 50362], features)]
    alone = []
    for tokens, f in rows:
        slot = whisper.decoder.slot(f)
        for token in tokens[:-1]:
            whisper.decoder.forward([[token]], [slot])
        alone.append(whisper.decoder.forward([tokens[-1:]], [slot])[0])
    together = whisper.decoder.forward([t for t, _ in rows], [whisper.decoder.slot(f) for _, f in rows])
    for a, b in zip(alone, together, strict=True):
        assert (a - b).abs().max() < 1e-3


def test_a_row_that_would_pass_the_last_position_is_refused(whisper, features):
    with pytest.raises(ValueError, match="448 tokens"):
        whisper.decoder.forward([[1] * 449], [whisper.decoder.slot(features)])
