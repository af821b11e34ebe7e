"""Carrying out effects: one dispatcher that knows every kind, for drivers, simulators, checkers and benchmarks."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import assert_never

from slipstream.device.executor import Executor
from slipstream.log.batch import InitSlot, Offload, Restore, SetState
from slipstream.rank.events import (
    DeviceEffect,
    Effect,
    Launch,
    LaunchForward,
    LaunchSample,
    Poison,
    Prepare,
    Send,
    SendReply,
    SendToFront,
    Span,
    Wake,
)


class Interpreter(ABC):
    """Carries out a machine's effects, in order. A new kind of effect is a type error until each interpreter has its method."""

    def perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Span():
                    self.span(effect)
                case Launch() | LaunchForward() | LaunchSample() | InitSlot() | SetState() | Offload() | Restore():
                    self.device(effect)
                case SendReply():
                    self.reply(effect)
                case Send():
                    self.send(effect)
                case SendToFront():
                    self.send_to_front(effect)
                case Wake():
                    self.wake(effect)
                case Prepare():
                    self.prepare(effect)
                case Poison():
                    self.poison(effect)
                case _:
                    assert_never(effect)

    @abstractmethod
    def span(self, effect: Span) -> None: ...

    @abstractmethod
    def device(self, effect: DeviceEffect) -> None: ...

    @abstractmethod
    def reply(self, effect: SendReply) -> None: ...

    @abstractmethod
    def send(self, effect: Send) -> None: ...

    @abstractmethod
    def send_to_front(self, effect: SendToFront) -> None: ...

    @abstractmethod
    def wake(self, effect: Wake) -> None: ...

    @abstractmethod
    def prepare(self, effect: Prepare) -> None: ...

    @abstractmethod
    def poison(self, effect: Poison) -> None: ...


def queue(executor: Executor, effect: DeviceEffect) -> None:
    """Queues one effect on a device."""
    match effect:
        case Launch():
            executor.launch(effect.batch)
        case LaunchForward():
            executor.launch_forward(effect.batch)
        case LaunchSample():
            executor.launch_sample(effect.seq, effect.masks, effect.discarded)
        case InitSlot():
            executor.init_slot(effect.slot, effect.request)
        case SetState():
            executor.set_state(effect.slot, effect.snapshot)
        case Offload():
            executor.offload(effect.table, effect.pages, effect.host)
        case Restore():
            executor.restore(effect.table, effect.host, effect.pages)
        case _:
            assert_never(effect)
