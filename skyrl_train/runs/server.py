"""The server of Tinker's API, constructed: its models, in this process or on Ray, its service, its sockets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_train.config import RunConfig
from skyrl_train.config.data import ImagesConfig
from skyrl_train.config.derived import LearnerSettings
from skyrl_train.config.models import GeneratorConfig, StrategyConfig
from skyrl_train.endpoints import listening
from skyrl_train.runs.drive import open_folder, uncollected

if TYPE_CHECKING:
    from skyrl_train.serve import ServedModels


Served = tuple[LearnerSettings, GeneratorConfig, ImagesConfig]
"""What a base is made from: what trains, what samples, and what bounds the images that clients send."""


def serve(
    run: RunConfig,
    bases: Mapping[str, Served],
    *,
    folder: Path,
    tenants: Mapping[str, str],
    host: str,
    port: int,
    max_adapters: int,
    max_bytes: int,
    max_requests: int,
    full_for: str,
    models_in_memory: int,
    announce: Callable[[int, str], None],
) -> None:
    """Answers clients of Tinker's API until the process is told to end.

    Args:
        run: Of the process, and of the first base; see `for_server`.
        bases: By their names for clients.
        folder: Journal and adapters; one server at a time.
        tenants: By key.
        max_adapters: Of each tenant, as are `max_bytes` and `max_requests`; see `serve.Limits`.
        full_for: The tenant that may train all weights of a model; empty for nobody.
        models_in_memory: Of which more wait on disk until they are asked for.
        announce: Told the port and the first base's name before the first request can be answered.

    Raises SkyrlTrainError for whatever the user can fix: no schema of messages, no weights.
    """
    with uncollected():
        from skyrl_train.runs.task import prepare_process

    prepare_process(run)
    with open_folder(run).locked(), ExitStack() as stack:
        with uncollected():
            import uvicorn

            from skyrl_train.serve import Limits, RunFolders, Service, make_app, schema

            schema()  # raises where there is none, before models are loaded
            models = _load(run, bases, folder, stack)
        limits = Limits(max_adapters=max_adapters, max_bytes=max_bytes, max_requests=max_requests, full_for=full_for)
        service = Service(models, folder, seed=run.seed, limits=limits, models_in_memory=models_in_memory)

        def text_of(base: str, tokens: Sequence[int]) -> str:
            return str(service.bases.of(base).tokenizer.decode(list(tokens)))

        shown = RunFolders(service.records, folder, text_of)
        service.ledger.on_settled = shown.take
        listener = uvicorn.Config(
            make_app(service, tenants),
            host=host,
            port=port,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=3,
        )
        socket = listener.bind_socket()
        announce(listening(socket), next(iter(bases)))
        try:
            uvicorn.Server(listener).run(sockets=[socket])
        finally:
            shown.close()


def _load(run: RunConfig, bases: Mapping[str, Served], folder: Path, stack: ExitStack) -> Mapping[str, ServedModels]:
    """Return the models of each base, once they are loaded; `stack` ends what they are in."""
    from skyrl_train.serve import Models

    given = {
        # A worker computes by itself, whatever there is beside it.
        name: (replace(settings, strategy=StrategyConfig()), generator, images)
        for name, (settings, generator, images) in bases.items()
    }
    if run.placement.backend == "inline":
        return {name: Models(*each) for name, each in given.items()}
    from skyrl_train.runs.construction.on_ray import start_served_models

    return start_served_models(given, run.placement, folder, stack, run_name=run.run_name)
