"""What requests in JSON may ask for: each field with its range, and what is made of it. Unknown fields are passed over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from skyrl_train.learner import AdamWStep
from skyrl_train.serve.models import MAX_RANK, ModelFacts
from skyrl_train.serve.refusals import Refused
from skyrl_train.system.files import shown
from skyrl_train.types import SamplingParams

Whole = Annotated[int, Field(ge=0, lt=2**53)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1)]
T = TypeVar("T", bound=BaseModel)


class Asked(BaseModel):
    """A part of a request."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


def checked(kind: type[T], content: object, where: str) -> T:
    """Return the part. Raises Refused naming the first field that is wrong."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(map(str, (where, *first["loc"])))
        raise Refused(f"{field[:100]}: {first['msg']}; got {shown(first['input'])}") from None


class Adapter(Asked):
    """`lora_config`. The output head is not adapted, whatever `train_unembed` says."""

    rank: Annotated[int, Field(ge=1, le=MAX_RANK)]
    seed: Seed | None = None
    train_attn: bool = True
    train_mlp: bool = True

    def facts(self, seed: int, base: str) -> ModelFacts:
        """Return the adapter on a base, of this seed where the request states none. Raises Refused."""
        if not self.train_attn and not self.train_mlp:
            raise Refused("lora_config: train_attn or train_mlp must be true; the output head is not adapted here")
        own = seed if self.seed is None else self.seed % 2**63
        return ModelFacts(rank=self.rank, seed=own, train_attn=self.train_attn, train_mlp=self.train_mlp, base=base)


class Adam(Asked):
    """`adam_params` of an `optim_step`, with the ranges that are accepted."""

    learning_rate: Number = 1e-4
    beta1: Beta = 0.9
    beta2: Beta = 0.95
    eps: Number = 1e-12
    weight_decay: Number = 0.0
    grad_clip_norm: Number = 0.0
    type: Annotated[str, Field(pattern="^adamw$")] = "adamw"

    def step(self) -> AdamWStep:
        """Return the settings of the step."""
        return AdamWStep(
            lr=self.learning_rate,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
            weight_decay=self.weight_decay,
            max_grad_norm=self.grad_clip_norm,
        )


class Params(Asked):
    """`sampling_params` of an `asample`, with the ranges that are accepted."""

    temperature: Annotated[float, Field(ge=0, le=1000)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    seed: Seed | None = None
    stop: str | Annotated[list[str], Field(max_length=64)] | Annotated[list[Whole], Field(max_length=64)] | None = None

    def sampling(self, room: int) -> SamplingParams:
        """Return them for a prompt that leaves this room in the context."""
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k or -1,
            max_generate_length=min(room, self.max_tokens or room),
            stop=tuple(each for each in texts if isinstance(each, str) and each),
        )

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response."""
        return tuple(each for each in self.stop or () if isinstance(each, int))


Lifetime = Annotated[int, Field(ge=3600, le=315_360_000)] | None
"""Seconds, of one hour to ten years; None for ever."""


class TimeToLive(Asked):
    """What is said of how long a checkpoint lives."""

    ttl_seconds: Lifetime


class Copy(Asked):
    """`copy_weights`: into a slot of a session, or, with a project's name, which says nothing here, to a new run."""

    source_path: str
    session_id: str | None = None
    model_seq_id: Whole | None = None
    destination_project_id: str | None = None
    ttl_seconds: Lifetime = None

    @model_validator(mode="after")
    def _has_a_place(self) -> Copy:
        if (self.session_id is None) != (self.model_seq_id is None):
            raise ValueError("session_id and model_seq_id go together")
        if (self.session_id is None) == (self.destination_project_id is None):
            raise ValueError("either session_id and model_seq_id, or destination_project_id")
        return self


class Save(Asked):
    """What the three verbs that save have in common."""

    path: Any = None
    """A name; it is looked at when the verb is executed."""
    ttl_seconds: Lifetime = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    sampling_session_seq_id: Whole | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    age_encryption_recipients: Annotated[list[str], Field(max_length=0)] | None = None
    """Files are not encrypted here."""


class Sample(Asked):
    """What `asample` asks for: a prompt, so many samples, and how they are drawn."""

    sampling_session_id: str
    seq_id: Whole
    prompt: Mapping[str, Any]
    sampling_params: Params
    num_samples: Annotated[int, Field(ge=1, le=4096)] = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=100)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=100)] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    target_prompt_logprobs: Mapping[str, Any] | None = None
