"""An encoder through transformers' own code: ids in, pooled vectors or scores out.

Pooling, dense layers and normalization follow sentence-transformers (`Pooling`, `Dense`, `Normalize`).
"""

import inspect
import pathlib
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from slipstream.config import EngineConfig
from slipstream.device.cpu.memory import threads_per_rank
from slipstream.device.cpu.threads import Crew
from slipstream.device.select import resolve_device
from slipstream.embed.kinds import EncoderSpec
from slipstream.embed.queue import Text
from slipstream.errors import ModelError
from slipstream.weights.parts import read_json

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
_ACTIVATIONS: dict[str, type[nn.Module]] = {"Identity": nn.Identity, "Tanh": nn.Tanh, "GELU": nn.GELU, "ReLU": nn.ReLU}


class Encoder:
    """`encode` runs one batch. Vectors are pooled in float32 whatever the weights' dtype. Raises ModelError."""

    def __init__(self, folder: pathlib.Path, spec: EncoderSpec, config: EngineConfig):
        kind = transformers.AutoModelForSequenceClassification if spec.task == "score" else transformers.AutoModel
        dtype = _DTYPES.get(config.dtype, "auto")
        transformers.utils.logging.disable_progress_bar()
        try:
            model, read = kind.from_pretrained(folder, dtype=dtype, output_loading_info=True, **_LOCAL)
        except Exception as e:  # the library raises nothing narrower
            raise ModelError(f"{folder}: transformers cannot load it: {str(e).strip()[:1000]}") from None
        # an embedding is made of token vectors, so a pooler for the first token is not needed
        missing = sorted(key for key in read["missing_keys"] if spec.task == "score" or "pooler" not in key)
        if missing:
            raise ModelError(f"{folder}: its files lack the tensor {missing[0]} ({len(missing)} are missing)")
        self.device = torch.device(resolve_device(config.device))
        self._crew = Crew(threads_per_rank(1)) if self.device.type == "cpu" else None
        self.spec = spec
        self._model: Any = model.to(self.device).eval()
        self._dense = [_dense(folder / path).to(self.device) for path in spec.dense]
        takes = inspect.signature(self._model.forward).parameters
        self._typed = "token_type_ids" in takes and (getattr(model.config, "type_vocab_size", 0) or 0) > 1
        self._more = {"use_cache": False} if "use_cache" in takes else {}
        self._pad = getattr(model.config, "pad_token_id", None) or 0
        self._bytes = sum(p.numel() * p.element_size() for p in self._model.parameters())
        width = self.encode([Text(0, 0, np.ones(1, np.int32), -1)]).shape[1]
        if width != spec.width:
            raise ModelError(f"{folder}: its files promise vectors of {spec.width} values, and it gives {width}")

    @property
    def weight_bytes(self) -> int:
        return self._bytes

    def encode(self, batch: list[Text]) -> np.ndarray:
        """float32 [texts, width]."""
        if self._crew is None:
            return self._encode(batch)
        out: list[np.ndarray] = []
        self._crew.run(lambda: out.append(self._encode(batch)))
        return out[0]

    @torch.inference_mode()
    def _encode(self, batch: list[Text]) -> np.ndarray:
        lengths = torch.tensor([len(text.ids) for text in batch])
        longest = int(lengths.max())
        ids = torch.full((len(batch), longest), self._pad, dtype=torch.long)
        types = torch.zeros_like(ids)
        for row, text in enumerate(batch):
            ids[row, : len(text.ids)] = torch.from_numpy(text.ids.astype(np.int64))
            if text.first >= 0:
                types[row, text.first : len(text.ids)] = 1
        mask = (torch.arange(longest) < lengths[:, None]).long()
        inputs = {"input_ids": ids, "attention_mask": mask, **({"token_type_ids": types} if self._typed else {})}
        inputs = {name: value.to(self.device) for name, value in inputs.items()}
        lengths = lengths.to(self.device)
        out = self._scores(inputs, lengths) if self.spec.task == "score" else self._vectors(inputs, lengths)
        return out.float().cpu().numpy()

    def _scores(self, inputs: dict[str, Tensor], lengths: Tensor) -> Tensor:
        head = getattr(self._model, "score", None)
        if isinstance(head, nn.Linear):  # a decoder's: it judges the last token, which must not be searched by the padding's id
            hidden = self._model.base_model(**inputs, **self._more)[0]
            logits = head(_last(hidden, lengths)).float()
        else:
            logits = self._model(**inputs, **self._more).logits.float()
        return logits.sigmoid() if self.spec.sigmoid else logits

    def _vectors(self, inputs: dict[str, Tensor], lengths: Tensor) -> Tensor:
        hidden = self._model(**inputs, **self._more)[0].float()
        if self.spec.pooling == "mean":
            weight = inputs["attention_mask"][..., None].float()
            pooled = (hidden * weight).sum(1) / weight.sum(1)
        else:
            pooled = hidden[:, 0] if self.spec.pooling == "cls" else _last(hidden, lengths)
        for layer in self._dense:
            pooled = layer(pooled)
        return nn.functional.normalize(pooled, dim=1) if self.spec.normalize else pooled


def _last(hidden: Tensor, lengths: Tensor) -> Tensor:
    return hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1]


def _dense(folder: pathlib.Path) -> nn.Sequential:
    """A Dense module of sentence-transformers: a linear layer and an activation, in float32."""
    from safetensors.torch import load_file

    config = read_json(folder / "config.json")
    name = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise ModelError(f"{folder / 'config.json'}: activation_function {name} is not supported ({', '.join(_ACTIVATIONS)})")
    file = folder / "model.safetensors"
    if not file.is_file():
        raise ModelError(f"{file}: is missing; weights are read from safetensors only")
    linear = nn.Linear(config["in_features"], config["out_features"], bias=config.get("bias", True))
    weights = {key.removeprefix("linear."): value.float() for key, value in load_file(file).items()}
    try:
        linear.load_state_dict(weights)
    except RuntimeError as e:
        raise ModelError(f"{file}: {e}") from None
    return nn.Sequential(linear, _ACTIVATIONS[name]()).eval()
