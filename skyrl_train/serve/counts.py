"""Numbers of a tenant for Prometheus, in its text format: what is there and what waits, from the records alone."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl_train.serve.limits import bytes_of
from skyrl_train.serve.records import Records

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def as_prometheus(records: Records, tenant: str) -> str:
    """Return a tenant's numbers; another's are not in them."""
    return "\n".join(_lines(records, tenant)) + "\n"


def _lines(records: Records, tenant: str) -> Iterator[str]:
    models = [each for each in records.models.values() if each.tenant == tenant]
    gauges = {
        "sessions": (sum(e.tenant == tenant and not e.is_finished for e in records.sessions.values()), "not finished"),
        "adapters": (sum(each.is_loaded for each in models), "models that are not unloaded"),
        "samplers": (sum(each.tenant == tenant for each in records.samplers.values()), "sampling sessions"),
        "checkpoints": (sum(each.tenant == tenant for each in records.checkpoints.values()), "checkpoints on disk"),
        "checkpoint_bytes": (bytes_of(records, tenant), "of checkpoints on disk"),
        "requests_open": (records.num_open[tenant], "promised and without an outcome"),
    }
    for name, (value, says) in gauges.items():
        yield from (
            f"# HELP skyrl_serve_{name} {says}",
            f"# TYPE skyrl_serve_{name} gauge",
            f"skyrl_serve_{name} {value}",
        )
    yield "# HELP skyrl_serve_requests_total requests that were promised, by verb and what became of them"
    yield "# TYPE skyrl_serve_requests_total counter"
    for (owner, verb, outcome), count in sorted(records.num_requests.items()):
        if owner == tenant:
            yield f'skyrl_serve_requests_total{{verb="{verb}",outcome="{outcome}"}} {count}'
