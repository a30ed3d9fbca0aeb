"""`SpecModel`, `Name`, `Bytes`, `Seconds`, ...: types of the fields of a job spec, with what they accept (pure)."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from phalanx.jobs.spec.quantities import to_bytes, to_seconds

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")]
"""A name that Kubernetes, Slurm, a folder and an address all take: small letters, digits and dashes, 40 at most."""

Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Text = Annotated[str, Field(pattern=r"^[^\x00]*$")]
Word = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$")]
"""One line: what becomes one of a script, or a value in a manifest."""

Source = Annotated[str, Field(pattern=r"^(secret|configmap)/[a-z0-9][a-z0-9.-]*$")]
"""Where pods take environment variables from."""

Cores = Annotated[float, Field(gt=0, le=100_000)]
Commit = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, WithJsonSchema({"type": ["integer", "string"], "examples": [2, "1:4"]})]
Bytes = Annotated[
    int, BeforeValidator(to_bytes), WithJsonSchema({"type": ["string", "integer"], "examples": ["8Gi", "500M"]})
]
Seconds = Annotated[
    float, BeforeValidator(to_seconds), WithJsonSchema({"type": ["string", "number"], "examples": ["90s", "1h30m"]})
]


class SpecModel(BaseModel):
    """A part of a job spec. Unknown fields are refused, and docstrings of fields are their descriptions."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
