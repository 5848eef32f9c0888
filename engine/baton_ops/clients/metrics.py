"""Pages in Prometheus' text format."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

MetricSample = Sample
"""Name, labels and value of one line; of its further fields nothing is read."""


def parse_metrics(text: str) -> list[MetricSample]:
    """Samples of a page up to its first line that is not in the format."""
    samples: list[MetricSample] = []
    with contextlib.suppress(ValueError):
        for family in text_string_to_metric_families(text):
            samples += family.samples
    return samples


def select_samples(samples: Iterable[MetricSample], name: str, **labels: str) -> list[MetricSample]:
    """Samples of that name whose labels include `labels`."""
    return [s for s in samples if s.name == name and labels.items() <= s.labels.items()]


def sum_samples(samples: Iterable[MetricSample], name: str, **labels: str) -> float:
    """Sum of what `select_samples` returns."""
    return sum(sample.value for sample in select_samples(samples, name, **labels))
