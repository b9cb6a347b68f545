"""A server of Tinker's API on this package's learner, engine and checkpoints."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.serve.app import make_app as make_app
    from skyrl_train.serve.images import served_images as served_images
    from skyrl_train.serve.limits import Limits as Limits
    from skyrl_train.serve.models import (
        BaseFacts as BaseFacts,
        ModelFacts as ModelFacts,
        Models as Models,
        Rows as Rows,
        Sampled as Sampled,
        Saved as Saved,
        ServedModels as ServedModels,
    )
    from skyrl_train.serve.run_folders import RunFolders as RunFolders
    from skyrl_train.serve.service import Service as Service
    from skyrl_train.serve.wire import schema as schema

__getattr__ = lazily(__name__)
