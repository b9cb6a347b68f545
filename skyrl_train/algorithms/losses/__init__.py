"""Losses of policy and critic, with the ratios, KL estimates and off-policy corrections that they share."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.algorithms.inputs import PolicyLossInputs as PolicyLossInputs, PolicyLossOutput as PolicyLossOutput
    from skyrl_train.algorithms.losses.checks import check_loss_output as check_loss_output
    from skyrl_train.algorithms.losses.clipped import regular as regular
    from skyrl_train.algorithms.losses.critic import (
        ValueLossInputs as ValueLossInputs,
        explained_variance as explained_variance,
        value_loss as value_loss,
    )
    from skyrl_train.algorithms.losses.kl import token_kl as token_kl, unbiased_kl as unbiased_kl
    from skyrl_train.algorithms.losses.off_policy import (
        LARGEST_AGE_SHOWN as LARGEST_AGE_SHOWN,
        log_ratio_ledger as log_ratio_ledger,
        off_policy_weights as off_policy_weights,
        rejected as rejected,
    )
    from skyrl_train.algorithms.losses.policy import (
        is_tokenwise as is_tokenwise,
        policy_loss as policy_loss,
        with_proximal as with_proximal,
    )
    from skyrl_train.algorithms.losses.ratios import Turns as Turns, masked as masked, rows_of as rows_of
    from skyrl_train.algorithms.losses.sequence import (
        gspo as gspo,
        reads_sequences as reads_sequences,
        statistic_of as statistic_of,
    )

__getattr__ = lazily(__name__)
