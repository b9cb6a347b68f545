"""Pictures on their way into a model."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.model.vision.models import (
        add_vision as add_vision,
        family_of as family_of,
        freeze_vision as freeze_vision,
        showing as showing,
        shown as shown,
        shown_prompts as shown_prompts,
        vision_of as vision_of,
    )

__getattr__ = lazily(__name__)
