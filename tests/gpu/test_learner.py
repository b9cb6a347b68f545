"""What a learner promises on CUDA devices: the size of masks, the kernels of attention, identical resume, its out-of-memory
errors. Layouts, dtypes and strategies against float64 are cases of the self-test, each of which is a test, too."""

from __future__ import annotations

from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from skyrl_train.batch.layouts import Segment
from skyrl_train.batch.steps import close_mini_batch
from skyrl_train.config.fields import LayoutChoice
from skyrl_train.config.models import LoraConfig, ModelConfig
from skyrl_train.distributed import is_out_of_memory
from skyrl_train.model import load_causal_lm
from skyrl_train.model.layers import Segments, flex, segment_attention, set_numerics
from skyrl_train.model.lora import add_adapter
from skyrl_train.selftest.fixtures import gradient_of, make_learner, make_rows, relative_error, save_model
from tests.reliability.kill_and_resume import main as kill_and_resume

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

MIB = 1 << 20


@pytest.fixture
def device() -> torch.device:
    set_numerics(deterministic=False)
    torch.cuda.init()  # statistics of a device that nothing has used yet cannot be reset
    torch.cuda.empty_cache()
    return torch.device("cuda:0")


PROMPT, OWN = 98_304, 2_048


def shared_prompt() -> Segments:
    """131,072 positions: 16 samples of one prompt."""
    stops = list(accumulate([OWN] * 16, initial=PROMPT))
    samples = (Segment(start, stop, stop) for start, stop in pairwise(stops))
    return Segments((Segment(0, PROMPT, stops[-1]), *samples), PROMPT + OWN)


def test_the_mask_of_131072_positions_takes_megabytes_of_the_device(device: torch.device) -> None:
    """51 GB where positions times positions are held."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    mask = shared_prompt().block_mask(device)
    assert mask.shape[-1] == 131_072
    assert torch.cuda.max_memory_allocated(device) - before <= 64 * MIB


def test_a_tree_of_131072_positions_is_attended_to(device: torch.device) -> None:
    """The last queries of its last sample, against plain products over the keys that they see."""
    generator = torch.Generator(device).manual_seed(0)
    query, key, value = (
        torch.randn(1, 2, 131_072, 64, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(3)
    )
    found = flex(query, key, value, shared_prompt(), scale=64**-0.5, window=None, softcap=None, compiled=True)
    keys, values = (torch.cat([each[:, :, :PROMPT], each[:, :, -OWN:]], 2).float() for each in (key, value))
    scores = (query[:, :, -64:].float() * 64**-0.5) @ keys.transpose(2, 3)
    position = torch.arange(PROMPT + OWN, device=device)
    scores = scores.masked_fill(position > position[-64:, None], -torch.inf)
    assert float((found[:, :, -64:].float() - scores.softmax(-1) @ values).abs().max()) < 2e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_padded_rows_never_runs_by_cudnn_or_plain_products(
    device: torch.device, dtype: torch.dtype
) -> None:
    """cuDNN plans anew for each padded length; grouped heads in float32 would fall to products of all pairs."""
    names: set[str] = set()
    for positions in (97, 128, 200, 333):
        query, key, value = (
            torch.randn(2, heads, positions, 64, device=device, dtype=dtype, requires_grad=True) for heads in (8, 2, 2)
        )
        row = Segments((Segment(0, positions, positions),), positions)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            out, _ = segment_attention(torch.nn.Identity(), query, key, value, None, segments=row)
            out.sum().backward()
        names |= {event.key for event in seen.key_averages()}
    assert not [name for name in names if "cudnn_attention" in name or "attention_math" in name], sorted(names)
    assert [name for name in names if "flash_attention" in name or "efficient_attention" in name], sorted(names)


@pytest.mark.parametrize("layout", ["packed", "prefix_shared"])
def test_an_adapter_with_dropout_learns_as_on_a_cpu(device: torch.device, tmp_path: Path, layout: LayoutChoice) -> None:
    """Which inputs are dropped follows from rows and tokens, and the last layer is narrowed there and here."""
    found = [_adapter_gradient(save_model(tmp_path / name), name, layout) for name in ("cpu", str(device))]
    assert relative_error(found[1], found[0]) < 1e-4


def _adapter_gradient(folder: Path, device: str, layout: LayoutChoice) -> torch.Tensor:
    model = load_causal_lm(ModelConfig(path=str(folder)), "cpu")
    add_adapter(model, LoraConfig(rank=4, alpha=8.0, dropout=0.1), seed=0)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if "lora_B" in name:
                each.copy_(torch.arange(each.numel()).view_as(each).remainder(7).float().sub(3).mul(0.02))
    learner = make_learner(model, device, layout=layout)
    rows = make_rows()
    scored = learner.forward(rows)
    rows = rows.with_columns(old_logprobs=scored, ref_logprobs=scored)
    learner.forward_backward(close_mini_batch(rows, loss_reduction="token_mean", max_sequence_length_for_norm=256))
    return gradient_of(learner)


def test_running_out_of_memory_is_recognised(device: torch.device) -> None:
    total = torch.cuda.get_device_properties(device).total_memory
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2 * total, dtype=torch.uint8, device=device)
    assert is_out_of_memory(raised.value)


def test_a_killed_run_ends_like_one_that_was_not(capsys: pytest.CaptureFixture[str]) -> None:
    """The main command on all devices that there are, engines included, with `deterministic=true`."""
    assert kill_and_resume(["--kills", "2", "--seed", "1", "--kind", "gpu"]) == 0, capsys.readouterr().out
