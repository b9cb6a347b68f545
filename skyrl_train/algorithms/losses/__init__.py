"""Losses of policy and critic, with the ratios, KL estimates and off-policy corrections that they share."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.algorithms.inputs import PolicyLossInputs, PolicyLossOutput
    from skyrl_train.algorithms.losses.checks import check_loss_output
    from skyrl_train.algorithms.losses.clipped import regular
    from skyrl_train.algorithms.losses.critic import ValueLossInputs, explained_variance, value_loss
    from skyrl_train.algorithms.losses.kl import token_kl, unbiased_kl
    from skyrl_train.algorithms.losses.off_policy import (
        LARGEST_AGE_SHOWN,
        log_ratio_ledger,
        off_policy_weights,
        rejected,
    )
    from skyrl_train.algorithms.losses.policy import is_tokenwise, policy_loss, with_proximal
    from skyrl_train.algorithms.losses.ratios import Turns, masked, rows_of
    from skyrl_train.algorithms.losses.sequence import gspo, reads_sequences, statistic_of

__all__ = [
    "LARGEST_AGE_SHOWN",
    "PolicyLossInputs",
    "PolicyLossOutput",
    "Turns",
    "ValueLossInputs",
    "check_loss_output",
    "explained_variance",
    "gspo",
    "is_tokenwise",
    "log_ratio_ledger",
    "masked",
    "off_policy_weights",
    "policy_loss",
    "reads_sequences",
    "regular",
    "rejected",
    "rows_of",
    "statistic_of",
    "token_kl",
    "unbiased_kl",
    "value_loss",
    "with_proximal",
]

__getattr__ = lazily(__name__)
