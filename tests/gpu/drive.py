"""Drives an executor with hand-made batches, without a rank's machine: correctness and speed of the device alone.

    python tests/gpu/drive.py check            tiny models against the CPU's executor, TP 1 (and TP 2 with two GPUs)
    python tests/gpu/drive.py speed CONFIG     decode and mixed steps of a model's shape, TP 1 (and TP 2)

Every rank's process runs the same scenario, so all of them make the same batches.
"""

import json
import multiprocessing
import os
import pathlib
import statistics
import sys
import tempfile
import time
import traceback

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from slipstream.config import EngineConfig  # noqa: E402
from slipstream.log.batch import Batch  # noqa: E402
from slipstream.log.request import Request, SamplingParams  # noqa: E402
from slipstream.ops.collective import SharedMemory  # noqa: E402

TINY = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 1031, "hidden_size": 192, "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "hidden_act": "silu", "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
}  # fmt: skip


SMALL = {
    "vocab_size": 1031, "hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
}  # fmt: skip
FAMILIES = {  # one for each operation that the dense models above lack
    "qwen3.5": SMALL | {
        "architectures": ["Qwen3_5ForCausalLM"], "head_dim": 128, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 32, "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.25},
    },
    "nemotron-h": SMALL | {
        "architectures": ["NemotronHForCausalLM"], "layers_block_type": ["mamba", "mlp", "attention", "mamba"],
        "mamba_num_heads": 8, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 32, "conv_kernel": 4,
        "mlp_hidden_act": "relu2",
    },
    "qwen3-moe": SMALL | {
        "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 96,
        "norm_topk_prob": True,
    },
    "gpt-oss": SMALL | {
        "architectures": ["GptOssForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "attention_bias": True,
    },
    "deepseek-v3": SMALL | {
        "architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": 8, "head_dim": 32, "q_lora_rank": 96,
        "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "n_routed_experts": 16,
        "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "n_shared_experts": 1, "moe_intermediate_size": 96, "first_k_dense_replace": 1,
    },
    "gemma3": SMALL | {
        "architectures": ["Gemma3ForCausalLM"], "head_dim": 256, "num_attention_heads": 4, "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256, "sliding_window": 100, "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
            "full_attention": {"rope_theta": 1e6, "rope_type": "default"},
        },
    },
}  # fmt: skip


class Feeder:
    """Batches for one executor: hands out pages, keeps two steps in flight, collects tokens by slot."""

    def __init__(self, executor, page_size: int):
        self.executor, self.page_size = executor, page_size
        self.seq = 0
        self.free = list(range(executor_pages(executor), 0, -1))
        self.held: dict[int, list[int]] = {}  # pages by slot; the slot's next owner has given them back
        self.length: dict[int, int] = {}
        self.tokens: dict[int, list[int]] = {}
        self.flying: list[Batch] = []
        self.outcomes = []
        self.times: list[float] = []
        self.host: list[float] = []

    def init_slot(self, slot: int, prompt: np.ndarray, **sampling) -> None:
        self.executor.init_slot(slot, Request(slot, prompt.astype("<i4").tobytes(), 1, SamplingParams(**sampling)))
        self.free += reversed(self.held.get(slot, []))
        self.length[slot], self.tokens[slot], self.held[slot] = 0, [], []

    def step(self, decode: np.ndarray, chunks: list[tuple[int, int, bool]] = (), depth: int = 2, masks=None) -> None:
        """Launches one step: decode rows (keep the array to keep the rows), chunks (slot, count, samples)."""
        slots = np.concatenate([decode, np.array([c[0] for c in chunks], np.int32)]).astype(np.int32) if len(chunks) else decode
        counts = np.array([1] * len(decode) + [c[1] for c in chunks], np.int32)
        starts = np.array([self.length[s] for s in slots.tolist()], np.int32)
        sampled = np.array([1] * len(decode) + [int(c[2]) for c in chunks], np.int32)
        pages = []
        for s, end in zip(slots.tolist(), (starts + counts).tolist(), strict=True):
            self.length[s] = end
            while len(self.held[s]) * self.page_size < end:
                pages += [(table, s, len(self.held[s]), self.free[-1]) for table in range(self.executor.given_tables)]
                self.held[s].append(self.free.pop())
        places = np.array(pages, np.int32).reshape(-1, 4)
        batch = Batch(self.seq, slots, starts, counts, sampled, int(sampled.max()), len(decode), places)
        self.seq += 1
        at = time.perf_counter()
        if masks is None:
            self.executor.launch(batch)
        else:
            self.executor.launch_forward(batch)
            self.executor.launch_sample(batch.seq, masks, frozenset())
        self.host.append(time.perf_counter() - at)
        self.flying.append(batch)
        while len(self.flying) >= depth:
            self.wait()

    def wait(self) -> None:
        deadline = time.perf_counter() + 60
        while not (found := self.executor.outcomes()):
            if time.perf_counter() > deadline:
                raise TimeoutError("no outcome in 60 s")
        for outcome in found:
            batch = self.flying.pop(0)
            assert outcome.seq == batch.seq
            rows = zip(batch.slots[batch.judged].tolist(), outcome.tokens.tolist(), outcome.accepted.tolist(), strict=True)
            for s, tokens, accepted in rows:
                self.tokens[s] += tokens[:accepted]
            self.outcomes.append(outcome)
            self.times.append(time.perf_counter())

    def drain(self) -> None:
        while self.flying:
            self.wait()


def executor_pages(executor) -> int:
    return executor.given_pages


def open_executor(device: str, config: EngineConfig, path: str, rank: int, size: int, fd: int):
    from slipstream.device.select import build_executor

    config.device = device
    executor, _ = build_executor(config, path, rank, size, fd, None)
    capacity = executor.capacity()
    limits = capacity.limits
    executor.given_pages, executor.given_tables = min(limits.pages, limits.slots * limits.columns), len(limits.tables)
    executor.start(limits._replace(tables=tuple(table._replace(pages=executor.given_pages) for table in limits.tables)))
    return executor, capacity


def spread(size: int, scenario, *args):
    """Runs scenario(rank, size, fd, *args) in `size` fresh processes; returns rank 0's value, or None where a rank failed."""
    fd = os.memfd_create("drive")
    os.ftruncate(fd, SharedMemory.required_bytes(size, 1 << 20))
    context = multiprocessing.get_context("spawn")  # a fork of a process that has touched CUDA cannot use it
    pipe, end = context.Pipe(False)
    shared = f"/proc/{os.getpid()}/fd/{fd}"
    children = [context.Process(target=_body, args=(r, size, shared, end, scenario, args)) for r in range(size)]
    for c in children:
        c.start()
    value = pipe.recv() if pipe.poll(150) else None
    for c in children:
        c.join(20)
        if c.is_alive():
            c.kill()
    os.close(fd)
    return value


def _body(rank: int, size: int, shared: str, end, scenario, args) -> None:
    value = None
    try:
        value = scenario(rank, size, os.open(shared, os.O_RDWR), *args)
    except BaseException:
        traceback.print_exc()
    if rank == 0:
        end.send(value)
    sys.stdout.flush()
    os._exit(0 if value is not None else 1)


# --- correctness


def write_config(config: dict) -> str:
    path = pathlib.Path(tempfile.mkdtemp()) / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def story(rank: int, size: int, fd: int, device: str, path: str, dtype: str, eager: bool):
    """Prompts of several lengths in chunks beside decodes, then decodes; greedy, seeded, and rows that are not plain."""
    config = EngineConfig(
        model=path, load_format="dummy", dtype=dtype, max_num_seqs=16, max_num_batched_tokens=256, max_model_len=1024,
        enforce_eager=eager, seed=3, kv_cache_memory_bytes=1 << 28,
    )  # fmt: skip
    executor, _ = open_executor(device, config, path, rank, size, fd)
    if device == "cuda":
        import torch

        torch.cuda.set_sync_debug_mode("error")
    feeder = Feeder(executor, executor.page_size)
    rng = np.random.default_rng(1)
    kinds = [
        {"temperature": 0.0}, {"temperature": 0.8, "seed": 11}, {"temperature": 0.0},
        {"temperature": 1.0, "seed": 2**60, "choice": 3},
        {"temperature": 0.9, "seed": 4, "top_k": 20, "top_p": 0.8}, {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
        {"temperature": 0.7, "seed": 9, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
        {"temperature": 0.6, "seed": 8, "min_p": 0.1, "logit_bias": ((5, 4.0), (7, -100.0)), "bad_words": ((5,), (9, 10)),
         "min_tokens": 4, "stop_ids": (3,)},
    ]  # fmt: skip
    lengths = [5, 300, 64, 700, 33, 90, 17, 128]
    running: list[int] = []
    for slot, (kind, n) in enumerate(zip(kinds, lengths, strict=True)):
        feeder.init_slot(slot, rng.integers(0, 1031, n), **kind)
        at = 0
        while at < n:
            count = min(200 - len(running), n - at)
            decode = np.array(running, np.int32)
            feeder.step(decode, [(slot, count, at + count == n)])
            at += count
        running.append(slot)
    decode = np.array(running, np.int32)
    for _ in range(20):
        feeder.step(decode)
    mask = np.zeros((1, -(-1031 // 32)), np.uint32)
    mask[0, 3] = 0b1010
    feeder.step(decode, masks={0: mask, 3: mask})
    feeder.step(decode, masks={1: np.zeros_like(mask)})
    decode = np.array(running[::2], np.int32)
    for _ in range(6):
        feeder.step(decode)
    feeder.drain()
    logs = [(i, k, v) for i, o in enumerate(feeder.outcomes) for k, v in sorted(o.logprobs.items())]
    prompts = [(k, v) for o in feeder.outcomes for k, v in sorted(o.prompt_logprobs.items())]
    errors = [(i, o.errors) for i, o in enumerate(feeder.outcomes) if o.errors]
    return feeder.tokens, logs, prompts, errors


def compare(name: str, a, b) -> bool:
    if a is None or b is None:
        print(f"{name}: a run failed")
        return False
    same = [s for s in a[0] if a[0][s] == b[0][s]]
    firsts = {
        s: next(i for i, (x, y) in enumerate(zip(a[0][s], b[0][s], strict=True)) if x != y) for s in a[0] if s not in same
    }
    logs = max((abs(x[2].logprob - y[2].logprob) for x, y in zip(a[1], b[1], strict=True)), default=0.0)
    prompts = max(
        (abs(p.logprob - q.logprob) for x, y in zip(a[2], b[2], strict=True) for p, q in zip(x[1][1], y[1][1], strict=True)),
        default=0.0,
    )
    ids = all(p.top_ids == q.top_ids for x, y in zip(a[1], b[1], strict=True) for p, q in ((x[2], y[2]),))
    print(
        f"{name}: {len(same)}/{len(a[0])} slots equal, first differences {firsts}, logprob error {logs:.2e} over {len(a[1])} "
        f"(ids {'equal' if ids else 'differ'}), prompt {prompts:.2e} over {len(a[2])}, errors {a[3] == b[3]} {b[3]}",
        flush=True,
    )
    return len(same) == len(a[0]) and a[3] == b[3]


def check(gpus: int) -> None:
    llama = TINY | {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 80}
    phi3 = TINY | {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "num_attention_heads": 6, "num_key_value_heads": 2,
        "head_dim": 32, "pad_token_id": 0, "eos_token_id": 3,
    }  # fmt: skip
    labels = {"qwen3 9/3 heads of 64": TINY, "llama 8/2 heads of 80": llama, "phi3 through transformers": phi3}
    for label, model in labels.items():
        path = write_config(model)
        cpu = spread(1, story, "cpu", path, "float32", False)
        for size in range(1, gpus + 1):
            for eager in (False, True) if model is TINY else (False,):
                got = spread(size, story, "cuda", path, "float32", eager)
                compare(f"{label} float32 TP {size} {'eager' if eager else 'graphs'} against the CPU", cpu, got)
        ones = spread(1, story, "cuda", path, "bfloat16", False)
        if gpus > 1:
            compare(f"{label} bfloat16 TP 2 against TP 1", ones, spread(2, story, "cuda", path, "bfloat16", False))


# --- speed


def steady(feeder: Feeder, rows: int, length: int, steps: int) -> tuple[float, float]:
    """Milliseconds per step and microseconds of host time for `rows` decode rows at about `length` tokens."""
    rng = np.random.default_rng(rows)
    for slot in range(rows):
        feeder.init_slot(slot, rng.integers(0, 1000, length), temperature=0.0)
        feeder.length[slot] = length - 1
    chunks = [(slot, 1, True) for slot in range(rows)]
    feeder.step(np.zeros(0, np.int32), chunks)
    decode = np.arange(rows, dtype=np.int32)
    for _ in range(10):
        feeder.step(decode)
    feeder.drain()
    feeder.times.clear()
    feeder.host.clear()
    for _ in range(steps):
        feeder.step(decode)
    feeder.drain()
    gaps = np.diff(feeder.times) * 1e3
    return float(np.median(gaps)), statistics.median(feeder.host) * 1e6


def mixed(feeder: Feeder, rows: int, chunk: int, context: int, steps: int) -> tuple[float, float]:
    """The same for a chunk of a prompt beside decode rows."""
    rng = np.random.default_rng(chunk)
    slot = 100
    context -= chunk * (3 + steps // 2)  # so that it is met in the middle of the measurement
    context = max(0, context)
    feeder.init_slot(slot, rng.integers(0, 1000, context + chunk * (steps + 4)), temperature=0.0)
    feeder.length[slot] = context
    decode = np.arange(rows, dtype=np.int32)
    for _ in range(3):
        feeder.step(decode, [(slot, chunk, False)])
    feeder.drain()
    feeder.times.clear()
    feeder.host.clear()
    for _ in range(steps):
        feeder.step(decode, [(slot, chunk, False)])
    feeder.drain()
    return float(np.median(np.diff(feeder.times)) * 1e3), statistics.median(feeder.host) * 1e6


def sustained(feeder: Feeder, rows: int, chunk: int, context: int, rounds: int = 6) -> float:
    """Milliseconds a step over seconds without a pause, when a GPU has come down to the clock that its power allows."""
    decode, rng = np.arange(rows, dtype=np.int32), np.random.default_rng(chunk)
    context = max(0, context - 4 * chunk)
    begin, first = 0.0, 0
    for i in range(rounds):
        slot = 100 + i
        feeder.init_slot(slot, rng.integers(0, 1000, context + 8 * chunk), temperature=0.0)
        feeder.length[slot] = context
        for _ in range(8):
            feeder.step(decode, [(slot, chunk, False)])
        if i == 1:
            begin, first = time.perf_counter(), feeder.seq
    return (time.perf_counter() - begin) / (feeder.seq - first) * 1e3


def speed(rank: int, size: int, fd: int, path: str, profile: str):
    import torch

    begin = time.perf_counter()
    config = EngineConfig(
        model=path,
        load_format="dummy",
        max_num_seqs=128,
        max_num_batched_tokens=2048,
        max_model_len=32768,
        block_size=int(os.environ.get("PAGE_SIZE", 64)),
    )
    executor, capacity = open_executor("cuda", config, path, rank, size, fd)
    torch.cuda.synchronize()
    ready = time.perf_counter() - begin
    for k, v in executor.caches:
        k.normal_()
        v.normal_()
    torch.cuda.set_sync_debug_mode("error")
    feeder = Feeder(executor, executor.page_size)
    say = print if rank == 0 else lambda *a, **k: None
    say(
        f"TP {size}: ready in {ready:.1f} s, {executor.given_pages} of {capacity.limits.tables[0].pages} pages, "
        f"weights {capacity.weight_bytes / 2**30:.2f} GiB",
        flush=True,
    )
    for rows, length, steps in ((1, 900, 100), (16, 900, 60), (48, 890, 100), (128, 890, 60)):
        ms, host = steady(feeder, rows, length, steps)
        say(f"TP {size} decode {rows:4d} rows at {length}: {ms:.3f} ms a step, host {host:.0f} us", flush=True)
    for total in (*range(512, 1025, 64), 2048):
        ms = sustained(feeder, 16, total - 16, 12000)
        feeder.drain()
        say(
            f"TP {size} 16 decodes + chunk {total - 16} at 12000, sustained: {ms:.2f} ms, {(total - 16) / ms:.1f} ktok/s",
            flush=True,
        )
    for rows, chunk, context in ((16, 240, 12000), (16, 496, 12000), (16, 1008, 12000), (1, 1023, 7000)):
        ms, host = mixed(feeder, rows, chunk, context, 8)
        rate = chunk / ms
        say(
            f"TP {size} {rows} decodes + chunk {chunk} at {context}: {ms:.2f} ms, {rate:.1f} ktok/s, host {host:.0f} us",
            flush=True,
        )
    if profile:
        torch.cuda.set_sync_debug_mode("default")
        trace(feeder, profile, rank)
    return True


def trace(feeder: Feeder, profile: str, rank: int, steps: int = 8) -> None:
    """Where the time of a decode step at 48 rows and of a mixed step goes, by kernel, and how long the device did nothing."""
    import torch
    from torch.profiler import ProfilerActivity

    decode = np.arange(48, dtype=np.int32)
    for label, chunks in (("decode 48", ()), ("decode 16 + 1008", ((100, 1008, False),))):
        rows = decode if not chunks else decode[:16]
        for _ in range(3):
            feeder.step(rows, list(chunks))
        feeder.drain()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as p:
            for _ in range(steps):
                feeder.step(rows, list(chunks))
            feeder.drain()
            torch.cuda.synchronize()
        if rank == 0:
            events = [e for e in p.profiler.kineto_results.events() if e.device_type() == torch.autograd.DeviceType.CUDA]
            events = sorted((e.start_ns(), e.start_ns() + e.duration_ns(), e.name()) for e in events if e.duration_ns())
            print(f"--- {label}, {steps} steps: {(events[-1][1] - events[0][0]) / 1e6 / steps:.3f} ms a step")
            idle: dict[tuple[str, str], list[int]] = {}
            until, before = events[0][0], ""
            for start, end, name in events:
                if start > until:
                    idle.setdefault((before[:28], name[:28]), []).append(start - until)
                if end > until:
                    until, before = end, name
            print(f"{sum(map(sum, idle.values())) / 1e6 / steps:8.3f} ms/step nothing ran")
            spent: dict[str, list[int]] = {}
            for start, end, name in events:
                spent.setdefault(name[:80], []).append(end - start)
            between = {f"between {one} and {two}": gaps for (one, two), gaps in idle.items()}
            for times, most in ((between, 12), (spent, 16)):
                for name, found in sorted(times.items(), key=lambda x: -sum(x[1]))[:most]:
                    each = f"{len(found) / steps:6.1f} x {sum(found) / len(found) / 1e3:8.2f} us"
                    print(f"{sum(found) / 1e6 / steps:8.3f} ms/step {each}  {name}")
            sys.stdout.flush()


def main() -> None:
    import subprocess

    gpus = len(subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.splitlines())
    if sys.argv[1] == "check":
        check(min(gpus, 2))
        return
    sizes = [int(n) for n in sys.argv[3].split(",")] if len(sys.argv) > 3 else range(1, min(gpus, 2) + 1)
    for size in sizes:
        spread(size, speed, sys.argv[2], "" if os.environ.get("QUIET") or size != max(sizes) else "profile")


if __name__ == "__main__":
    main()
