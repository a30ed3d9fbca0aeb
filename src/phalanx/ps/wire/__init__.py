"""Framed messages between workers and servers, over Unix or TCP sockets."""
