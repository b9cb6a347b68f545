"""What must hold of batch sizes, beside the rules that there are."""

from skyrl_train.errors import Violation


def at_least(config, refused, *, sequences=8):
    """`refused`: names of settings whose value was no good, so that they carry their default here."""
    size = config.trainer.train_batch_size * config.generator.n_samples_per_prompt
    if size < sequences and "trainer.train_batch_size" not in refused:
        yield Violation(
            field="trainer.train_batch_size",
            rule=f"must give at least {sequences} sequences a batch",
            value=str(config.trainer.train_batch_size),
            remedy=f"try trainer.train_batch_size={-(-sequences // config.generator.n_samples_per_prompt)}",
        )
