"""Framed messages between workers and servers, over Unix or TCP sockets."""

from phalanx.ps.wire.connection import Connection
from phalanx.ps.wire.listener import Listener
from phalanx.ps.wire.message import Handler, Pending, RpcReply, RpcRequest

__all__ = ["Connection", "Handler", "Listener", "Pending", "RpcReply", "RpcRequest"]
