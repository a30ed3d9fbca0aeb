"""`make wheel` names a function that needs AVX unless the processor was asked first."""

from __future__ import annotations

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / ".ci" / "instructions"
LISTING = """
0000000000000000 <phalanx::sum(float const*)>:
   0:\tmovups (%rdi),%xmm0
   3:\taddps  %xmm1,%xmm0
0000000000000040 <phalanx::(anonymous namespace)::add_of_avx2(float const*)>:
  40:\tvmovups (%rdi),%ymm0
  44:\tvaddps %ymm1,%ymm0,%ymm0
0000000000000080 <phalanx::scale(float*)>:
  80:\tvmulss %xmm1,%xmm0,%xmm0
"""


def test_each_function_with_an_instruction_of_avx_is_named_once() -> None:
    spec = spec_from_loader("instructions", SourceFileLoader("instructions", str(SCRIPT)))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    assert list(module.functions_with_avx(LISTING)) == [
        "phalanx::(anonymous namespace)::add_of_avx2(float const*)",
        "phalanx::scale(float*)",
    ]
