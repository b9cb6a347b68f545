"""Machines as the self-test finds them: one without a GPU, and some with."""

from __future__ import annotations

from skyrl_train.selftest import Machine

CPU = Machine(
    device="cpu",
    devices=(),
    driver="",
    cuda="",
    versions={},
    unsupported=(),
    python="3.11",
    system="Linux",
    num_cpus=2,
)


def gpus(count: int) -> Machine:
    devices = tuple({"name": "GPU", "memory_bytes": 80 << 30, "uuid": str(i)} for i in range(count))
    return Machine(**{**vars(CPU), "device": "cuda", "devices": devices})
