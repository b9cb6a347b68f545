"""Pictures on their way into a model."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.model.vision.models import (
        add_vision,
        family_of,
        freeze_vision,
        showing,
        shown,
        shown_prompts,
        vision_of,
    )

__all__ = ["add_vision", "family_of", "freeze_vision", "showing", "shown", "shown_prompts", "vision_of"]

__getattr__ = lazily(__name__)
