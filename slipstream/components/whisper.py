"""Whisper (Radford et al., 2022): log-mel frontend, encoder, and decoder with cross-attention, on CPU in float32.

Weights come from a CTranslate2 folder (`model.bin`, `config.json`, `tokenizer.json`). A decoder row's keys and values live in
its `Slot`: one page of `max_tokens` positions for self-attention, which is the most a window can need, and the window's
cross-attention keys and values. Rows of several slots share the linear layers of a step.
"""

import json
import math
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.weights.ctranslate2 import CTranslate2File

RATE = 16_000  # samples a second
WINDOW = 30 * RATE  # samples that the encoder sees at once
_FFT, _HOP = 400, 160


def mel_filters(mels: int) -> np.ndarray:
    """[mels, 201] triangles on Slaney's mel scale from 0 to 8000 Hz, scaled by 2 / width, as Whisper was trained with."""
    step = math.log(6.4) / 27  # above 1000 Hz (mel 15)

    def hertz(mel: np.ndarray) -> np.ndarray:
        return np.where(mel < 15, mel * 200 / 3, 1000 * np.exp(step * (mel - 15)))

    edges = hertz(np.linspace(0, 15 + math.log(8) / step, mels + 2))
    bins = np.linspace(0, RATE / 2, _FFT // 2 + 1)
    up = (bins - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    down = (edges[2:, None] - bins) / (edges[2:] - edges[1:-1])[:, None]
    return (np.maximum(0, np.minimum(up, down)) * (2 / (edges[2:] - edges[:-2]))[:, None]).astype(np.float32)


def log_mel(audio: np.ndarray, filters: Tensor) -> Tensor:
    """float32 [n] samples at 16 kHz, one window at most, to [mels, 3000]: padded, log10, floored 8 below the peak."""
    x = torch.zeros(WINDOW)
    x[: len(audio)] = torch.from_numpy(np.array(audio[:WINDOW], np.float32))
    spectrum = torch.stft(x, _FFT, _HOP, window=torch.hann_window(_FFT), return_complex=True)[:, :-1].abs() ** 2
    mel = torch.clamp(filters @ spectrum, min=1e-10).log10()
    return (torch.maximum(mel, mel.max() - 8) + 4) / 4


@dataclass(frozen=True, eq=False)
class _Attention:
    heads: int
    q: tuple[Tensor, Tensor | None]  # self-attention: query, key and value in one
    kv: tuple[Tensor, Tensor | None] | None  # cross-attention only
    out: tuple[Tensor, Tensor | None]
    norm: tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class _Layer:
    attention: _Attention
    cross: _Attention | None
    norm: tuple[Tensor, Tensor]
    up: tuple[Tensor, Tensor | None]
    down: tuple[Tensor, Tensor | None]


class _Reader:
    """Names of the file to tensors of this module."""

    def __init__(self, file: CTranslate2File):
        self.file = file
        self.names = set(file.names)

    def tensor(self, name: str) -> Tensor:
        return torch.from_numpy(self.file.float32(name))

    def linear(self, name: str) -> tuple[Tensor, Tensor | None]:
        bias = name + "/bias"
        return self.tensor(name + "/weight"), self.tensor(bias) if bias in self.names else None

    def norm(self, name: str) -> tuple[Tensor, Tensor]:
        return self.tensor(name + "/gamma"), self.tensor(name + "/beta")

    def layers(self, side: str) -> list[_Layer]:
        heads = int(self.file.raw(f"{side}/num_heads"))
        count = sum(f"{side}/layer_{i}/ffn/linear_0/weight" in self.names for i in range(128))
        return [self._layer(f"{side}/layer_{i}/", heads, side == "decoder") for i in range(count)]

    def _layer(self, at: str, heads: int, cross: bool) -> _Layer:
        def attention(name: str, parts: int) -> _Attention:
            linear = [self.linear(f"{at}{name}/linear_{i}") for i in range(parts)]
            return _Attention(
                heads, linear[0], linear[1] if parts == 3 else None, linear[-1], self.norm(f"{at}{name}/layer_norm")
            )

        ffn = at + "ffn/"
        return _Layer(
            attention("self_attention", 2),
            attention("attention", 3) if cross else None,
            self.norm(ffn + "layer_norm"),
            self.linear(ffn + "linear_0"),
            self.linear(ffn + "linear_1"),
        )


def _norm(x: Tensor, weight: tuple[Tensor, Tensor]) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], *weight)


def _heads(x: Tensor, heads: int) -> Tensor:
    """[n, width] to [heads, n, head_dim]."""
    return x.view(x.shape[0], heads, -1).transpose(0, 1)


def _merge(x: Tensor) -> Tensor:
    return x.transpose(-3, -2).flatten(-2)


def _mlp(x: Tensor, layer: _Layer) -> Tensor:
    return x + F.linear(F.gelu(F.linear(_norm(x, layer.norm), *layer.up)), *layer.down)


class Encoder:
    """One window of log-mel [mels, 3000] to features [1500, width], or the first `context` of them."""

    def __init__(self, reader: _Reader):
        self.conv = [reader.linear("encoder/conv1"), reader.linear("encoder/conv2")]
        self.positions = reader.tensor("encoder/position_encodings/encodings")
        self.layers = reader.layers("encoder")
        self.norm = reader.norm("encoder/layer_norm")
        self.mels = self.conv[0][0].shape[1]
        self.filters = torch.from_numpy(mel_filters(self.mels))

    @torch.inference_mode()
    def forward(self, mel: Tensor, context: int | None = None) -> Tensor:
        """With a `context` below 1500 the encoder does not see the rest of the window. That is faster, but the model was not
        trained with it, so leave some seconds of silence after the last sound."""
        context = min(context or len(self.positions), len(self.positions))
        x = F.gelu(F.conv1d(mel[None, :, : 2 * context], *self.conv[0], padding=1))
        x = F.gelu(F.conv1d(x, *self.conv[1], stride=2, padding=1))[0].T + self.positions[:context]
        for layer in self.layers:
            a = layer.attention
            q, k, v = (_heads(part, a.heads)[None] for part in F.linear(_norm(x, a.norm), *a.q).chunk(3, dim=1))
            x = x + F.linear(_merge(F.scaled_dot_product_attention(q, k, v))[0], *a.out)
            x = _mlp(x, layer)
        return _norm(x, self.norm)


@dataclass(eq=False)
class Slot:
    """The cache of one window's decoding: self-attention keys and values [layers, 2, heads, max_tokens, head_dim], of which
    [0, length) are written, and the cross-attention's [layers][2][heads, 1500, head_dim]."""

    cache: Tensor
    cross: list[tuple[Tensor, Tensor]]
    length: int = 0


class Decoder:
    """The autoregressive half. A step takes rows of any number of new tokens, each with its slot."""

    def __init__(self, reader: _Reader):
        self.embedding = reader.tensor("decoder/embeddings/weight")
        self.positions = reader.tensor("decoder/position_encodings/encodings")
        self.layers = reader.layers("decoder")
        self.norm = reader.norm("decoder/layer_norm")
        self.max_tokens, self.width = self.positions.shape
        self.vocab = len(self.embedding)

    @torch.inference_mode()
    def slot(self, features: Tensor) -> Slot:
        """A slot for one window's features [1500, width]: computes its cross-attention keys and values."""
        cross = []
        for layer in self.layers:
            assert layer.cross and layer.cross.kv
            k, v = F.linear(features, *layer.cross.kv).chunk(2, dim=1)
            cross.append((_heads(k, layer.cross.heads).contiguous(), _heads(v, layer.cross.heads).contiguous()))
        heads = self.layers[0].attention.heads
        return Slot(torch.empty(len(self.layers), 2, heads, self.max_tokens, self.width // heads), cross)

    @torch.inference_mode()
    def attention(self, tokens: Sequence[int], slot: Slot, heads: Sequence[tuple[int, int]], frames: int) -> Tensor:
        """The decoder's cross-attention weights, float32 [heads, tokens, frames].

        They are for `heads` (layer, head), all of a window's tokens, and at most its first `frames`. The slot does not change.
        """
        fresh = Slot(torch.empty_like(slot.cache), slot.cross)
        x = self.embedding[torch.tensor(tokens)] + self.positions[: len(tokens)]
        out = {}
        for i, layer in enumerate(self.layers):
            x = x + self._self_attention(x, layer.attention, i, [len(tokens)], [fresh])
            a = layer.cross
            assert a
            q, k = _heads(F.linear(_norm(x, a.norm), *a.q), a.heads), slot.cross[i][0][:, :frames]
            for head in [h for at, h in heads if at == i]:
                out[i, head] = (q[head] @ k[head].T * q.shape[-1] ** -0.5).softmax(-1)
            x = x + self._cross_attention(x, layer, i, [len(tokens)], [fresh])
            x = _mlp(x, layer)
        return torch.stack([out[tuple(at)] for at in heads])

    @torch.inference_mode()
    def forward(self, tokens: Sequence[Sequence[int]], slots: Sequence[Slot], every: bool = False) -> Tensor:
        """float32 logits [rows, vocab] after each row's last token, or [all tokens, vocab] with `every`. Extends the slots."""
        counts = [len(row) for row in tokens]
        starts = [slot.length for slot in slots]
        if any(start + n > self.max_tokens for start, n in zip(starts, counts, strict=True)):
            raise ValueError(f"a row would exceed {self.max_tokens} tokens")
        ids = torch.tensor([t for row in tokens for t in row])
        at = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, counts, strict=True)])
        x = self.embedding[ids] + self.positions[at]
        for i, layer in enumerate(self.layers):
            x = x + self._self_attention(x, layer.attention, i, counts, slots)
            x = x + self._cross_attention(x, layer, i, counts, slots)
            x = _mlp(x, layer)
        for slot, n in zip(slots, counts, strict=True):
            slot.length += n
        if not every:
            x = x[torch.tensor(counts).cumsum(0) - 1]
        return F.linear(_norm(x, self.norm), self.embedding)

    def _self_attention(self, x: Tensor, a: _Attention, layer: int, counts: list[int], slots: Sequence[Slot]) -> Tensor:
        out = []
        for qkv, slot in zip(F.linear(_norm(x, a.norm), *a.q).split(counts), slots, strict=True):
            q, k, v = (_heads(part, a.heads) for part in qkv.chunk(3, dim=1))
            start, stop = slot.length, slot.length + len(qkv)
            keys, values = slot.cache[layer]
            keys[:, start:stop], values[:, start:stop] = k, v
            mask = None
            if len(qkv) > 1:
                mask = torch.arange(stop)[None] <= torch.arange(start, stop)[:, None]
            out.append(_merge(F.scaled_dot_product_attention(q[None], keys[None, :, :stop], values[None, :, :stop], mask))[0])
        return F.linear(torch.cat(out), *a.out)

    def _cross_attention(self, x: Tensor, layer: _Layer, i: int, counts: list[int], slots: Sequence[Slot]) -> Tensor:
        a = layer.cross
        assert a
        out = []
        for q, slot in zip(F.linear(_norm(x, a.norm), *a.q).split(counts), slots, strict=True):
            keys, values = slot.cross[i]
            out.append(_merge(F.scaled_dot_product_attention(_heads(q, a.heads)[None], keys[None], values[None]))[0])
        return F.linear(torch.cat(out), *a.out)


@dataclass(frozen=True, eq=False)
class Whisper:
    """The folder's parts. `suppress` ids are never chosen, `suppress_first` not as the first token of a window. `following`:
    (layer, head) of the cross-attention that follows the sound; empty if the folder does not list any."""

    encoder: Encoder
    decoder: Decoder
    suppress: tuple[int, ...]
    suppress_first: tuple[int, ...]
    following: tuple[tuple[int, int], ...]

    @classmethod
    def load(cls, folder: str | pathlib.Path) -> "Whisper":
        folder = pathlib.Path(folder)
        file = CTranslate2File(folder / "model.bin")
        if file.specification != "WhisperSpec":
            raise ModelError(f"{folder}: model.bin is a {file.specification}, not a WhisperSpec")
        try:
            config = json.loads((folder / "config.json").read_text())
        except (OSError, ValueError) as e:
            raise ModelError(f"{folder}/config.json: {e}") from None
        reader = _Reader(file)
        suppress = config.get("suppress_ids", []), config.get("suppress_ids_begin", [])
        following = tuple((layer, head) for layer, head in config.get("alignment_heads", []))
        return cls(Encoder(reader), Decoder(reader), tuple(suppress[0]), tuple(suppress[1]), following)
