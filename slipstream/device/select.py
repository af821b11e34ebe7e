"""Choosing the executor of a rank. A device's libraries are imported only when that device is used."""

import os

from slipstream.config import EngineConfig
from slipstream.device.executor import DeviceProgress, Executor
from slipstream.errors import ConfigError


def build_executor(
    config: EngineConfig, model_path: str, rank: int, size: int, collective: int, board: DeviceProgress
) -> tuple[Executor, dict]:
    """The executor of one rank, with its weights loaded, and the model's config (Hugging Face's keys).

    `collective` is the descriptor of the memory in which the ranks of this machine sum; on CUDA they only
    agree there on the file through which they connect.
    """
    if config.device == "sim":
        if config.most_drafts:
            raise ConfigError(f"--speculative-tokens {config.speculative_tokens}: use --sim-drafts with --device sim")
        from slipstream.device.sim import SimExecutor, sim_model

        model = sim_model(model_path)
        return SimExecutor(config, model, board), model
    kind = resolve_device(config.device)
    if kind == "cuda":
        if config.most_drafts:
            raise ConfigError(f"--speculative-tokens {config.speculative_tokens} is not supported with --device cuda; 0 is")
        from slipstream.device.cuda.memory import choose_device

        choose_device(rank, size)  # says what is missing before kernels are imported, which need it too
        from slipstream.device.cuda.executor import build_cuda

        return build_cuda(config, model_path, rank, size, collective, board)
    return _build_cpu(config, model_path, rank, size, collective, board)


def resolve_device(name: str) -> str:
    """The device that `auto` means on this machine."""
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _build_cpu(
    config: EngineConfig, model_path: str, rank: int, size: int, collective: int, board: DeviceProgress
) -> tuple[Executor, dict]:
    from slipstream.device.cpu.executor import CpuExecutor
    from slipstream.ops.collective import SharedMemory, Solo
    from slipstream.shard import Shard
    from slipstream.weights.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(model_path, config.load_format, config.seed)
    if size == 1:
        sums = Solo()
    else:
        room = os.fstat(collective).st_size - SharedMemory.required_bytes(size, 0)
        sums = SharedMemory(collective, rank, size, room // (2 * size) // 4096 * 4096)
        sums.on_wait = lambda other: _show_wait(board, sums.entered, other)
    return CpuExecutor(checkpoint, config, Shard(rank, size), sums, board), checkpoint.config


def _show_wait(board: DeviceProgress, entered: int, other: int | None) -> None:
    """Shows on the board for which rank the device waits, so that a hanging step is blamed on the right rank."""
    board.set("collective", entered)
    board.set("sums_with", 0 if other is None else other + 1)
