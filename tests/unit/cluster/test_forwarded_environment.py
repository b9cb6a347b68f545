from __future__ import annotations

import os

import pytest

from skyrl_train.cluster.session import forwarded_environment


def test_actors_get_what_libraries_read_and_ray_sees_no_secret_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        monkeypatch.delenv(name)
    plain = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TORCH_LOGS": "recompiles",
        "RAY_DEDUP_LOGS": "0",
        "LD_LIBRARY_PATH": "/usr/local/cuda/lib64",
        "https_proxy": "http://proxy:3128",
        "NO_PROXY": "localhost",
    }
    secrets = {"HF_TOKEN": "hf_secret", "HTTPS_PROXY": "http://user:password@proxy:3128"}
    own = {"RAY_ADDRESS": "10.0.0.1:6379", "RAY_RAYLET_PID": "12", "RAY_AUTH_TOKEN": "t", "VLLM_HOST_IP": "10.0.0.1"}
    for name, value in {**plain, **secrets, **own, "HOME": "/root"}.items():
        monkeypatch.setenv(name, value)
    assert forwarded_environment(secret=False) == plain
    assert forwarded_environment(secret=True) == secrets
