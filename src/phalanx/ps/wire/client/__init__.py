"""The caller's side of a connection: in goes an operation with JSON and arrays, out comes a `Pending` reply.

`Connection` numbers requests, sends those of a lost server again and gives up at a deadline; it holds one `ServerLink`
at a time, a socket with the requests in flight on it, which `Dialer` connects and greets. Start with `connection`.
"""
