"""How long a step takes on the device that is not there: a roofline with five numbers, and one for the KV transfer.

    step = fixed + max(weights, per-token * tokens) + attention * sum(new * context) + KV reading * sum(decode contexts)

The linear layers either wait for their weights (small steps, decode) or compute (prompts); attention comes on top. This
is the usual roofline of a decoder; it knows no kernels, no clocks of a real card and no host time (overlap hides it).

`reference` is a device of round numbers: 10 000 prompt tokens/s, a prompt of 100 000 tokens takes 25 s. Ratios between
policies are what it is good for. `h200-8b` is derived: 8e9 parameters in bf16, 32 layers, 32 query and 8 KV heads of
128, on 4.8 TB/s and 990 Tflop/s, of which 80 % (memory), 60 % (linear layers) and 40 % (attention) are reached:

    weights     16e9 B / 3.84e12 B/s = 4.2 ms           KV      2*32*8*128*2 B = 131 kB / 3.84e12 B/s = 34 ns
    per token   16e9 flop / 594e12 = 27 us              attention  4*32*32*128 flop / 396e12 = 1.3 ns
    transfer    131 kB / 20e9 B/s = 6.6 us           host copy  131 kB / 10e9 B/s = 13 us
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.config import opt
from baton.sched.plan import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """Defaults: `reference`."""

    step_ms: float = opt(0.5, "fixed time of a step [ms]")
    token_us: float = opt(100.0, "linear layers, computing: per token of the step [us]")
    weights_ms: float = opt(4.7, "linear layers, reading weights: per step, the larger of the two counts [ms]")
    attention_ns: float = opt(3.0, "prompt attention: per new token and token of its context [ns]")
    kv_read_ns: float = opt(34.0, "decode attention: per token of a decoding request's context [ns]")
    copy_us: float = opt(13.0, "between device and host: per token whose KV is copied [us]")
    transfer_ms: float = opt(2.0, "P: fixed time until D has taken a finished prompt's pages [ms]")
    transfer_us: float = opt(6.6, "P: that time per prompt token [us]")

    def prefill_seconds(self, new: int, cached: int) -> float:
        """A prompt's own share of the steps that compute `new` tokens behind `cached` ones, without fixed times."""
        return new * self.token_us * 1e-6 + new * (cached + (new + 1) / 2) * self.attention_ns * 1e-9

    def copy_seconds(self, tokens: int) -> float:
        return tokens * self.copy_us * 1e-6

    def transfer_seconds(self, tokens: int) -> float:
        return self.transfer_ms * 1e-3 + tokens * self.transfer_us * 1e-6

    def step_seconds(self, plan: StepPlan, scale: int) -> float:
        """Seconds of this step, in which every token stands for `scale` real ones.

        A step with decode rows then stands for `scale` real steps, over which its prompt chunks are spread.
        """
        new = attended = decode_context = 0
        for i, row in enumerate(plan.rows):
            new += row.n
            if i < plan.num_decode:
                decode_context += row.start + 1
            else:
                attended += row.n * row.start + row.n * (row.n + 1) // 2
        real_steps = scale if plan.num_decode else 1
        linear = max(self.weights_ms * 1e-3 * real_steps, self.token_us * 1e-6 * new * scale)
        attention = self.attention_ns * attended + self.kv_read_ns * decode_context
        return self.step_ms * 1e-3 * real_steps + linear + attention * 1e-9 * scale * scale


PRESETS: dict[str, StepModel] = {
    "reference": StepModel(),
    "h200-8b": StepModel(
        step_ms=0.5, token_us=27.0, weights_ms=4.2, attention_ns=1.3, kv_read_ns=34.0, transfer_ms=2.0, transfer_us=6.6
    ),
}
