"""The real server of Tinker's API behind its wire, with clients that ask again, adapters that are integers, and an engine.

Each client knows what every one of its requests must come to, since it computes the same: an optimizer step that was made
twice, or left out, shows in the next answer.
"""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from skyrl_train.errors import EngineError, SaveError, SkyrlTrainError
from skyrl_train.interfaces import HeldState
from skyrl_train.serve import BaseFacts, Models, Service, models, sampling, verbs
from skyrl_train.serve.refusals import Refused
from skyrl_train.system.files import log_lines, write_hashed
from skyrl_train.telemetry import Last
from skyrl_train.types import GenerationOutput, GenerationRequest, StopReason
from tests.world.disk import ROOT
from tests.world.faults import Machine
from tests.world.machine import LawBroken, Namespace, Process, World
from tests.world.seams import simulated
from tests.world.training import digest

FOLDER = Path(ROOT) / "server"
BASE = "local/base"
_MODULUS = (1 << 50) - 27
_ADAPTERS, _MOST_CLIENTS, _SAMPLED = 2, 3, 4
_CALL_TIMEOUT_S = 30.0
_MOST_POLLS = 60
"""Twice as long as a request waits for one before it that never comes."""


def answer_to(state: int, prompt: tuple[int, ...], index: int) -> list[int]:
    """Tokens that an adapter in this state samples."""
    return [digest(state, prompt, index, place) % 50 for place in range(3)]


class Adapter:
    """A state and a gradient; what the server takes for a learner."""

    def __init__(self, seed: int) -> None:
        self.state, self.gradient, self.engine = 1 + seed % 1000, 0, self

    def add(self, number: int) -> int:
        self.gradient = (self.gradient * 31 + number) % _MODULUS
        return self.gradient

    def optim_step(self, step: Any) -> dict[str, Any]:
        del step
        self.state, self.gradient = (self.state * 1_000_003 + self.gradient) % _MODULUS, 0
        return {"policy/state": Last(float(self.state))}

    def hold_state(self, *, copies: bool, leaves_gradient: bool) -> HeldState:
        del copies, leaves_gradient
        content = [json.dumps(self.state).encode()]

        def write(folder: Path) -> dict[str, tuple[int, str]]:
            folder.mkdir(parents=True)
            names = ("adapter.json", "optimizer.safetensors")
            return {name: write_hashed(folder / name, content) for name in names}

        return HeldState(is_copied=False, write=write)

    def load(self, folder: Path, *, with_optimizer: bool) -> None:
        del with_optimizer
        self.state, self.gradient = json.loads((folder / "adapter.json").read_text()), 0


class Engine:
    """Answers for the adapters that it holds."""

    def __init__(self, world: World, fails: float) -> None:
        self._world, self.fails, self.adapters = world, fails, {}  # type: ignore[var-annotated]
        self.adapters: dict[str, int]

    def load_adapter(self, name: str, lora: object, state: int) -> None:
        del lora
        self._world.sleep(self._world.random("engine").random(), "an adapter's load")
        self._world.event("message", f"load {name}")
        self.adapters[name] = state
        if len(self.adapters) > _ADAPTERS + _MOST_CLIENTS * _SAMPLED:
            raise LawBroken(
                f"{len(self.adapters)} adapters in an engine of {_ADAPTERS}, and each client samples from {_SAMPLED}"
            )

    def unload_adapter(self, name: str) -> None:
        self._world.event("message", f"unload {name}")
        del self.adapters[name]

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        draw = self._world.random("engine")
        await asyncio.sleep(draw.expovariate(0.5))
        self._world.event("message", f"answer {request.request_id}")
        if draw.random() < self.fails and self._world.fault("engine", request.request_id):
            raise EngineError("the engine failed")
        if request.adapter and request.adapter not in self.adapters:
            raise LawBroken(f"{request.adapter} was taken from the engine while it sampled")
        state = self.adapters.get(request.adapter, 0)
        tokens = answer_to(state, request.prompt_token_ids, int(request.request_id.rpartition(":")[2]))
        return GenerationOutput(
            token_ids=tuple(tokens), logprobs=(-0.5,) * 3, stop_reason=StopReason.STOP, weight_version=0
        )

    def close(self) -> None: ...


class ToyModels(Models):
    """Adapters of numbers; what is kept, loaded, evicted and saved is the server's own."""

    def __init__(self, world: World, engine_fails: float) -> None:
        self._world = world
        self.learners = SimpleNamespace(  # type: ignore[assignment]
            create=lambda name, lora, *, seed, optimizer: Adapter(seed),
            remove=lambda name: None,
            targets=lambda **_: ("q_proj",),
        )
        self._trained, self.engine = {}, Engine(world, engine_fails)  # type: ignore[assignment]
        self.about = BaseFacts(architecture="toy", vocabulary=50, max_length=64, full_bytes=800, is_deterministic=False)
        self._in_engine, self._in_use, self._loading = OrderedDict(), {}, asyncio.Lock()
        self._full_engine, self._sampler = models._FullEngine(), None

    def rows(self, request: Any, images: Any = None) -> Any:
        """What a pass computes, where passes are computed together."""
        return SimpleNamespace(of_targets=SimpleNamespace(batch=True), backward=True, number=request.number)

    def forward_backward(self, name: str, request: Any) -> bytes:
        self._world.sleep(self._world.random("learner").random(), "a pass")
        self._world.event("message", f"pass of {name}")
        adapter: Any = self._trained[name]
        return json.dumps(adapter.add(request.number)).encode()

    def together(self, asked: dict[str, Any]) -> dict[str, bytes]:
        return {name: self.forward_backward(name, request) for name, request in asked.items()}


def _data(found: Any) -> Any:
    return json.loads(base64.b64decode(found["data"]))


class Client:
    """Trains an adapter, samples from what it saved, and asks again for whatever has no answer."""

    def __init__(self, here: ServingWorld, number: int) -> None:
        self._here, self._world, self.tenant = here, here.world, f"tenant{number % 2}"
        self._draw = here.world.random(f"client{number}")
        self.is_done = False

    def run(self) -> None:
        session = self._ask(lambda service: service.create_session(self.tenant, {}))["session_id"]
        wanted = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 4, "seed": 5}}
        promise = self._ask(lambda service: service.create_model(self.tenant, wanted))
        model = self._outcome(promise)["json"]["model_id"]
        adapter, seq, saved = Adapter(5), 1, {}  # type: ignore[var-annotated]
        for round_number in range(self._here.rounds):
            sent: list[tuple[str, int, dict[str, Any], bytes, Callable[[Any], object], object]] = []
            for _ in range(self._draw.randrange(1, 4)):
                value = self._draw.randrange(1000)
                body, expected = str(value).encode(), adapter.add(value)
                sent.append(("forward_backward", seq + len(sent), {}, body, _data, expected))
            adapter.optim_step(None)
            state = float(adapter.state)
            sent.append(
                ("optim_step", seq + len(sent), {}, b"", lambda found: found["json"]["metrics"]["state:mean"], state)
            )
            sampler, numbered = f"{session}:sample:{round_number}", {"sampling_session_seq_id": round_number}
            made = "save_weights_for_sampler"
            sent.append(
                (made, seq + len(sent), numbered, b"", lambda found: found["json"]["sampling_session_id"], sampler)
            )
            saved[sampler] = adapter.state
            if self._draw.random() < 0.3:
                named = {"path": f"round{round_number}"}
                path = f"tinker://{model}/weights/round{round_number}"
                sent.append(("save_weights", seq + len(sent), named, b"", lambda found: found["json"]["path"], path))
            seq += len(sent)
            self._draw.shuffle(sent)  # the network keeps no order
            promises = []
            for verb, number, content, body, read, expected in sent:
                asked = {"tenant": self.tenant, "verb": verb, "model_id": model, "seq_id": number}
                promise = self._ask(partial(Service.submit, **asked, content=content, body=body))
                promises.append((verb, promise, read, expected))
            for verb, promise, read, expected in promises:
                found = self._outcome(promise)
                if self._here.rates.full_disk and verb.startswith("save") and found.get("category") == "server":
                    saved.pop(sampler if verb == made else "", None)
                elif "error" in found or read(found) != expected:
                    raise LawBroken(f"{promise['request_id']} came to {found}, and must to {expected}")
            self._sample(list(saved.items())[-_SAMPLED:], round_number)
        self.is_done = True

    def _sample(self, samplers: list[tuple[str, int]], number: int) -> None:
        promises = []
        for sampler, state in samplers:
            prompt = [self._draw.randrange(50) for _ in range(3)]
            asked = {
                "sampling_session_id": sampler,
                "seq_id": number,
                "prompt": {"chunks": [{"tokens": prompt}]},
                "sampling_params": {"max_tokens": 8},
            }
            promises.append(
                (
                    self._ask(lambda service, asked=asked: service.sample(self.tenant, asked)),
                    answer_to(state, tuple(prompt), 0),
                )
            )
            if self._draw.random() < self._here.cancels:
                request_id = promises.pop()[0]["request_id"]
                self._world.sleep(self._draw.expovariate(1.0), "a change of mind")
                self._ask(lambda service, name=request_id: service.cancel(self.tenant, name))
        for promise, expected in promises:
            found = self._outcome(promise)
            if self._here.engine_fails and found.get("category") == "server":
                continue
            if "error" in found or _data(found) != [expected]:
                raise LawBroken(f"{promise['request_id']} sampled {found}, and must {expected}")

    def _outcome(self, promise: Any) -> Any:
        first: Any = None
        for _ in range(2 if self._draw.random() < 0.2 else 1):  # who asks twice is told the same
            for _ in range(_MOST_POLLS):
                found = self._ask(lambda service: service.retrieve(self.tenant, promise["request_id"], timeout_s=20.0))
                if found is not None:
                    break
            else:
                raise LawBroken(f"{promise['request_id']} has no outcome after {_MOST_POLLS} polls of 20 s")
            found = {name: value for name, value in found.items() if name != "write"}  # the journal's own
            if first is not None and found != first:
                raise LawBroken(f"{promise['request_id']} came to {first}, then to {found}")
            first = found
        return first

    def _ask(self, make: Callable[[Service], Coroutine[Any, Any, Any]]) -> Any:
        """Send a request until it has an answer."""
        world, here, draw = self._world, self._here, self._draw
        for _ in range(2000):
            world.sleep(draw.expovariate(20.0), "the network")
            service, process, loop = here.service, here.process, here.loop
            if service is None or loop is None or process is None or process.is_dead:
                world.sleep(0.5, "the server's start")
                continue
            if draw.random() < here.parts and world.fault("part", f"the network of {self.tenant}"):
                world.sleep(draw.expovariate(0.02), "a network that is parted")
            if draw.random() < here.drops and world.fault("drop", "a request"):
                world.sleep(1.0, "a request that is lost")
                continue
            world.event("message", f"to the server, of {self.tenant}")
            calls = [asyncio.run_coroutine_threadsafe(make(service), loop)]
            if draw.random() < here.duplicates and world.fault("twice", "a request comes twice"):
                calls.append(asyncio.run_coroutine_threadsafe(make(service), loop))
            waited = 0.0
            while not calls[0].done() and not process.is_dead and here.service is service and waited < _CALL_TIMEOUT_S:
                concurrent.futures.wait(calls[:1], timeout=1.0)
                waited += 1.0
            if not calls[0].done() or (draw.random() < here.drops and world.fault("drop", "an answer")):
                continue
            try:
                return calls[0].result()
            except Refused as refused:
                if refused.status not in (429, 503):
                    raise LawBroken(f"refused: {refused}") from refused
                here.is_worn = here.is_worn or refused.status == 503
            except SaveError:
                here.is_worn = True
            except (SkyrlTrainError, concurrent.futures.CancelledError):
                continue  # the server ends
        raise LawBroken("a client had no answer to a request that it sent 2000 times")


class ServingWorld(Machine):
    """A server and its clients, from the first start until all that was asked is answered."""

    def __init__(self, seed: int, *, keeps_log: bool = False, allowed: frozenset[int] | None = None) -> None:
        super().__init__(World(seed, keeps_log=keeps_log, allowed=allowed))
        draw = self.world.random("serving")
        self.drops, self.duplicates = draw.choice((0.0, 0.05)), draw.choice((0.0, 0.1, 0.3))
        self.cancels, self.rounds = draw.choice((0.0, 0.3)), draw.choice((2, 4))
        self.anchor_every = draw.choice((1, 3, 20))
        self.num_clients = draw.choice((1, 2, _MOST_CLIENTS))
        self.parts, self.engine_fails = draw.choice((0.0, 0.0, 0.01)), draw.choice((0.0, 0.0, 0.05))
        self.service: Service | None = None
        self.loop: Any = None
        self.is_worn = False
        """The server's disk was full, and it takes nothing more."""
        self.is_over = False
        """All clients are done."""
        self._ends: asyncio.Event | None = None

    @property
    def swarm(self) -> str:
        """What was drawn, for a person."""
        names = ("drops", "duplicates", "cancels", "rounds", "anchor_every", "num_clients", "parts", "engine_fails")
        return f"{self.rates}, { ({name: getattr(self, name) for name in names}) }"

    def stop(self) -> None:
        if self._ends is not None and self.loop is not None:
            self.loop.call_soon_threadsafe(self._ends.set)

    def run(self) -> ServingWorld:
        LawBroken.first.clear()
        with simulated(self.world, self.disk), _without_wire():
            clients = [Client(self, number) for number in range(self.num_clients)]
            outside = Process("clients")
            fibers = [self.world.start(f"client{number}", each.run, outside) for number, each in enumerate(clients)]
            while not all(each.is_done for each in fibers):
                self._attempt(fibers)
                if self.num_starts > 4 * self.rates.max_kills + 40:
                    raise LawBroken(f"{self.num_starts} starts of the server, and no end: {dict(self.outcomes)}")
            if outside.error is not None:
                raise outside.error
            if not all(each.is_done for each in clients):
                raise LawBroken("a client ended early")
            self._check_journal()
        return self

    def _attempt(self, fibers: list[Any]) -> None:
        process = self.begin("server")
        self.is_worn = False
        main = self.world.start("main", self._main, process)
        while not main.is_done and not process.is_dead:
            self.world.sleep(1.0, "the clients")
            if self.world.stuck:
                raise LawBroken(self.world.stuck)
            if all(each.is_done for each in fibers) or self.is_worn or LawBroken.first:
                self.is_over = all(each.is_done for each in fibers)
                self.stop()
                self.world.join(main, 600.0)
                break
        self.service = self.loop = self._ends = None
        error, is_late = process.error, not main.is_done and not process.is_dead
        if self.end(process):
            return
        if is_late:
            raise LawBroken("the server did not end within 600 s of a signal")
        if error is not None:
            is_disk = self.rates.full_disk or self.rates.slow_disk
            if not (is_disk and isinstance(error, (SkyrlTrainError, OSError))):
                raise LawBroken(f"the server ended by {type(error).__name__}: {error}") from error
            self.outcomes[type(error).__name__] += 1
            return
        self.outcomes["ended"] += 1

    def _main(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        made = ToyModels(self.world, self.engine_fails)
        service = Service({BASE: made}, FOLDER, seed=0, anchor_every=self.anchor_every)
        self._ends = asyncio.Event()
        await service.start()
        self.service = service
        await self._ends.wait()
        self.service = None
        await asyncio.sleep(1.0)
        if self.is_over and set(made.engine.adapters) != set(made._in_engine):
            raise LawBroken(
                f"the engine holds {sorted(made.engine.adapters)}, and the server knows {sorted(made._in_engine)}"
            )
        await service.close()
        if made._in_use:
            raise LawBroken(f"the server has ended, and adapters are in use: {made._in_use}")

    def _check_journal(self) -> None:
        lines = [line for _, line in log_lines(FOLDER / "journal.jsonl")]
        accepted = Counter(line["accept"] for line in lines if "accept" in line)
        settled = Counter(line["outcome"] for line in lines if "outcome" in line)
        twice = [name for name, count in (accepted + Counter()).items() if count > 1] + [
            n for n, c in settled.items() if c > 1
        ]
        if twice:
            raise LawBroken(f"the journal has {twice} twice")


@contextmanager
def _without_wire() -> Iterator[None]:
    """Bodies are numbers, not protobuf messages, and an engine has room for few adapters."""
    real = models._ADAPTERS_IN_ENGINE, models.read_model, verbs.wire, sampling.sample_response
    models._ADAPTERS_IN_ENGINE = _ADAPTERS
    models.read_model = lambda folder: json.loads((folder / "adapter.json").read_text())
    verbs.wire = Namespace(
        verbs.wire, parsed_protobuf=lambda body: body, decoded=lambda body: SimpleNamespace(number=int(body))
    )
    sampling.sample_response = lambda outputs, **_: json.dumps([list(each.token_ids) for each in outputs]).encode()
    try:
        yield
    finally:
        models._ADAPTERS_IN_ENGINE, models.read_model, verbs.wire, sampling.sample_response = real
