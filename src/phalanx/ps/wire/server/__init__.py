"""The answering side of a connection: in come requests of clients, out go the replies of a handler.

`Listener` binds a Unix socket and TCP and gives each client a thread, which runs a `Session`: handshake, requests in
order, replies. It knows no operation. Start with `listener`.
"""
