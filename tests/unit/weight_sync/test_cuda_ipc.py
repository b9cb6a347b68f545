"""Memory that is lent: on a CPU through a file in shared memory, with the calls that a GPU would see."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from skyrl_train.errors import EngineError
from skyrl_train.weight_sync.cuda_ipc import Export, import_copy

CPU = torch.device("cpu")


def test_a_borrower_has_a_copy_that_outlives_the_loan() -> None:
    flat = torch.arange(2048).to(torch.uint8)
    loan = Export(flat)
    copy = import_copy(loan.handles, CPU, len(flat))
    path = Path(loan.handles["cpu"][0])
    assert path.exists()
    loan.close()
    loan.close()
    assert not path.exists()
    assert torch.equal(copy, flat)


def test_an_importer_on_a_device_on_which_nobody_exports_is_told_where_they_do() -> None:
    with pytest.raises(EngineError, match=r"exported on GPU-1, GPU-7, but an engine computes on cpu.*=shared_memory"):
        import_copy({"GPU-7": [], "GPU-1": []}, CPU, 8)
