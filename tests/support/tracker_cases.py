"""The rollouts that trackers are given."""

from __future__ import annotations

from skyrl_train.types import Failure, FailureKind, Outcome, Prompt, RolloutBatch, StopReason, Trajectory, Turn


def rollouts() -> RolloutBatch:
    """Two prompts, two samples each; the first of the second prompt failed."""

    def turn(text: str, **more: object) -> Turn:
        fixed = {"added_token_ids": [1], "response_token_ids": [2, 3], "stop_reason": StopReason.STOP}
        return Turn(**fixed, response_text=text, reward=0.5, weight_versions=((0, 0),), **more)  # type: ignore[arg-type]

    def sample(uid: str, index: int, *turns: Turn, failure: Failure | None = None) -> Trajectory:
        outcome = Outcome.FAILED if failure else Outcome.DONE
        return Trajectory(prompt_uid=uid, sample_index=index, turns=turns, outcome=outcome, failure=failure)

    broken = Failure(kind=FailureKind.ENVIRONMENT_ERROR, message="it broke", turn_index=0)
    seen = ({"role": "user", "content": "no"},)
    prompts = tuple(Prompt(uid=uid, messages=({"role": "user", "content": f"{uid}?"},)) for uid in "pq")
    trajectories = (
        sample("p", 0, turn("first", observations=seen), turn("second")),
        sample("p", 1, turn("other")),
        sample("q", 0, failure=broken),
        sample("q", 1, turn("fine")),
    )
    return RolloutBatch(prompts=prompts, trajectories=trajectories, n_samples_per_prompt=2)
