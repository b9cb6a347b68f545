"""How new weights get to the engine."""

from skyrl_train.weight_sync import UpdatableEngine
from skyrl_train.weights import WeightSender


def one_file_each(route, buckets, *, folder="handover"):
    """Rank 0 writes a file for each bucket, in a folder beside the run's own, and every engine is told of it."""
    place = route.settings.files.parent / folder
    place.mkdir(exist_ok=True)
    for number, bucket in enumerate(buckets):
        written = route.senders.begin(WeightSender.write, "sync", bucket, place / f"{number}.bin")
        written.wait()
        route.engines.call(UpdatableEngine.update, "sync", written.passed_on())
        (place / f"{number}.bin").unlink()
