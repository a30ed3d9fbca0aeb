"""A certificate for HTTPS on this machine."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_certificate(path: Path) -> None:
    """Write a key and a certificate of `localhost` into one file."""
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(path), "-out", f"{path}.crt"]
    subprocess.run(command, check=True, capture_output=True)
    path.write_text(path.read_text() + Path(f"{path}.crt").read_text())
