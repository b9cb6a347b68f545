"""The server of Tinker's API, constructed: its models, its service, its sockets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from skyrl_train.config import RunConfig
from skyrl_train.config.derived import LearnerSettings
from skyrl_train.config.models import GeneratorConfig, PlacementConfig
from skyrl_train.endpoints import listening
from skyrl_train.errors import ConfigError, Violation
from skyrl_train.runs.drive import open_folder, uncollected


def require_served(generator: GeneratorConfig, placement: PlacementConfig) -> None:
    """Raises ConfigError for an engine or a placement that the server has not."""
    if generator.backend != "hf" or placement.backend != "inline":
        rule, remedy = "must be hf, with placement=inline: adapters side by side are served so far", "set generator=hf"
        raise ConfigError([Violation.of("generator.backend", str(generator.backend), rule, remedy)])


def serve(
    run: RunConfig,
    bases: Mapping[str, tuple[LearnerSettings, GeneratorConfig]],
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
        run: Of the process, and of the first base.
        bases: What trains and what samples, by their names for clients.
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
    with open_folder(run).locked():
        with uncollected():
            import uvicorn

            from skyrl_train.serve import Limits, Models, RunFolders, Service, make_app, schema

            schema()  # raises where there is none, before models are loaded
            models = {name: Models(*each) for name, each in bases.items()}
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
