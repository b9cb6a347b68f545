"""How one trajectory is made."""

from dataclasses import replace

from skyrl_train.rollout import multi_turn


async def handicapped(episode, *, turns=1):
    """Every other sample of a prompt gets fewer turns, so that the first ones learn to do without a second try."""
    if episode.job.sample_index % 2:
        episode = replace(episode, limits=replace(episode.limits, max_turns=turns))
    return await multi_turn(episode)
