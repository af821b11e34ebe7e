"""The channel over TCP, for a group with ranks on several machines: the two ends of `process/channel.py` over ZeroMQ.

The leader binds one socket per follower, on ports that the system chooses, and each takes one connection. Queues are bounded,
and ZeroMQ's own thread moves the bytes, so neither side can block the other at its high-water mark. A connection that breaks
stays broken. The leader misses a follower's answer, and the group ends with an error.

It serves followers that are not children of the leader's supervisor. They get the address when they start:

    address, leader_end = serve_followers(3, host="10.0.0.1")
    follower_end = connect(address, rank=2)
"""

import msgspec
import zmq

from slipstream.errors import ConfigError, Diverged, EngineDown
from slipstream.log.entries import FromFollower, ToFollower
from slipstream.system.bell import Bell

MAX_QUEUED_MESSAGES = 4096  # messages that one direction holds: many times the window of unanswered entries
LINGER_MS = 1000  # the last messages have this long to leave when an end is closed
HEARTBEAT_MS, PEER_LOST_MS = 2_000, 10_000  # between heartbeats; without one for so long, the peer counts as gone


class Address(msgspec.Struct, frozen=True):
    """The address of a group's leader. `key` encrypts, and only its holders can connect, so only followers may know it."""

    host: str
    ports: tuple[int, ...]  # by follower: ports[rank - 1]
    key: str  # the leader's CURVE key, Z85


class Ends:
    """Sockets that are read without waiting, and descriptors that stay readable while something is unread.

    ZeroMQ's descriptor signals a message once, and any call on the socket may consume that signal. So after each such call we
    look for messages and ring our own bell.
    """

    def __init__(self, sockets: list[zmq.Socket]):
        self._sockets = sockets
        self._bell = Bell()
        self._encode = msgspec.msgpack.Encoder().encode
        for socket in sockets:
            self._look(socket)

    def descriptors(self) -> list[int]:
        return [self._bell.fileno(), *(int(socket.getsockopt(zmq.FD)) for socket in self._sockets)]

    def _look(self, socket: zmq.Socket) -> None:
        if int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._bell.ring()

    def _send(self, socket: zmq.Socket, data: bytes, patience: float) -> bool:
        """False when the peer leaves a whole queue unread for `patience` seconds, or is not there."""
        try:
            socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            if not patience or not socket.poll(int(patience * 1e3), zmq.POLLOUT):
                return False
            socket.send(data, zmq.NOBLOCK)
        finally:
            self._look(socket)
        return True

    def _take(self) -> list[bytes]:
        """All messages that have arrived, each peer's in order."""
        self._bell.clear()
        out: list[bytes] = []
        for socket in self._sockets:
            try:
                while True:
                    out.append(socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                self._look(socket)
        return out

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(LINGER_MS)
        self._bell.close()


class LeaderEnd(Ends):
    """The leader's side, with the methods of `process.channel.LeaderEnd`."""

    def __init__(self, sockets: list[zmq.Socket], patience: float):
        super().__init__(sockets)
        self.patience = patience  # seconds that a follower may take to read or to answer
        self._decode = msgspec.msgpack.Decoder(FromFollower).decode

    def send(self, message: ToFollower) -> int:
        """Delivers to all followers; returns the encoded size. Diverged, naming the rank, when one takes nothing."""
        data = self._encode(message)
        patience = 0.8 * self.patience  # while it waits here the leader does not turn; the supervisor must not blame it first
        for i, socket in enumerate(self._sockets):
            if not self._send(socket, data, patience):
                raise Diverged(f"rank {i + 1} has not read its channel for {patience:g} s", i + 1, -1)
        return len(data)

    def receive(self) -> list[FromFollower]:
        return [self._decode(data) for data in self._take()]


class FollowerEnd(Ends):
    """A follower's side, with the methods of `process.channel.FollowerEnd`."""

    def __init__(self, socket: zmq.Socket):
        super().__init__([socket])
        self._decode = msgspec.msgpack.Decoder(ToFollower).decode

    def receive(self) -> list[ToFollower]:
        return [self._decode(data) for data in self._take()]

    def answer(self, reply: FromFollower) -> None:
        """Sends a reply. Raises EngineDown if the leader is gone or leaves a whole queue of replies unread."""
        if not self._send(self._sockets[0], self._encode(reply), 0.0):
            raise EngineDown("the leader has stopped reading replies")


def serve_followers(count: int, host: str = "127.0.0.1", patience: float = 30.0) -> tuple[Address, LeaderEnd]:
    """Listens for `count` followers on an address of this machine. ConfigError when it cannot."""
    if not zmq.has("curve"):
        raise ConfigError("this build of ZeroMQ has no CURVE: ranks on several machines need it (pip's pyzmq has it)")
    public, secret = zmq.curve_keypair()
    sockets, ports = [], []
    for _ in range(count):
        socket = _socket(host)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        try:
            socket.bind(f"tcp://{_bracketed(host)}:*")
        except zmq.ZMQError as e:
            raise ConfigError(
                f"cannot listen for ranks on {host}: {e.strerror}; it must be an address of this machine"
            ) from None
        ports.append(int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1]))
        sockets.append(socket)
    return Address(host, tuple(ports), public.decode()), LeaderEnd(sockets, patience)


def connect(address: Address, rank: int) -> FollowerEnd:
    """The end of follower `rank` (1 for the first). Messages that it sends before it is connected are kept."""
    socket = _socket(address.host)
    public, secret = zmq.curve_keypair()
    socket.setsockopt(zmq.CURVE_SERVERKEY, address.key.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    socket.connect(f"tcp://{_bracketed(address.host)}:{address.ports[rank - 1]}")
    return FollowerEnd(socket)


def _socket(host: str) -> zmq.Socket:
    socket = zmq.Context.instance().socket(zmq.PAIR)
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
    socket.setsockopt(zmq.IPV6, int(":" in host))
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, PEER_LOST_MS)
    return socket


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
