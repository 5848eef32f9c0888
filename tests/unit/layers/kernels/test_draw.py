"""The draw kernel against the host's sampler, without a GPU: in Triton's interpreter."""

from __future__ import annotations

from tests.support.processes.prepared_python import PreparedPython
from tests.unit.layers.kernels.test_heads import needs_triton


@needs_triton
def test_kernel_draws_the_hosts_tokens(triton_interpreter: PreparedPython) -> None:
    output = triton_interpreter.output("-m", "tests.support.kernels.draw_cases")
    assert "ends of the range: 6 rows" in output
    assert "names of columns: 5" in output
    assert "not finite: 6 rows" in output
