"""Any decoder of transformers whose layers call its attention interface, over our pages and operations.

The model's code is transformers' own; its linear layers, embedding, output layer and attention are replaced (`modules.py`,
`attention.py`). What cannot run so is refused by name when the model is built.
"""

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from slipstream.errors import ModelError
from slipstream.log.caches import CacheLayout, Paged, Window, window_of, windows
from slipstream.models.foreign.attention import PROBE, SERVE, Call, Run, register, serve
from slipstream.models.foreign.modules import Embedding, Head, Hidden, Linear
from slipstream.models.foreign.plan import WHOLE, Plan
from slipstream.models.foreign.probe import check_tokens_alone, record
from slipstream.models.foreign.rotary import settle_rotary
from slipstream.models.foreign.weights import Weights
from slipstream.ops.interface import ForwardStep, Ops, Step
from slipstream.ops.layers import Attention
from slipstream.shard import Heads
from slipstream.weights.packed import dense

_BUILDING = threading.Lock()  # transformers changes PyTorch's functions while it builds a model without initial values


class TransformersDecoder:
    """One rank's part of a model (a `models.decoder.Decoder`)."""

    def __init__(self, config: dict, checkpoint: Any, ops: Ops, max_len: int | None = None):
        """Builds the model, loads this rank's part, and probes it. Raises ModelError for what cannot be served."""
        self.ops = ops
        self.run = Run(ops, self._attend)
        lm = _skeleton(config, ops)
        with _naming(type(lm).__name__):
            self.max_len = settle_rotary(lm, max_len)
            self.vocab, self._dtype = _vocab(lm), ops.dtype
            self._load(lm, Weights(lm, checkpoint, ops.dtype), Plan(lm, ops.shard))
            self.run.join(lm)
            name = _body_name(lm)
            self.lm = lm.eval()
            self.body = getattr(lm, name)
            self.hidden_states = Hidden()
            setattr(lm, name, self.hidden_states)
            self._probe()

    # --- the interface of a decoder

    def forward(self, step: ForwardStep) -> Tensor:
        """[T, hidden] after the last norm; writes the step's keys and values into the caches."""
        self.run.step = step
        return self._body(step.ids.long()[None], step.positions.long()[None]).to(self._dtype).contiguous()

    def logits(self, hidden: Tensor, step: Step) -> Tensor:
        """[n, hidden] to float32 [n, this rank's part of the vocabulary], with whatever the model does to logits."""
        self.run.step = step
        self.hidden_states.states = hidden[None]
        return self.lm(input_ids=None, use_cache=False).logits[0].float().contiguous()

    def describe(self) -> str:
        """Whose code runs the model and what that costs, for the log."""
        return (
            f"the code of transformers {transformers.__version__}, with Slipstream's attention, cache, linear layers and "
            "sampling; norms, rotations and activations are separate calls, so steps take longer than by Slipstream's own code"
        )

    def _body(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.body(input_ids=ids, position_ids=positions, use_cache=False)[0][0]

    def _attend(self, call: Call) -> Tensor:
        return serve(call, self.specs[call.module], self.run)

    # --- building

    def _load(self, lm: Any, weights: Weights, plan: Plan) -> None:
        ops = self.ops
        head, embedding = lm.get_output_embeddings(), lm.get_input_embeddings()
        if type(head) is not nn.Linear or not isinstance(embedding, nn.Embedding):
            raise ModelError("its embedding and output layer are no plain table and linear layer")
        self._embed(lm, embedding, weights)
        for name, module in list(lm.named_modules()):
            if f"{name}.".startswith(self._embedding_name + "."):
                continue
            if module is head:
                made: nn.Module = self._head(name, head, weights)
            elif type(module) is nn.Linear and weights.dtype_of(name + ".weight") == ops.dtype:
                made = self._linear(name, module, weights, plan)
            else:
                self._fill(name, module, weights, plan)
                continue
            _replace(lm, name, made)

    def _embed(self, lm: Any, embedding: nn.Embedding, weights: Weights) -> None:
        """Loads the embedding first: the output layer may be tied to it."""
        ops, part = self.ops, self.ops.shard.even(embedding.num_embeddings)
        self._embedding_name = next(name for name, module in lm.named_modules() if module is embedding)
        shape = (embedding.num_embeddings, embedding.embedding_dim)
        self._table = ops.tensor(weights.tensor(self._embedding_name + ".weight", shape, part))
        for key, value in list(embedding.named_buffers(recurse=False)):
            embedding._buffers[key] = ops.tensor(value)
        _replace(lm, self._embedding_name, Embedding(self.run, embedding, self._table, part[0], ops.dtype))

    def _linear(self, name: str, module: nn.Linear, weights: Weights, plan: Plan) -> Linear:
        ops, cut = self.ops, plan.linear(name, module)
        packed = weights.linear(name, (module.out_features, module.in_features), cut.rows, cut.cols)
        bias = None
        if module.bias is not None and (cut.cols is None or ops.shard.rank == 0):
            bias = weights.tensor(name + ".bias", (module.out_features,), cut.rows)
        return Linear(self.run, ops.weight([packed], bias), cut, module.in_features, module.out_features)

    def _head(self, name: str, head: nn.Linear, weights: Weights) -> Head:
        ops, part = self.ops, self.ops.shard.even(head.out_features)
        bias = None if head.bias is None else ops.tensor(weights.tensor(name + ".bias", (head.out_features,), part).float())
        tied = weights.tied(name + ".weight", self._embedding_name + ".weight")
        shape = (head.out_features, head.in_features)
        packed = dense(self._table) if tied else weights.linear(name, shape, part, None)
        return Head(self.run, ops.weight([packed]), bias)

    def _fill(self, name: str, module: nn.Module, weights: Weights, plan: Plan) -> None:
        """Loads the tensors that a module holds itself, and puts its buffers on the device."""
        prefix = name + "." if name else ""
        if type(module) is nn.Linear and plan.linear(name, module) != WHOLE:
            raise ModelError(f"{name} stays in float32 and cannot be split over ranks; run it on one rank")
        inner = plan.experts(name, module)
        for key, value in list(module.named_parameters(recurse=False)):
            tensor = weights.tensor(prefix + key, tuple(value.shape))
            if inner is not None:
                first, last = inner
                if key == "down_proj":
                    tensor = tensor[..., first:last].clone()
                else:
                    tensor = torch.cat([half[:, first:last] for half in tensor.chunk(2, 1)], 1)
            setattr(module, key, nn.Parameter(self.ops.tensor(tensor), requires_grad=False))
        for key, value in list(module.named_buffers(recurse=False)):
            stored = key not in module._non_persistent_buffers_set and not weights.random
            module._buffers[key] = self.ops.tensor(weights.tensor(prefix + key, tuple(value.shape)) if stored else value)
        if inner is not None:
            module.register_forward_hook(self._sum_experts)

    def _sum_experts(self, module: nn.Module, given: Any, out: Any) -> Tensor:
        """A hook of modules of experts, of which every rank computes a part of the inner columns."""
        return self.run.all_reduce(out)

    def _probe(self) -> None:
        """Finds each layer's attention, names its cache, and switches to the attention that serves."""
        device = self.ops.device
        calls = record(self._body, self.run, device)
        self.lm.set_attn_implementation(SERVE)
        hidden = check_tokens_alone(self._body, self.run, device, self.max_len)
        self.hidden = hidden.shape[1]
        logits = self.logits(hidden.to(self._dtype), self.run.step)
        first, last = self.ops.shard.even(self.vocab)
        if logits.shape != (len(hidden), last - first):
            raise ModelError(f"its output layer gives logits of shape {list(logits.shape)}")
        layouts = [_layout(call, window, self.max_len) for call, window in calls]
        self.caches: tuple[CacheLayout, ...] = tuple(layouts)
        tables = windows(self.caches)
        self.specs: dict[nn.Module, Attention] = {}
        for i, (call, _) in enumerate(calls):
            heads = Heads(0, len(call.query), 0, len(call.key))
            sinks = None if call.sinks is None else call.sinks.float().flatten()
            self.specs[call.module] = Attention(
                i, tables.index(window_of(layouts[i])), heads, call.query.shape[-1], call.scale, None,
                sinks=sinks, softcap=call.softcap,
            )  # fmt: skip
        self.attentions = tuple(self.specs.values())
        self.run.attend, self.run.probing = self._attend, False


def _replace(lm: Any, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(lm.get_submodule(parent), own, module)


def _layout(call: Call, window: int, max_len: int) -> CacheLayout:
    heads, head_dim = len(call.key), call.query.shape[-1]
    return Window(heads, head_dim, window) if 0 < window < max_len else Paged(heads, head_dim)


def _vocab(lm: Any) -> int:
    head = lm.get_output_embeddings()
    if head is None:
        raise ModelError("it has no output layer")
    return head.out_features


def _skeleton(config: dict, ops: Ops) -> Any:
    """The model without weights. Raises ModelError where transformers has no decoder of this architecture."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names, kind = config.get("architectures") or [], config.get("model_type", "")
    if not names:
        raise ModelError("config.json names no architecture")
    what = names[0]
    if kind not in CONFIG_MAPPING:
        remote = "; code that comes with a checkpoint (auto_map) is never run" if config.get("auto_map") else ""
        raise ModelError(f"{what}: transformers {transformers.__version__} has no model_type {kind!r}{remote}")
    decoder = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    if decoder is None or decoder not in names:
        has = f"; of model_type {kind!r}, {decoder} is one" if decoder else ""
        raise ModelError(f"{what} is not a decoder of text in transformers {transformers.__version__}{has}")
    with _naming(what):
        made = CONFIG_MAPPING[kind].from_dict({key: value for key, value in config.items() if key != "auto_map"})
        _refuse(made, getattr(transformers, decoder))
        register()
        # on a GPU one grouped product, since a loop over experts waits for the device; on a CPU a loop over the chosen ones
        experts = "grouped_mm" if ops.device.type == "cuda" else "eager"
        with _BUILDING, no_init_weights():
            lm = transformers.AutoModelForCausalLM.from_config(
                made, dtype=ops.dtype, attn_implementation=PROBE, experts_implementation=experts
            )
        for module in lm.modules():
            for key, value in list(module.named_parameters(recurse=False)):  # memory that nothing has touched yet is not taken
                setattr(module, key, nn.Parameter(value.to("meta"), requires_grad=False))
        return lm


def _refuse(config: Any, kind: Any) -> None:
    """Raises ModelError for what shows in a config and in the class of its model."""
    if config.get_text_config() is not config or getattr(config, "is_encoder_decoder", False):
        raise ModelError("it has parts besides a decoder of text (an encoder, another modality)")
    if getattr(config, "add_cross_attention", False):
        raise ModelError("add_cross_attention: it attends to another model's states")
    if getattr(kind, "_is_stateful", False):
        raise ModelError("it keeps a state of its own from token to token")
    if not kind._can_set_attn_implementation() or not (kind._supports_sdpa or kind._supports_flash_attn):
        raise ModelError("its layers do not call transformers' attention interface (they have position biases, or old code)")
    if "position_ids" not in inspect.signature(kind.forward).parameters:
        raise ModelError("it does not take positions from outside (position biases such as alibi)")


def _body_name(lm: Any) -> str:
    """The name of the part before the output layer."""
    found = [name for name, module in lm.named_children() if isinstance(module, transformers.PreTrainedModel)]
    if len(found) != 1:
        raise ModelError("its output layer cannot be told from the rest")
    return found[0]


@contextmanager
def _naming(architecture: str) -> Iterator[None]:
    """Puts the architecture's name before what is wrong with it, also before errors of transformers' own code."""
    try:
        yield
    except MemoryError:
        raise
    except ModelError as e:
        raise ModelError(f"{architecture} cannot run through transformers: {e}") from None
    except Exception as e:
        raise ModelError(f"{architecture} cannot run through transformers: {type(e).__name__}: {e}") from e
