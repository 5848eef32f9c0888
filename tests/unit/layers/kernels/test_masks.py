"""The mask kernel against numpy, without a GPU: in Triton's interpreter."""

from __future__ import annotations

from tests.support.processes.prepared_python import PreparedPython
from tests.unit.layers.kernels.test_heads import needs_triton


@needs_triton
def test_kernel_sets_the_forbidden_logits_alone(triton_interpreter: PreparedPython) -> None:
    output = triton_interpreter.output("-m", "tests.support.kernels.mask_cases")
    assert "24 shapes" in output
    assert "masks of 2 words have fewer bits than a row has logits (65)" in output
