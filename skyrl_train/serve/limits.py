"""What one tenant may have of the server at a time, so that nobody takes all of it."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_train.serve.records import Records
from skyrl_train.serve.refusals import Refused


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of each tenant."""

    max_adapters: int = 2000
    """Models that are not unloaded."""
    max_bytes: int = 256 << 30
    """Of checkpoints on disk, those of samplers among them. It is looked at before each save, which may go beyond it."""
    max_requests: int = 20_000
    """Promised and without an outcome."""
    full_for: str = ""
    """The tenant that may train all weights of a model, one at a time; empty for nobody."""

    def require_adapter(self, records: Records, tenant: str) -> None:
        """Raises Refused where a tenant has as many adapters as it may."""
        count = sum(each.is_loaded and each.tenant == tenant for each in records.models.values())
        if count >= self.max_adapters:
            raise Refused(
                f"{count} models of yours are there, of {self.max_adapters} at most (--max-adapters): unload_model takes "
                "one away, and its checkpoints stay"
            )

    def require_full(self, records: Records, tenant: str, num_bytes: int) -> None:
        """Raises Refused for another tenant than the one that may train all weights, and where that trains them already.
        `num_bytes`: what they take, with gradients and averages."""
        if not self.full_for or tenant != self.full_for:
            raise Refused(
                "full fine-tuning is not allowed for this key: send lora_config, or have the server started with --full-for "
                "and your tenant's name",
                status=403,
            )
        there = next((each for each in records.models.values() if each.is_loaded and each.facts.is_full), None)
        if there is not None:
            raise Refused(
                f"all weights of {there.model_id} are trained, and of one model at a time, as they take {num_bytes} bytes "
                "beside the base: POST unload_model with that model_id takes it away, and its checkpoints stay"
            )

    def require_room(self, records: Records, tenant: str) -> None:
        """Raises Refused where a tenant's checkpoints take as much of the disk as they may."""
        size = bytes_of(records, tenant)
        if size >= self.max_bytes:
            raise Refused(
                f"your checkpoints take {size} bytes, of {self.max_bytes} at most (--max-bytes): delete some, or give them "
                "ttl_seconds"
            )

    def require_turn(self, records: Records, tenant: str) -> None:
        """Raises Refused, to be sent again, where as many requests of a tenant as may are on their way."""
        if records.num_open[tenant] >= self.max_requests:
            raise Refused(
                f"{records.num_open[tenant]} requests of yours are on their way, of {self.max_requests} at most "
                "(--max-requests): wait for some of them",
                status=429,
                category="server",
            )


def bytes_of(records: Records, tenant: str) -> int:
    """Return what a tenant's checkpoints take on disk."""
    return sum(each.num_bytes for each in records.checkpoints.values() if each.tenant == tenant)
