import json
import tracemalloc

import pytest

from skyrl_train.telemetry.trackers.learning_curve import draw_learning_curve, running_mean


def write_records(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_without_records_nothing_is_drawn(tmp_path):
    assert not draw_learning_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png", title="run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_png_is_drawn_from_few_points_from_many_and_with_gaps(tmp_path):
    few = [
        {"step": 0, "eval/accuracy": 0.25},
        {"step": 1, "reward/mean": None, "response_length/mean": 12.0},
        {"step": 2, "reward/mean": 0.5, "env/solved": 0.5, "eval/accuracy": 0.95},
    ]
    many = [{"step": step, "reward/mean": step / 100, "env/solved_first_turn": 0.5} for step in range(1, 100)]
    for number, records in enumerate((few, many)):
        write_records(tmp_path / "metrics.jsonl", records)
        image = tmp_path / f"{number}.png"
        assert draw_learning_curve(tmp_path / "metrics.jsonl", image, title="run")
        assert image.read_bytes().startswith(b"\x89PNG")
        assert image.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("width", "expected"), [(1, [0.0, 3.0, 6.0, 3.0]), (3, [1.5, 3.0, 4.0, 4.5]), (9, [3.0, 3.0, 3.0, 3.0])]
)
def test_the_running_mean_is_centred_and_shorter_at_the_ends(width, expected):
    assert running_mean([0.0, 3.0, 6.0, 3.0], width) == expected


def test_the_running_mean_of_a_long_run_takes_the_memory_of_its_values():
    values = [float(number) for number in range(20_000)]
    tracemalloc.start()
    try:
        means = running_mean(values, 1_001)
        assert tracemalloc.get_traced_memory()[1] < 100 * len(values) * 8
    finally:
        tracemalloc.stop()
    assert means[10_000] == values[10_000]
