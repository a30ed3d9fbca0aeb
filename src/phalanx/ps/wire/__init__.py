"""RPC between workers and servers, over Unix or TCP sockets.

A client's `Connection` takes an operation, a JSON object and arrays, and gives back a `Pending` reply; a server's
`Listener` gives each `RpcRequest` to a handler and sends its `RpcReply`. Start with `message`, then `connection` and
`link` for the client, or `listener` and `session` for the server; `frame` has the bytes.
"""

from phalanx.ps.wire.client.connection import Connection
from phalanx.ps.wire.message import Handler, Pending, RpcReply, RpcRequest
from phalanx.ps.wire.server.listener import Listener

__all__ = ["Connection", "Handler", "Listener", "Pending", "RpcReply", "RpcRequest"]
