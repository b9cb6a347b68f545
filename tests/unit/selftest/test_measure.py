"""`--measure`: its pieces on a CPU, what they leave in files, on a page and in the user's cache, and what ends early."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.batch.layouts import Measured, rates_of
from skyrl_train.config.models import RATE_NAMES
from skyrl_train.selftest.__main__ import main
from skyrl_train.selftest.measure import BEGIN, END, pieces, write
from skyrl_train.selftest.processes import CaseResult
from tests.support.machines import CPU, gpus

USUAL = "update/tiny/packed/eager/checkpointed/256"
H100 = replace(gpus(1), devices=({"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 80 << 30, "uuid": "0"},))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SKYRL_TRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rates"


def passed(name: str, **value: Any) -> CaseResult:
    return CaseResult(name=name, outcome="pass", detail="so fast", seconds=1.0, value=value)


@pytest.mark.slow
def test_pieces_of_a_cpu_leave_rates_and_fill_a_page(tmp_path: Path, cache: Path) -> None:
    page, output = tmp_path / "page.md", tmp_path / "measured"
    page.write_text(f"before\n\n{BEGIN}\nold\n{END}\n\nafter\n")
    chosen = ("products", "attention", USUAL, "copies")
    arguments = [word for name in chosen for word in ("--only", name)]
    assert main(["--measure", "--device", "cpu", "--output", str(output), "--docs", str(page), *arguments]) == 0
    found = json.loads((output / "rates.json").read_text())
    rows = {row["piece"]: row for row in found["pieces"]}
    assert set(rows) == {*chosen, "attention/flash/tiny", "attention/flex/tiny"} - {"attention"}
    assert all(row["outcome"] == "pass" for row in rows.values())
    assert found["device"] == "cpu"
    assert set(RATE_NAMES) < set(found["rates"])
    assert rates_of("cpu", found["rates"]).flex_flops == rows["attention/flex/tiny"]["flops"]
    assert rows[USUAL]["tokens_per_s"] > 0
    assert rows[USUAL]["predicted_bytes"] == pytest.approx(rows[USUAL]["peak_bytes"], rel=0.1)
    assert len(list((output / "profiles").glob("*.json.gz"))) == 1
    text = page.read_text()
    assert text.startswith("before")
    assert text.endswith(f"{END}\n\nafter\n")
    assert "old" not in text
    assert f"| `{USUAL}` |" in text
    assert not cache.exists(), "rates of a CPU decide nothing"


@pytest.mark.nightly
def test_every_piece_of_a_cpu_passes_but_for_those_that_other_tests_have(tmp_path: Path) -> None:
    """Compiled layers take minutes on a busy CPU: they are a case of the self-test; vLLM is one, too."""
    chosen = [case.name for case in pieces(CPU, tmp_path) if not case.arguments.get("compiled")]
    arguments = [word for name in chosen if name != "engine/vllm" for word in ("--only", name)]
    assert main(["--measure", "--device", "cpu", "--output", str(tmp_path / "out"), *arguments]) == 0
    found = json.loads((tmp_path / "out" / "rates.json").read_text())["pieces"]
    assert [each["piece"] for each in found] == [name for name in chosen if name != "engine/vllm"]
    assert all(each["outcome"] == "pass" for each in found)


def test_what_a_gpu_does_is_kept_for_runs_as_far_as_it_is_known(tmp_path: Path) -> None:
    cases = pieces(H100, tmp_path)
    results = [passed("products", linear_flops=6e14, kernel_s=4e-6, read_bytes=3e12)]
    write(cases, results, H100, tmp_path, None)
    assert Measured.of_device("NVIDIA H100 80GB HBM3") == Measured(), "attention is not known"
    results.append(passed("attention/flash/1.5B", flops=4e14))
    write(cases, results, H100, tmp_path, None)
    rates = Measured.of_device("NVIDIA H100 80GB HBM3").rates
    assert rates is not None
    assert rates["flex_flops"] == pytest.approx(4e14 * 3.5 / 6), "as much slower as is stated"
    results.append(passed("attention/flex/1.5B", flops=1e14))
    more = [case for case in cases if case.name.startswith(("update/1.5B/packed/eager/checkpointed/16384",
                                                            "update/1.5B/packed/compiled/checkpointed/16384"))]  # fmt: skip
    speed = {"eager": 100.0, "compiled": 130.0}
    results += [
        passed(case.name, hidden_size=1536, tokens_per_s=speed[case.name.split("/")[3]], flops=3e14) for case in more
    ]
    write([*cases[:3], *more], results, H100, tmp_path, None)
    measured = Measured.of_device("NVIDIA H100 80GB HBM3")
    assert measured.rates is not None
    assert measured.rates["flex_flops"] == 1e14
    assert measured.compiled_gain(1536, "packed") == pytest.approx(1.3)
    assert "so fast, MFU 50%" in (tmp_path / "rates.md").read_text()


def test_what_is_worth_most_comes_first_and_each_piece_has_a_name_of_its_own(tmp_path: Path) -> None:
    names = [case.name for case in pieces(H100, tmp_path)]
    assert len(set(names)) == len(names)
    assert names[:3] == ["products", "attention/flash/1.5B", "attention/flex/1.5B"]
    assert names[7] == "update/1.5B/packed/eager/checkpointed/16384"
    first = names[: names.index("copies")]
    for seen in ("0.5B/packed", "7B/packed", "1.5B/prefix_shared", "1.5B/padded", "packed/compiled", "kept", "262144"):
        assert any(seen in name for name in first), seen
    assert len(first) == 7 + 9
    assert sum(name.startswith("update/") for name in names) == 3 * 3 * 2 * 2 * 3
    assert USUAL in [case.name for case in pieces(CPU, tmp_path)][:4]


def test_a_rehearsal_on_a_gpu_has_the_sizes_of_a_cpu_and_decides_nothing(tmp_path: Path, cache: Path) -> None:
    cases = pieces(H100, tmp_path, tiny=True)
    assert cases == pieces(CPU, tmp_path)
    found = [passed("products", linear_flops=1.0, kernel_s=1.0, read_bytes=1.0)]
    found.append(passed("attention/flash/tiny", flops=1.0))
    write(cases, found, H100, tmp_path, None)
    assert json.loads((tmp_path / "rates.json").read_text())["rates"]["attention_flops"] == 1.0
    assert not cache.exists()


@pytest.mark.slow
def test_without_time_no_piece_is_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--measure", "--device", "cpu", "--budget", "0", "--output", str(tmp_path / "out")]) == 0
    assert "measured  0 of 30 pieces" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["nothing", f"{BEGIN}\nwhat a table would be written over", f"{END}\n{BEGIN}\n"])
def test_a_page_without_the_place_for_the_table_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["--measure", "--docs", str(page)])
    assert ended.value.code == 2
    assert "has no line <!-- measured" in capsys.readouterr().err
